# The Metal backend. All but driver_apple.cpp is built everywhere; its kernels travel as text.
target_sources(gyre PRIVATE
  src/metal/buffers.cpp
  src/metal/copies.cpp
  src/metal/device.cpp
  src/metal/driver.cpp
  src/metal/library.cpp
  src/metal/memory.cpp
  src/metal/pipeline.cpp
  src/metal/prepared_list.cpp
  src/metal/sources.cpp
  src/metal/stream.cpp
  src/metal/submission.cpp
  src/metal/table.cpp)
gyre_embed(metal src/metal/kernels/*.metal src/metal/kernels/*.h)
