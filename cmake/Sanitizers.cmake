# OCTAVO_SANITIZE=address,undefined instruments every target; a report ends the program, so that a test fails on it.
if(OCTAVO_SANITIZE)
  add_compile_options(-fsanitize=${OCTAVO_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${OCTAVO_SANITIZE})
endif()
