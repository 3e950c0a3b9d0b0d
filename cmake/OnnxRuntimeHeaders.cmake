# octavo_onnxruntime_headers: the C headers of ONNX Runtime, which are all that the custom-op library needs to build.
#
# Taken in this order: the folder named by OCTAVO_ONNXRUNTIME_INCLUDE_DIR; an installed copy (Debian 13's
# libonnxruntime-dev, a system-wide ONNX Runtime); what tools/get_onnxruntime_headers.sh fetches into the build tree,
# once (the Debian package, else the archive OCTAVO_ONNXRUNTIME_ARCHIVE).
set(OCTAVO_ONNXRUNTIME_ARCHIVE
    "https://github.com/microsoft/onnxruntime/releases/download/v1.21.0/onnxruntime-linux-x64-1.21.0.tgz"
    CACHE STRING "Release archive of ONNX Runtime (URL or path) whose headers are used where no package has them")
set(octavo_onnxruntime_min_api 21) # kApiVersion in ort/api.h

# Sets `result` to the ORT_API_VERSION of the headers in `dir`, 0 where there are none.
function(octavo_onnxruntime_api_version dir result)
  set(version 0)
  if(EXISTS "${dir}/onnxruntime_c_api.h")
    file(STRINGS "${dir}/onnxruntime_c_api.h" line REGEX "^#define ORT_API_VERSION [0-9]+" LIMIT_COUNT 1)
    string(REGEX REPLACE "[^0-9]+" "" version "${line}")
  endif()
  set(${result} "${version}" PARENT_SCOPE)
endfunction()

set(octavo_onnxruntime_fetched "${PROJECT_BINARY_DIR}/onnxruntime_headers")
if(OCTAVO_ONNXRUNTIME_INCLUDE_DIR)
  set(octavo_onnxruntime_found "${OCTAVO_ONNXRUNTIME_INCLUDE_DIR}")
  octavo_onnxruntime_api_version("${octavo_onnxruntime_found}" octavo_onnxruntime_api)
  if(octavo_onnxruntime_api LESS octavo_onnxruntime_min_api)
    message(FATAL_ERROR "OCTAVO_ONNXRUNTIME_INCLUDE_DIR=${OCTAVO_ONNXRUNTIME_INCLUDE_DIR} must hold onnxruntime_c_api.h with "
                        "ORT_API_VERSION ${octavo_onnxruntime_min_api} or later, got ${octavo_onnxruntime_api} "
                        "(0 = no such file). Name the folder that holds the header itself.")
  endif()
else()
  find_path(octavo_onnxruntime_installed onnxruntime_c_api.h PATH_SUFFIXES onnxruntime onnxruntime/core/session NO_CACHE)
  set(octavo_onnxruntime_found "${octavo_onnxruntime_installed}")
  octavo_onnxruntime_api_version("${octavo_onnxruntime_found}" octavo_onnxruntime_api)
  if(octavo_onnxruntime_api LESS octavo_onnxruntime_min_api)
    set(octavo_onnxruntime_found "${octavo_onnxruntime_fetched}/include")
    octavo_onnxruntime_api_version("${octavo_onnxruntime_found}" octavo_onnxruntime_api)
  endif()
  if(octavo_onnxruntime_api LESS octavo_onnxruntime_min_api)
    message(STATUS "Fetching the headers of ONNX Runtime")
    execute_process(
      COMMAND "${PROJECT_SOURCE_DIR}/tools/get_onnxruntime_headers.sh" "${octavo_onnxruntime_fetched}"
              "${OCTAVO_ONNXRUNTIME_ARCHIVE}"
      ERROR_VARIABLE octavo_onnxruntime_reasons
      RESULT_VARIABLE octavo_onnxruntime_failed)
    octavo_onnxruntime_api_version("${octavo_onnxruntime_found}" octavo_onnxruntime_api)
    if(octavo_onnxruntime_failed OR octavo_onnxruntime_api LESS octavo_onnxruntime_min_api)
      message(FATAL_ERROR "liboctavo_ort.so needs the C headers of ONNX Runtime 1.${octavo_onnxruntime_min_api} or later.\n"
                          "${octavo_onnxruntime_reasons}\n"
                          "Set -DOCTAVO_ONNXRUNTIME_INCLUDE_DIR=DIR to the folder that holds onnxruntime_c_api.h, "
                          "-DOCTAVO_ONNXRUNTIME_ARCHIVE=FILE to a release archive, "
                          "or -DOCTAVO_BUILD_ORT=OFF to build without it.")
    endif()
  endif()
endif()
message(STATUS "ONNX Runtime headers: ${octavo_onnxruntime_found} (API ${octavo_onnxruntime_api})")

add_library(octavo_onnxruntime_headers INTERFACE)
target_include_directories(octavo_onnxruntime_headers SYSTEM INTERFACE "${octavo_onnxruntime_found}")
