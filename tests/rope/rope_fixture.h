#pragma once

#include "gyre_test.h"
#include "numbers.h"
#include "reference.h"
#include "run_now.h"
#include "tensor_bytes.h"

namespace gyre::test {

constexpr DType kRopeTypes[] = {DType::f32, DType::f16, DType::bf16};

// A device and the steps that tests of rope have in common.
class RopeTest : public testing::Test {
 protected:
  Tensor filled(DType dtype, const Dims& shape, std::span<const float> values) const {
    const Tensor tensor = device_.tensor(dtype, shape);
    write_bytes(tensor, reference::stored(dtype, values));
    return tensor;
  }
  Tensor random(DType dtype, const Dims& shape, uint32_t seed = 1) const {
    std::mt19937 engine(seed);
    std::uniform_real_distribution<float> unit(-1, 1);
    std::vector<float> values(elements_of(shape));
    for (float& value : values) value = unit(engine);
    return filled(dtype, shape, values);
  }
  Tensor like(const Tensor& tensor) const { return like(tensor, tensor.dtype()); }
  Tensor like(const Tensor& tensor, DType dtype) const {
    return device_.tensor(dtype, tensor.shape());
  }
  Tensor positions(const std::vector<int32_t>& values) const {
    return tensor_of(device_, values, {values.size()});
  }
  // Puts the same positions on every axis.
  Tensor positions_on_axes(const std::vector<int32_t>& values, uint64_t axes) const {
    const Tensor tensor = device_.tensor(DType::i32, {axes, values.size()});
    for (uint64_t axis = 0; axis < axes; ++axis) {
      tensor.slice(0, axis, 1).write_from(std::span<const int32_t>(values));
    }
    return tensor;
  }

  void run(const RopeInputs& inputs, const RopeOptions& options = {}) const {
    rope(RunNow(device_), inputs, options);
  }
  void run(const NormRopeInputs& inputs, const NormRopeOptions& options = {}) const {
    norm_rope(RunNow(device_), inputs, options);
  }
  // x rotated, as a new tensor of the same dtype.
  Tensor rotated(const Tensor& x, const Tensor& at, const RopeOptions& options = {}) const {
    const Tensor out = like(x);
    run(RopeInputs{.x = x, .positions = at, .out = out}, options);
    return out;
  }

  static std::vector<double> values(const Tensor& tensor) {
    const Bytes bytes = read_bytes(tensor);
    std::vector<double> all(tensor.elements());
    for (size_t i = 0; i < all.size(); ++i) {
      all[i] = reference::load_value(tensor.dtype(), bytes.data(), i);
    }
    return all;
  }
  static double largest_difference(const Tensor& a, const Tensor& b) {
    const std::vector<double> left = values(a), right = values(b);
    double largest = 0;
    for (size_t i = 0; i < left.size(); ++i) {
      largest = std::max(largest, std::abs(left[i] - right[i]));
    }
    return largest;
  }

  Device device_ = Device::open("cpu", {.threads = 2});
};

}  // namespace gyre::test
