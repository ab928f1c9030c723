#pragma once

#include <algorithm>
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

// The tensor with all of its pages written: those that nobody wrote to are all the same one, which
// a cache holds.
inline Tensor touched(Tensor tensor) {
  const auto write = [&](auto zero) { std::ranges::fill(tensor.data<decltype(zero)>(), zero); };
  switch (tensor.dtype()) {
    case DType::f32:
      write(float{});
      break;
    case DType::f16:
      write(Half{});
      break;
    case DType::bf16:
      write(BFloat16{});
      break;
    default:
      write(uint8_t{});
  }
  return tensor;
}

}  // namespace gyre::bench
