# The Metal backend. All but driver_apple.cpp is built everywhere; its kernels travel as text.
file(GLOB sources RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS src/metal/*.cpp)
list(REMOVE_ITEM sources src/metal/driver_apple.cpp)
target_sources(gyre PRIVATE ${sources})
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
