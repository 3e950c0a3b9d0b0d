# install(): the static library, the headers of include/octavo, and what find_package(octavo) reads.
include(CMakePackageConfigHelpers)
set(octavo_config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/octavo")

install(TARGETS octavo EXPORT octavo_targets COMPONENT development ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(DIRECTORY include/octavo COMPONENT development DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h")
install(FILES LICENSE NOTICE COMPONENT development DESTINATION "${CMAKE_INSTALL_DOCDIR}")
install(EXPORT octavo_targets FILE octavo_targets.cmake NAMESPACE octavo:: COMPONENT development
        DESTINATION "${octavo_config_dir}")

configure_package_config_file(cmake/octavo-config.cmake.in "${PROJECT_BINARY_DIR}/octavo-config.cmake"
                              INSTALL_DESTINATION "${octavo_config_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/octavo-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/octavo-config.cmake" "${PROJECT_BINARY_DIR}/octavo-config-version.cmake"
        COMPONENT development DESTINATION "${octavo_config_dir}")
