#pragma once

#include <random>

#include "gyre/device.h"

namespace gyre::bench {

// f32 drawn from N(0,1), the same for the same seed.
inline Tensor noise(const Device& device, const Dims& shape, uint32_t seed) {
  Tensor tensor = device.tensor(DType::f32, shape);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (float& value : tensor.data<float>()) value = normal(random);
  return tensor;
}

}  // namespace gyre::bench
