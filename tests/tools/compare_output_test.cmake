# cmake -DGYRE=<tool> -DFOLDER=<scratch> -P compare_output_test.cmake
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${FOLDER})
file(MAKE_DIRECTORY ${FOLDER})

function(fails pattern)
  execute_process(COMMAND ${GYRE} compare ${ARGN} WORKING_DIRECTORY ${FOLDER}
    RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE error)
  if(NOT status EQUAL 1 OR NOT error MATCHES "${pattern}")
    message(FATAL_ERROR "${ARGN}: status ${status}, \"${pattern}\" expected:\n${error}")
  endif()
endfunction()

# Memory is asked about after the paths were looked at.
set(huge --context 2147483647)
fails("needs about" ${huge} --html new.html --svg ${FOLDER}/new.svg)
file(GLOB left ${FOLDER}/*)
if(NOT left STREQUAL "")
  message(FATAL_ERROR "left behind: ${left}")
endif()

file(WRITE ${FOLDER}/old.html "old")
fails("needs about" ${huge} --html old.html)
file(READ ${FOLDER}/old.html text)
if(NOT text STREQUAL "old")
  message(FATAL_ERROR "old.html was changed: ${text}")
endif()

fails("cannot write.*No such file or directory" ${huge} --html missing/new.html)
fails("cannot write.*Is a directory" ${huge} --html ${FOLDER})
file(REMOVE_RECURSE ${FOLDER})
