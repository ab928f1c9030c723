#pragma once

#include <cstdint>
#include <memory>

#include "gyre/device.h"
#include "gyre/fence.h"
#include "gyre/graph.h"

namespace gyre {

class Recorder;

// Collects commands. Ops record into it; nothing runs before submit(). Ordering between commands is
// found from the memory they touch, so there are no barriers to place.
// One thread at a time: a call that meets another thread inside the encoder throws.
class Encoder {
 public:
  explicit Encoder(Device device);
  Encoder(Encoder&&) noexcept;
  Encoder& operator=(Encoder&&) noexcept;
  ~Encoder();  // what was recorded and not submitted is dropped

  const Device& device() const { return device_; }
  uint32_t size() const;      // commands recorded so far
  uint32_t barriers() const;  // how many of them wait for earlier ones

  // Both leave the encoder empty and ready to record again.
  Fence submit();       // runs the list once
  Graph instantiate();  // keeps the list for replay
  void clear();

  Recorder& recorder() const;  // for the ops

 private:
  Device device_;
  std::unique_ptr<Recorder> recorder_;
};

}  // namespace gyre
