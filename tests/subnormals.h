#pragma once
// Whether a device computes with f32 subnormals.

#include <vector>

#include "gyre/gyre.h"

namespace gyre::test {

// An Apple GPU may take them for 0: docs/metal.md.
inline bool keeps_subnormals(const Device& device) {
  if (device.info().name != "metal") return true;
  static const bool kept = [&] {
    constexpr uint64_t kPoints = 8;
    const Tensor x = device.tensor(DType::f32, {1, kPoints});
    x.write_from<float>(std::vector<float>(kPoints, 1e-40f));
    Encoder encoder(device);
    hadamard(encoder, {x, x});
    encoder.submit().wait();
    std::vector<float> sums(kPoints);
    x.read_to<float>(sums);
    return sums.front() != 0;
  }();
  return kept;
}

}  // namespace gyre::test
