# The CUDA backend: needs nothing of CUDA to build. Its kernels travel as text.
target_sources(gyre PRIVATE
  src/cuda/attention/launch.cpp
  src/cuda/attention/planner.cpp
  src/cuda/build_kernels.cpp
  src/cuda/cache.cpp
  src/cuda/compiler.cpp
  src/cuda/context.cpp
  src/cuda/device.cpp
  src/cuda/driver.cpp
  src/cuda/early_reads.cpp
  src/cuda/graph.cpp
  src/cuda/kernel_cache.cpp
  src/cuda/kernel_set.cpp
  src/cuda/kv_copy.cpp
  src/cuda/codec.cpp
  src/cuda/write.cpp
  src/cuda/library.cpp
  src/cuda/device_list.cpp
  src/cuda/memory.cpp
  src/cuda/nvrtc.cpp
  src/cuda/offline_device.cpp
  src/cuda/pipeline.cpp
  src/cuda/rope.cpp
  src/cuda/stream.cpp
  src/cuda/stream_copy.cpp
  src/cuda/stream_trace.cpp
  src/cuda/sources.cpp
  src/cuda/submission.cpp
  src/cuda/table.cpp)
target_link_libraries(gyre PRIVATE ${CMAKE_DL_LIBS})

gyre_embed(cuda src/cuda/kernels/*.cu src/cuda/kernels/*.cuh src/cuda/kernels/attention/*.cu
  src/cuda/kernels/attention/*.cuh)
