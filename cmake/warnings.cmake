function(gyre_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wundef
    -Wno-missing-field-initializers)
  if(GYRE_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
