# Every target below gets the same warnings; third-party headers come in as SYSTEM and are exempt.
add_compile_options(-Wall -Wextra -Wconversion -Wshadow)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 reports these about correct, inlined code of its own library (std::sort of a small array, string operators, a
  # vector's destructor; GCC bug 105651 is one of them), more of them under -fsanitize. AddressSanitizer checks the same
  # at run time.
  add_compile_options(-Wno-array-bounds -Wno-free-nonheap-object -Wno-restrict -Wno-stringop-overflow)
  if(OCTAVO_SANITIZE)
    add_compile_options(-Wno-maybe-uninitialized)
  endif()
endif()
if(OCTAVO_WERROR)
  add_compile_options(-Werror)
endif()
