# Embeds the kernels of a backend, and src/abi, which they include, for src/<backend>/sources.h.
function(gyre_embed backend)
  list(TRANSFORM ARGN PREPEND ${PROJECT_SOURCE_DIR}/ OUTPUT_VARIABLE globs)
  file(GLOB names RELATIVE ${PROJECT_SOURCE_DIR}/src CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/abi/*.h ${globs})
  list(FILTER names EXCLUDE REGEX "^abi/kernels?[.]h$")  # for the host alone
  list(TRANSFORM names PREPEND ${PROJECT_SOURCE_DIR}/src/ OUTPUT_VARIABLE paths)
  list(JOIN names "," joined)
  set(code ${PROJECT_BINARY_DIR}/generated/${backend}_sources.cpp)
  add_custom_command(OUTPUT ${code}
    COMMAND ${CMAKE_COMMAND} -DOUT=${code} -DROOT=${PROJECT_SOURCE_DIR}/src -DBACKEND=${backend} "-DFILES=${joined}"
      -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
    DEPENDS ${paths} ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
    COMMENT "Embedding the kernels of ${backend}" VERBATIM)
  target_sources(gyre PRIVATE ${code})
endfunction()
