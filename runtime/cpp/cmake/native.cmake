# The native implementation: no Python. The CPU kernels are part of it; engine libraries are found
# here and loaded while it runs.
#
#   SPECRT_ONNXRUNTIME_ROOT     release of ONNX Runtime: its header is used, and its library
#   SPECRT_ONNXRUNTIME_LIBRARY  libonnxruntime.so to load where the application names none
#   SPECRT_TOKENIZER_LIBRARY    tokenizer library to load where the application names none
#   TENSORRT_ROOT               SDK of TensorRT; without it bundles of TensorRT are refused
specrt_objects(native src/kernels src/native src/native/bundle src/native/engine src/native/sampling
  src/native/speculation src/native/text src/speculation)

# The kernels' own flags come after those of the build type: one for small files would make passes
# take twice as long.
if(NOT SPECRT_SANITIZE)
  file(GLOB kernels ${CMAKE_CURRENT_SOURCE_DIR}/src/kernels/*.cpp)
  file(STRINGS src/kernels/compile_flags.txt kernel_flags)
  set_property(SOURCE ${kernels} PROPERTY COMPILE_OPTIONS ${kernel_flags})
endif()

foreach(name ONNXRUNTIME_ROOT TENSORRT_ROOT)
  if(NOT ${name} AND DEFINED ENV{${name}})
    set(${name} $ENV{${name}})
  endif()
endforeach()
set(SPECRT_ONNXRUNTIME_ROOT "${ONNXRUNTIME_ROOT}" CACHE PATH "Release of ONNX Runtime, or empty")
set(SPECRT_ONNXRUNTIME_LIBRARY "" CACHE STRING "libonnxruntime.so to load by default")
set(SPECRT_TOKENIZER_LIBRARY "" CACHE STRING "Tokenizer library to load by default")

set(onnxruntime_library "${SPECRT_ONNXRUNTIME_LIBRARY}")
if(SPECRT_ONNXRUNTIME_ROOT)
  find_path(SPECRT_ONNXRUNTIME_INCLUDE onnxruntime_c_api.h NO_DEFAULT_PATH
    PATHS ${SPECRT_ONNXRUNTIME_ROOT}/include
    PATH_SUFFIXES . onnxruntime onnxruntime/core/session)
  if(NOT SPECRT_ONNXRUNTIME_INCLUDE)
    message(FATAL_ERROR "SPECRT_ONNXRUNTIME_ROOT is '${SPECRT_ONNXRUNTIME_ROOT}'; expected "
      "include/onnxruntime_c_api.h in it. Leave it out to build without the header")
  endif()
  target_include_directories(specrt_native SYSTEM PUBLIC ${SPECRT_ONNXRUNTIME_INCLUDE})
  target_compile_definitions(specrt_native PUBLIC SPECRT_ONNXRUNTIME_HEADER)
  if(NOT onnxruntime_library)
    file(GLOB found ${SPECRT_ONNXRUNTIME_ROOT}/lib/libonnxruntime.so
      ${SPECRT_ONNXRUNTIME_ROOT}/lib64/libonnxruntime.so)
    list(LENGTH found count)
    if(count GREATER 0)
      list(GET found 0 onnxruntime_library)
    endif()
  endif()
endif()
if(onnxruntime_library)
  target_compile_definitions(specrt_native PRIVATE
    SPECRT_ONNXRUNTIME_LIBRARY="${onnxruntime_library}")
endif()
if(SPECRT_TOKENIZER_LIBRARY)
  target_compile_definitions(specrt_native PRIVATE
    SPECRT_TOKENIZER_LIBRARY="${SPECRT_TOKENIZER_LIBRARY}")
endif()

if(TENSORRT_ROOT AND NOT BUILD_SHARED_LIBS)
  message(FATAL_ERROR "TENSORRT_ROOT is '${TENSORRT_ROOT}' and BUILD_SHARED_LIBS is OFF; expected a "
    "shared library where TensorRT is linked")
endif()
if(TENSORRT_ROOT)
  find_path(SPECRT_TENSORRT_INCLUDE NvInfer.h NO_DEFAULT_PATH
    PATHS ${TENSORRT_ROOT} PATH_SUFFIXES include include/${CMAKE_LIBRARY_ARCHITECTURE})
  find_library(SPECRT_TENSORRT_LIBRARY NAMES nvinfer tensorrt_rtx NO_DEFAULT_PATH
    PATHS ${TENSORRT_ROOT} PATH_SUFFIXES lib lib64 lib/${CMAKE_LIBRARY_ARCHITECTURE})
  if(NOT SPECRT_TENSORRT_INCLUDE OR NOT SPECRT_TENSORRT_LIBRARY)
    message(FATAL_ERROR "TENSORRT_ROOT is '${TENSORRT_ROOT}'; expected include/NvInfer.h and "
      "lib/libnvinfer.so or lib/libtensorrt_rtx.so in it")
  endif()
  find_package(CUDAToolkit REQUIRED)
  file(GLOB tensorrt_sources CONFIGURE_DEPENDS
    ${CMAKE_CURRENT_SOURCE_DIR}/src/native/engine/tensorrt/*.cpp)
  target_sources(specrt_native PRIVATE ${tensorrt_sources})
  target_include_directories(specrt_native SYSTEM PRIVATE ${SPECRT_TENSORRT_INCLUDE})
  target_link_libraries(specrt_native PUBLIC ${SPECRT_TENSORRT_LIBRARY} CUDA::cudart)
  target_compile_definitions(specrt_native PRIVATE SPECRT_WITH_TENSORRT)
  if(UNIX AND NOT APPLE)
    # TensorRT keeps the logger it was given first, which therefore stays with the process.
    target_link_options(specrt_native INTERFACE -Wl,-z,nodelete)
  endif()
endif()
