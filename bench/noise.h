#pragma once

#include <random>
#include <vector>

#include "gyre/device.h"

namespace gyre::bench {

// f32 drawn from N(0,1), the same for the same seed.
inline Tensor noise(const Device& device, const Dims& shape, uint32_t seed) {
  Tensor tensor = device.tensor(DType::f32, shape);
  std::vector<float> values(tensor.elements());
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (float& value : values) value = normal(random);
  tensor.write_from(std::span<const float>(values));
  return tensor;
}

}  // namespace gyre::bench
