// Host access to tensors, and memory that the caller owns.
#include <numeric>

#include "expect_error.h"
#include "gyre_test.h"
#include "tensor_bytes.h"

namespace gyre::test {
namespace {

class TensorHost : public testing::Test {
 protected:
  Device device_ = Device::open("cpu", {.threads = 1});
};

TEST_F(TensorHost, DataChecksTheElementType) {
  const Tensor f32 = device_.tensor(DType::f32, {4});
  EXPECT_EQ(f32.data<float>().size(), 4u);
  EXPECT_REFUSED(("f32", "i32"), f32.data<int32_t>());
  EXPECT_REFUSED(("f32", "u32"), f32.data<const uint32_t>());
  const Tensor f16 = device_.tensor(DType::f16, {4});
  EXPECT_REFUSED(("f16", "bf16"), f16.data<BFloat16>()) << "same size, other meaning";
  EXPECT_EQ(f16.data<const Half>().data(), f16.data<Half>().data());
}

TEST_F(TensorHost, DataStartsAtTheView) {
  const Tensor tensor = device_.tensor(DType::u8, {10, 4}), part = tensor.slice(0, 3, 2);
  EXPECT_EQ(part.data<uint8_t>().data(), tensor.data<uint8_t>().data() + 12);
  EXPECT_EQ(part.data<uint8_t>().size(), 8u);
  EXPECT_REFUSED(("contiguous", "[10, 2]", "[4, 1]"), tensor.slice(1, 0, 2).data<uint8_t>());
}

TEST_F(TensorHost, WritesAndReadsInRowMajorOrderOfTheView) {
  const Tensor tensor = device_.tensor(DType::i32, {3, 4});
  const Tensor permuted = tensor.permute({1, 0}).slice(0, 1, 2);  // columns 1 and 2
  const std::vector<int32_t> source = {10, 11, 12, 20, 21, 22};
  permuted.write_from(std::span(source));
  EXPECT_EQ(std::vector<int32_t>(tensor.data<int32_t>().begin(), tensor.data<int32_t>().end()),
            (std::vector<int32_t>{0, 10, 20, 0, 0, 11, 21, 0, 0, 12, 22, 0}));
  std::vector<int32_t> target(6);
  permuted.read_to(std::span(target));
  EXPECT_EQ(target, source);
}

TEST_F(TensorHost, EveryDtypeAndRankRoundTrips) {
  for (uint32_t i = 0; i < kDTypeCount; ++i) {
    const Tensor tensor = device_.tensor(static_cast<DType>(i), {2, 3, 2, 2, 3, 2});
    const Tensor view = tensor.permute({5, 0, 3, 1, 4, 2}).slice(1, 1, 1).slice(4, 0, 2);
    const Bytes bytes = pattern_bytes(view.bytes(), i);
    write_bytes(view, bytes);
    EXPECT_EQ(read_bytes(view), bytes);
    const Bytes all = read_bytes(tensor);
    const auto written =
        std::count_if(all.begin(), all.end(), [](std::byte b) { return b != std::byte{0}; });
    EXPECT_EQ(static_cast<uint64_t>(written), view.bytes()) << "and nothing beside the view";
  }
}

TEST_F(TensorHost, WriteAndReadCheckCountAndType) {
  const Tensor tensor = device_.tensor(DType::f32, {2, 2});
  std::vector<float> five(5);
  std::vector<int32_t> other(4);
  EXPECT_REFUSED(("4 elements", "got 5"), tensor.write_from(std::span<const float>(five)));
  EXPECT_REFUSED(("4 elements", "got 5"), tensor.read_to(std::span(five)));
  EXPECT_REFUSED(("f32", "i32"), tensor.write_from(std::span<const int32_t>(other)));
  EXPECT_REFUSED(("f32", "i32"), tensor.read_to(std::span(other)));
}

TEST_F(TensorHost, RepeatedElementsAreForReadingOnly) {
  const Tensor repeated = device_.tensor(DType::f32, {1}).strided({4}, {0});
  std::vector<float> four(4, 1.0f);
  EXPECT_REFUSED(("[0]", "share memory"), repeated.write_from(std::span<const float>(four)));
  repeated.read_to(std::span(four));
  EXPECT_EQ(four, std::vector<float>(4, 0.0f));
}

TEST_F(TensorHost, WrapsWithoutCopying) {
  std::vector<float> memory(12);
  std::iota(memory.begin(), memory.end(), 0.0f);
  const Tensor tensor = device_.wrap(memory.data(), DType::f32, {3, 4});
  EXPECT_EQ(tensor.data<float>().data(), memory.data());
  tensor.slice(0, 1, 1).data<float>()[2] = 42;
  EXPECT_EQ(memory[6], 42.0f);
  const Tensor columns = device_.wrap(memory.data(), DType::f32, {3, 2}, {4, 1});
  EXPECT_EQ(columns.span_bytes(), 10 * sizeof(float));
  std::vector<float> read(6);
  columns.read_to(std::span(read));
  EXPECT_EQ(read, (std::vector<float>{0, 1, 4, 5, 8, 9}));
}

TEST_F(TensorHost, ReadOnlyMemoryStaysUntouched) {
  const std::vector<float> memory = {1, 2, 3};
  const Tensor tensor = device_.wrap(static_cast<const void*>(memory.data()), DType::f32, {3});
  EXPECT_EQ(tensor.data<const float>()[1], 2.0f);
  EXPECT_REFUSED(("read-only"), tensor.data<float>());
  EXPECT_REFUSED(("read-only"), tensor.write_from(std::span<const float>(memory)));
  EXPECT_REFUSED(("read-only"), tensor.slice(0, 1, 1).reshape({1, 1}).data<float>())
      << "views of it too";
}

TEST_F(TensorHost, WrapChecksPointerAndAlignment) {
  alignas(8) std::byte memory[64] = {};
  EXPECT_REFUSED(("device.wrap", "aligned to 4", "f32"), device_.wrap(memory + 2, DType::f32, {4}));
  EXPECT_REFUSED(("aligned to 2", "bf16"), device_.wrap(memory + 1, DType::bf16, {4}));
  EXPECT_EQ(device_.wrap(memory + 1, DType::u8, {4}).elements(), 4u);
  EXPECT_EQ(device_.wrap(memory + 2, DType::f16, {4}).elements(), 4u);
  EXPECT_REFUSED(("null", "[4]"), device_.wrap(static_cast<void*>(nullptr), DType::u8, {4}));
  EXPECT_EQ(device_.wrap(static_cast<void*>(nullptr), DType::u8, {4, 0}).elements(), 0u);
  EXPECT_REFUSED(("dtype"), device_.wrap(memory, static_cast<DType>(77), {4}));
}

TEST_F(TensorHost, WrapRefusesHostileShapes) {
  constexpr uint64_t k2To62 = uint64_t{1} << 62;
  std::byte memory[4] = {};
  EXPECT_REFUSED(("2^63"), device_.wrap(memory, DType::u8, {k2To62, 2}));
  EXPECT_REFUSED(("2^63"), device_.wrap(memory, DType::u8, {3, 3}, {k2To62, k2To62}));
  EXPECT_REFUSED(("2^62 bytes"), device_.wrap(memory, DType::u8, {k2To62 + 1}));
  EXPECT_REFUSED(("2^62 bytes"), device_.wrap(memory, DType::u8, {2}, {k2To62}));
  EXPECT_REFUSED(("2^63"), device_.wrap(memory, DType::u8, {k2To62, 4}, {0, 0}));
  EXPECT_REFUSED(("device.wrap", "f32", "2^63 - 1 bytes"),
                 device_.wrap(memory, DType::f32, {k2To62}, {0}));
  EXPECT_REFUSED(("1 strides", "rank 2"), device_.wrap(memory, DType::u8, {2, 2}, {1}));
}

// Hazards compare addresses: a range that runs past the end of memory would compare as small.
TEST_F(TensorHost, WrapStaysBelowTheEndOfMemory) {
  auto* last = reinterpret_cast<void*>(~uintptr_t{0} - 15);
  EXPECT_REFUSED(("device.wrap"), device_.wrap(last, DType::u8, {1 << 20}));
}

TEST_F(TensorHost, WrappedMemoryLivesWithItsOwner) {
  auto owner = std::make_shared<std::vector<float>>(4, 5.0f);
  const std::weak_ptr<std::vector<float>> watch = owner;
  void* memory = owner->data();
  Tensor tensor = device_.wrap(memory, DType::f32, {4}, {}, std::move(owner));
  Tensor view = tensor.slice(0, 2, 2);
  tensor = {};
  EXPECT_FALSE(watch.expired());
  EXPECT_EQ(view.data<float>()[0], 5.0f);
  view = {};
  EXPECT_TRUE(watch.expired());
}

TEST_F(TensorHost, BytesCountRepeatedElementsWithoutWrapping) {
  constexpr uint64_t k2To62 = uint64_t{1} << 62;
  const Tensor one = device_.tensor(DType::f32, {1});
  try {
    EXPECT_GE(one.strided({k2To62}, {0}).bytes(), k2To62) << "2^62 f32 are not 0 bytes";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << "refusing is fine too";
  }
}

}  // namespace
}  // namespace gyre::test
