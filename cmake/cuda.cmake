# The CUDA backend: needs nothing of CUDA to build. Its kernels travel as text.
file(GLOB sources RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS src/cuda/*.cpp src/cuda/attention/*.cpp)
target_sources(gyre PRIVATE ${sources})
target_link_libraries(gyre PRIVATE ${CMAKE_DL_LIBS})

gyre_embed(cuda src/cuda/kernels/*.cu src/cuda/kernels/*.cuh src/cuda/kernels/attention/*.cu
  src/cuda/kernels/attention/*.cuh src/cuda/kernels/attention/*/*.cu src/cuda/kernels/attention/*/*.cuh)
