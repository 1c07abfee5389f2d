# The hosted implementation: which Python it hosts, unless an application names another.
specrt_objects(hosted src/hosted)

set(SPECRT_PYTHON "" CACHE FILEPATH "Interpreter that has the Python package specrt")
if(NOT SPECRT_PYTHON AND CMAKE_CROSSCOMPILING)
  message(FATAL_ERROR "SPECRT_PYTHON is not set, and this build is for another machine; expected the "
    "path that its interpreter has there")
elseif(NOT SPECRT_PYTHON)
  find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)
  set(SPECRT_PYTHON "${Python3_EXECUTABLE}")
endif()
file(READ "${CMAKE_CURRENT_LIST_DIR}/libpython.py" SPECRT_LIBPYTHON_QUESTION)
if(NOT CMAKE_CROSSCOMPILING)
  execute_process(
    COMMAND "${SPECRT_PYTHON}" -I -c "${SPECRT_LIBPYTHON_QUESTION}"
    OUTPUT_VARIABLE SPECRT_LIBPYTHON OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE specrt_python_status)
  if(NOT specrt_python_status EQUAL 0)
    message(FATAL_ERROR "SPECRT_PYTHON is '${SPECRT_PYTHON}', which cannot be run "
      "(${specrt_python_status}); expected the path of an interpreter")
  endif()
  if(SPECRT_LIBPYTHON)
    message(STATUS "Hosting ${SPECRT_PYTHON} (${SPECRT_LIBPYTHON})")
  else()
    message(WARNING "${SPECRT_PYTHON} has no shared library: this build works only in applications "
      "that run Python already, or name another interpreter")
  endif()
endif()
set(specrt_configured "${CMAKE_CURRENT_BINARY_DIR}/configured")
configure_file("${CMAKE_CURRENT_SOURCE_DIR}/src/hosted/configured.hpp.in"
  "${specrt_configured}/hosted/configured.hpp" @ONLY)
target_include_directories(specrt_hosted PRIVATE "${specrt_configured}")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
  "${CMAKE_CURRENT_LIST_DIR}/libpython.py")
# Python calls it, and threads tell it of their end: it stays when an application lets go of it.
if(UNIX AND NOT APPLE)
  target_link_options(specrt_hosted INTERFACE -Wl,-z,nodelete)
endif()
