# cmake -DGYRE=<tool> -DNVRTC=<folder of the fake libnvrtc> -DFOLDER=<scratch> -P prepare_test.cmake
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${FOLDER})
file(MAKE_DIRECTORY ${FOLDER})
set(ENV{LD_LIBRARY_PATH} ${NVRTC})
set(kernels ${FOLDER}/a/kernels)

function(prepare status out error)
  execute_process(COMMAND ${GYRE} prepare ${ARGN} RESULT_VARIABLE got_status OUTPUT_VARIABLE got_out
    ERROR_VARIABLE got_error)
  if(NOT got_status EQUAL status OR NOT got_out MATCHES "${out}" OR NOT got_error MATCHES "${error}")
    message(FATAL_ERROR "gyre prepare ${ARGN}: status ${got_status}\n${got_out}\n${got_error}")
  endif()
endfunction()

# Everything is compiled, one line a kernel; then everything is there.
prepare(0 "^([0-9]+) kernels, [0-9]+ of them compiled, " "\n\\[100 %\\] ([0-9]+) of [0-9]+: gyre::cuda::"
  llama-3.1-8b --arch 90 --folder ${kernels})
file(GLOB made ${kernels}/*.cubin)
list(LENGTH made count)
if(count LESS 10)
  message(FATAL_ERROR "${count} files")
endif()
prepare(0 "^all ${count} kernels were there\n$" "of ${count}: " llama-3.1-8b --arch 90 --folder ${kernels})
# Carried along, and found where another folder is written to.
set(ENV{GYRE_KERNEL_PATH} ${kernels})
prepare(0 "^all ${count} kernels were there\n$" "" llama-3.1-8b --arch 90 --folder ${FOLDER}/other)
unset(ENV{GYRE_KERNEL_PATH})
# Another architecture has kernels of its own.
prepare(0 "^[0-9]+ kernels, [0-9]+ of them compiled" "" llama-3.1-8b --arch 80 --folder ${kernels})
# Numbers, formats and uses.
prepare(0 "of them compiled" "kv_write_rows<gyre::cuda::BFloat16, 17, 18" --heads 24 --kv-heads 4 --head-dim 256
  --formats tq3/tq4,f16 --dtype bf16 --use batch --norm --arch 90 --folder ${kernels})
prepare(0 "gemma-3-4b +34 +8 +4 +256 +1024" "^$" --list)
prepare(0 "^device cpu has nothing to build\n$" "^$" llama-3.1-8b --device cpu)
# Refusals.
prepare(2 "^$" "prepare: without a preset --heads" --arch 90)
prepare(2 "^$" "no preset \"lama-3.1-8b\"; did you mean llama-3.1-8b" lama-3.1-8b --arch 90)
prepare(2 "^$" "no architecture is called \"cuda:sm_91\"; known are cuda:sm_80, " llama-3.1-8b --arch 91)
prepare(2 "^$" "--dtype must be f32, f16 or bf16, got \"u8\"" llama-3.1-8b --arch 90 --dtype u8)
prepare(2 "^$" "--use must be cache, batch or both" llama-3.1-8b --arch 90 --use pages)
prepare(2 "^$" "page_tokens" llama-3.1-8b --arch 90 --page-tokens 9 --folder ${FOLDER}/none)
prepare(1 "^$" "cannot write to the folder \"/proc/none\"" llama-3.1-8b --arch 90 --folder /proc/none)
file(REMOVE_RECURSE ${FOLDER})
