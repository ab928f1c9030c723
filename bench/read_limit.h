#pragma once

#include <vector>

#include "gyre/device.h"
#include "gyre/encoder.h"
#include "machine_kernels.h"

namespace gyre::bench {

// What the machine reads per second: two halves in turns, together more than any of its caches.
class ReadLimit {
 public:
  explicit ReadLimit(const Device& device) {
    const Tensor memory = device.tensor(DType::u8, {2, kBytes});
    for (uint64_t i = 0; i < 2; ++i) {
      Encoder encoder(device);
      record_read(encoder, memory.slice(0, i, 1));
      reads_.push_back(encoder.instantiate());
    }
  }

  void run(uint64_t round) const { reads_[round % 2].replay().wait(); }
  static double gbps(double median_us) { return static_cast<double>(kBytes) / median_us / 1e3; }

 private:
  static constexpr uint64_t kBytes = 64 << 20;
  std::vector<Graph> reads_;
};

}  // namespace gyre::bench
