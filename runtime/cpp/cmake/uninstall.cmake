# Remove what the target `install` of a build has installed, as the LIST of it says.
if(NOT EXISTS ${LIST})
  message(FATAL_ERROR "there is no ${LIST}; expected that of a build that was installed")
endif()
file(STRINGS ${LIST} files)
list(TRANSFORM files PREPEND "$ENV{DESTDIR}")
file(REMOVE ${files})
