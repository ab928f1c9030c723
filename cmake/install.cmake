# What `cmake --install` puts down: the library, the headers, find_package(gyre) and a pkg-config file.
include(CMakePackageConfigHelpers)

set(GYRE_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/gyre)

# A static library hands its own dependencies on to whoever links it.
get_target_property(gyre_type gyre TYPE)
set(GYRE_NEEDS_HWY OFF)
if(gyre_type STREQUAL "STATIC_LIBRARY" AND NOT GYRE_HWY_STATIC)
  set(GYRE_NEEDS_HWY ON)
endif()

install(TARGETS gyre EXPORT gyreTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/gyre DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT gyreTargets NAMESPACE gyre:: DESTINATION ${GYRE_CMAKE_DIR})

configure_package_config_file(cmake/gyreConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/gyreConfig.cmake
  INSTALL_DESTINATION ${GYRE_CMAKE_DIR})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/gyreConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/gyreConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/gyreConfigVersion.cmake
  DESTINATION ${GYRE_CMAKE_DIR})

# The .pc file finds its prefix from where it lies, so an installed tree can be moved.
file(RELATIVE_PATH GYRE_PC_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
set(GYRE_PC_REQUIRES "")
if(GYRE_NEEDS_HWY)
  set(GYRE_PC_REQUIRES libhwy)
endif()
configure_file(cmake/gyre.pc.in ${CMAKE_CURRENT_BINARY_DIR}/gyre.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/gyre.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
