// What a cache looks at in a calibration before it takes it: is the inverse one, are all numbers
// finite.
#include "cache/calibration_identity.h"

#include "expect_error.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

constexpr uint64_t kDim = 128;

class CalibrationIdentity : public testing::Test {
 protected:
  // 1 and 1, so that any change shows.
  CalibrationIdentity() {
    for (KvCalibration* calibration : {&layer.k, &layer.v}) {
      for (Tensor* matrix : {&calibration->transform.matrix, &calibration->transform.inverse}) {
        *matrix = device.tensor(DType::f32, {1, kDim, kDim});
        for (uint64_t i = 0; i < kDim; ++i) matrix->data<float>()[i * kDim + i] = 1;
      }
      calibration->transform.mean = device.tensor(DType::f32, {1, kDim});
      calibration->feedback.factor = device.tensor(DType::f32, {1, kDim, kDim});
      calibration->feedback.diagonal = device.tensor(DType::f32, {1, kDim});
    }
  }
  uint64_t checksum() const { return calibration_checksum({.op = "test", .index = 7}, layer); }
  bool is_refused(const char* word) const {
    return static_cast<bool>(throws_error(ErrorCode::invalid_argument, {"test: layer 7", word},
                                          [&] { (void)checksum(); }));
  }

  Device device = Device::open("cpu", {.threads = 1});
  KvLayerCalibration layer;
};

TEST_F(CalibrationIdentity, EveryExchangeOfTwoCoordinatesIsSeen) {
  EXPECT_NE(checksum(), 0u);
  for (const bool is_v : {false, true}) {
    const auto rows = (is_v ? layer.v : layer.k).transform.inverse.data<float>();
    const auto exchange = [&](uint64_t i, uint64_t j) {
      for (const uint64_t column : {i, j})
        std::swap(rows[i * kDim + column], rows[j * kDim + column]);
    };
    for (uint64_t i = 0; i < kDim; ++i) {
      for (uint64_t j = i % 8 + 8; j < kDim; j += 8) {  // an eighth of all
        if (i == j) continue;
        exchange(i, j);
        ASSERT_TRUE(is_refused(is_v ? "matrix of v, head 0" : "matrix of k, head 0")) << i << j;
        exchange(i, j);
      }
    }
  }
  EXPECT_NE(checksum(), 0u);
}

TEST_F(CalibrationIdentity, NumbersAreFinite) {
  for (KvCalibration* calibration : {&layer.k, &layer.v}) {
    for (const Tensor* tensor : {&calibration->transform.mean, &calibration->feedback.factor,
                                 &calibration->feedback.diagonal}) {
      float& value = tensor->data<float>()[5];
      for (const float bad :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        value = bad;
        EXPECT_TRUE(is_refused("must be finite"));
      }
      value = 0;
    }
  }
  EXPECT_NE(checksum(), 0u);
}

}  // namespace
}  // namespace gyre::test
