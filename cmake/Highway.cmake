# octavo_hwy: the headers of Google Highway, header-only. Debian's libhwy-dev or any installed copy is taken; elsewhere
# the release is fetched. Link it as $<BUILD_INTERFACE:octavo_hwy>, so that installed consumers do not need it.
find_path(OCTAVO_HWY_INCLUDE_DIR hwy/highway.h DOC "Folder that holds hwy/highway.h")
if(NOT OCTAVO_HWY_INCLUDE_DIR)
  include(FetchContent)
  FetchContent_Declare(
    highway_headers
    URL https://github.com/google/highway/archive/refs/tags/1.0.7.tar.gz
    # A subdirectory without a CMakeLists.txt: populate only, Highway's own targets are not needed.
    SOURCE_SUBDIR hwy/contrib
    DOWNLOAD_EXTRACT_TIMESTAMP OFF)
  FetchContent_MakeAvailable(highway_headers)
  set(OCTAVO_HWY_INCLUDE_DIR "${highway_headers_SOURCE_DIR}" CACHE PATH "Folder that holds hwy/highway.h" FORCE)
endif()
add_library(octavo_hwy INTERFACE)
target_include_directories(octavo_hwy SYSTEM INTERFACE "${OCTAVO_HWY_INCLUDE_DIR}")
