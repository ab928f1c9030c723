# The Metal backend. All but driver_apple.cpp is built everywhere; its kernels travel as text.
target_sources(gyre PRIVATE
  src/metal/attention.cpp
  src/metal/buffers.cpp
  src/metal/codec.cpp
  src/metal/copies.cpp
  src/metal/device.cpp
  src/metal/driver.cpp
  src/metal/library.cpp
  src/metal/memory.cpp
  src/metal/pipeline.cpp
  src/metal/prepared_list.cpp
  src/metal/rope.cpp
  src/metal/sources.cpp
  src/metal/stream.cpp
  src/metal/submission.cpp
  src/metal/table.cpp)
gyre_embed(metal src/metal/kernels/*.metal src/metal/kernels/*.h)

# On a Mac, Apple's driver: metal-cpp's headers from GYRE_METAL_CPP, or where scripts/metal_cross.sh --headers put them.
if(APPLE)
  find_path(GYRE_METAL_CPP Metal/Metal.hpp PATHS ${PROJECT_SOURCE_DIR}/build/metal_cross/mlx/include/metal_cpp
    PATH_SUFFIXES metal-cpp metal_cpp DOC "Folder of Apple's metal-cpp headers")
  if(GYRE_METAL_CPP)
    target_sources(gyre PRIVATE src/metal/driver_apple.cpp)
    target_include_directories(gyre SYSTEM PRIVATE ${GYRE_METAL_CPP})
    target_compile_definitions(gyre PRIVATE GYRE_HAVE_METAL)
    # Without CoreGraphics a program that draws nothing may get no default GPU.
    set(GYRE_FRAMEWORKS "-framework Foundation" "-framework Metal" "-framework CoreGraphics")
    target_link_libraries(gyre PRIVATE ${GYRE_FRAMEWORKS})
  else()
    message(NOTICE "gyre: without metal-cpp there is no Metal device: run scripts/metal_cross.sh --headers, or set GYRE_METAL_CPP")
  endif()
endif()
