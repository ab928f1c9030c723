#pragma once

#include <vector>

#include "gyre/device.h"
#include "gyre/encoder.h"
#include "machine_kernels.h"
#include "noise.h"
#include "ops/cache_ops.h"
#include "timing.h"

namespace gyre::bench {

// What the machine reads per second: parts in turns, together more than any of its caches. On a
// GPU, what it copies, both ways counted.
class ReadLimit {
 public:
  explicit ReadLimit(const Device& device) {
    const bool reads = device.info().name == "cpu";  // only there is a kernel that only reads
    const uint64_t part = reads ? kReadBytes : kCopyBytes, parts = reads ? rotation(part) : 2;
    bytes_ = reads ? part : 2 * part;
    Tensor memory = device.tensor(DType::u8, {parts, part});
    if (reads) memory = touched(memory);
    for (uint64_t i = 0; i < parts; ++i) {
      Encoder encoder(device);
      if (reads) {
        record_read(encoder, memory.slice(0, i, 1));
      } else {
        copy_bytes(encoder, memory.slice(0, i, 1), memory.slice(0, 1 - i, 1));
      }
      reads_.push_back(encoder.instantiate());
    }
  }

  void run(uint64_t round) const { reads_[round % reads_.size()].replay().wait(); }
  double gbps(double median_us) const { return static_cast<double>(bytes_) / median_us / 1e3; }

 private:
  static constexpr uint64_t kReadBytes = 64 << 20, kCopyBytes = 1 << 30;
  uint64_t bytes_ = 0;  // moved by one run
  std::vector<Graph> reads_;
};

}  // namespace gyre::bench
