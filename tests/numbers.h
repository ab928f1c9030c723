#pragma once
// Numbers into tensors and back, and how far two lists of them are apart.

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "gyre/device.h"
#include "gyre/tensor.h"
#include "tensor_bytes.h"

namespace gyre::test {

template <class Values = std::vector<float>>
Tensor tensor_of(const Device& device, const Values& values, const Dims& shape) {
  using Value = std::remove_cv_t<typename Values::value_type>;
  const Tensor tensor = device.tensor(DTypeOf<Value>::value, shape);
  tensor.write_from(std::span<const Value>(values));
  return tensor;
}

template <class Value>
std::vector<Value> values_of(const Tensor& tensor) {
  std::vector<Value> values(tensor.elements());
  tensor.read_to(std::span(values));
  return values;
}
inline std::vector<float> floats_of(const Tensor& tensor) { return values_of<float>(tensor); }
inline void copy_floats(const Tensor& from, const Tensor& to) {
  to.write_from(std::span<const float>(floats_of(from)));
}

inline std::vector<float> normal_floats(uint64_t count, std::mt19937& random, float spread = 1.0f) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = spread * normal(random);
  return values;
}

inline uint64_t elements_of(const Dims& shape) {
  uint64_t count = 1;
  for (const uint64_t n : shape) count *= n;
  return count;
}
inline Tensor normal_tensor(const Device& device, const Dims& shape, std::mt19937& random) {
  return tensor_of(device, normal_floats(elements_of(shape), random), shape);
}

// Square of the error by the square of what was wanted.
template <class Got = double, class Wanted = double>
double nmse(const std::vector<Got>& got, const std::vector<Wanted>& wanted) {
  double error = 0, energy = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double w = wanted[i];
    error += (got[i] - w) * (got[i] - w);
    energy += w * w;
  }
  return energy == 0 ? error : error / energy;
}

}  // namespace gyre::test
