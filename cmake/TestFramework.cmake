# Lets the tests' find_package(GTest) succeed where no copy is installed for the target: when cross-compiling, Debian's
# source package `googletest` is built along; on other machines without GoogleTest, its release is fetched.
find_package(GTest QUIET)
if(NOT GTest_FOUND)
  include(FetchContent)
  if(EXISTS /usr/src/googletest/CMakeLists.txt)
    set(FETCHCONTENT_SOURCE_DIR_GTEST /usr/src/googletest)
  endif()
  FetchContent_Declare(
    GTest URL https://github.com/google/googletest/archive/refs/tags/v1.14.0.tar.gz OVERRIDE_FIND_PACKAGE)
  set(INSTALL_GTEST OFF)
  set(BUILD_GMOCK OFF)
  # Its sources are not held to our warnings.
  get_directory_property(octavo_compile_options COMPILE_OPTIONS)
  set_directory_properties(PROPERTIES COMPILE_OPTIONS "")
  FetchContent_MakeAvailable(GTest)
  set_directory_properties(PROPERTIES COMPILE_OPTIONS "${octavo_compile_options}")
endif()
