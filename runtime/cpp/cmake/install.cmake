# What an application needs: the library, its headers, and how CMake and pkg-config find them.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/specrt)
install(TARGETS specrt EXPORT specrtTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
# Programs name it without its implementation: the one that was installed last.
set(kind STATIC)
if(BUILD_SHARED_LIBS)
  set(kind SHARED)
endif()
set(plain_name ${CMAKE_${kind}_LIBRARY_PREFIX}specrt${CMAKE_${kind}_LIBRARY_SUFFIX})
add_custom_command(TARGET specrt POST_BUILD COMMAND ${CMAKE_COMMAND} -E
  create_symlink $<TARGET_LINKER_FILE_NAME:specrt> ${CMAKE_CURRENT_BINARY_DIR}/${plain_name})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/${plain_name} DESTINATION ${CMAKE_INSTALL_LIBDIR})
# Linkers take the shared one of two.
set(other_name ${CMAKE_SHARED_LIBRARY_PREFIX}specrt${CMAKE_SHARED_LIBRARY_SUFFIX})
if(BUILD_SHARED_LIBS)
  set(other_name ${CMAKE_STATIC_LIBRARY_PREFIX}specrt${CMAKE_STATIC_LIBRARY_SUFFIX})
endif()
install(CODE "file(REMOVE \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/${other_name}\")")
install(DIRECTORY include/specrt DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(EXPORT specrtTargets NAMESPACE specrt:: DESTINATION ${package_dir})

configure_package_config_file(cmake/specrtConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/specrtConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/specrtConfigVersion.cmake
  VERSION ${SPECRT_VERSION} COMPATIBILITY SameMajorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/specrtConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/specrtConfigVersion.cmake
  DESTINATION ${package_dir})

# The prefix as seen from the file, so that an installed tree may be moved.
file(RELATIVE_PATH pkgconfig_to_prefix
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
set(static_libraries "")
if(NOT BUILD_SHARED_LIBS)
  set(static_libraries " -lstdc++ -lm -lpthread -ldl")
endif()
string(REGEX REPLACE "/$" "" pkgconfig_to_prefix "${pkgconfig_to_prefix}")
configure_file(cmake/specrt.pc.in ${CMAKE_CURRENT_BINARY_DIR}/specrt.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/specrt.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(NOT TARGET uninstall)
  add_custom_target(uninstall COMMAND ${CMAKE_COMMAND}
    -DLIST=${CMAKE_BINARY_DIR}/install_manifest.txt -P ${CMAKE_CURRENT_LIST_DIR}/uninstall.cmake)
endif()
