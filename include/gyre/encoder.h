#pragma once

#include <cstdint>
#include <memory>

#include "gyre/device.h"
#include "gyre/export.h"
#include "gyre/fence.h"
#include "gyre/graph.h"

namespace gyre {

class Recorder;

// Collects commands. Ops record into it; nothing runs before submit(). Ordering between commands is
// found from the memory they touch, so there are no barriers to place.
// One thread at a time: a call that meets another thread inside the encoder throws.
class GYRE_API Encoder {
 public:
  explicit Encoder(Device device);
  Encoder(Encoder&&) noexcept;
  Encoder& operator=(Encoder&&) noexcept;
  ~Encoder();  // what was recorded and not submitted is dropped

  const Device& device() const { return device_; }
  uint32_t size() const;      // commands recorded so far
  uint32_t barriers() const;  // how many of them wait for earlier ones

  // All leave the encoder empty and ready to record again.
  Fence submit();       // runs the list once
  Graph instantiate();  // keeps the list for replay
  // CUDA: runs the list once, on a stream of the caller's (a CUstream as a number), after
  // everything submitted before and before everything submitted later. It does not hold memory that
  // was wrapped with OwnerRelease::in_stream_order. While the stream is
  // captured, the list becomes part of the caller's graph instead: keep the fence, which holds the
  // memory and the custom kernels that the list uses, as long as that graph may run, and order the
  // graph with other work yourself. Kernels are compiled when ops are recorded: record once before
  // capturing.
  Fence submit_on(uint64_t stream);
  void clear();

 private:
  friend struct Internals;
  Recorder& recorder() const;

  Device device_;
  std::unique_ptr<Recorder> recorder_;
};

}  // namespace gyre
