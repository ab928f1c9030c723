#pragma once
// Calls through C and through C++ with the same inputs, which must give the same bits. Options that
// C leaves 0 must be C++'s defaults: calls are made once without options and once with all of them.

#include <gyre/gyre_c.h>

#include "c_api/handles.h"
#include "gyre_test.h"
#include "tensor_bytes.h"

namespace gyre::test {

constexpr uint64_t kTokens = 5, kHeads = 4, kKvHeads = 2, kDim = 64, kSlots = 16;

class CEqualsCpp : public testing::Test {
 protected:
  Tensor made(const Dims& shape, DType dtype = DType::f32) const {
    return device.tensor(dtype, shape);
  }
  Tensor random(const Dims& shape) {
    const Tensor tensor = made(shape);
    for (float& value : tensor.data<float>()) value = normal(numbers);
    return tensor;
  }
  Tensor integers(std::vector<int32_t> values) const {
    const Tensor tensor = made({values.size()}, DType::i32);
    tensor.write_from(std::span<const int32_t>(values));
    return tensor;
  }
  // A handle of C's for a tensor; freed at the end of the test.
  gyre_tensor* c(const Tensor& tensor) {
    return tensors.emplace_back(std::make_unique<gyre_tensor>(gyre_tensor{{.value = tensor}}))
        .get();
  }
  void ran(gyre_status status) {
    ASSERT_EQ(status, GYRE_OK) << gyre_last_error();
    encoder.value.submit().wait();
  }
  void same(const Tensor& by_c, const Tensor& by_cpp) {
    encoder.value.submit().wait();
    EXPECT_EQ(read_bytes(by_c), read_bytes(by_cpp));
    bool zero = true;
    for (const auto byte : read_bytes(by_cpp)) zero = zero && byte == decltype(byte){};
    EXPECT_FALSE(zero) << "nothing was written";
  }

  Device device = Device::open("cpu");
  const gyre_device on{{.value = device}};
  gyre_encoder encoder{{.value = Encoder(device)}};
  std::mt19937 numbers{1};
  std::normal_distribution<float> normal;
  std::vector<std::unique_ptr<gyre_tensor>> tensors;
};

}  // namespace gyre::test
