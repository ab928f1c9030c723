#include "gyre/tensor.h"

#include <numeric>
#include <sstream>

#include "expect_error.h"
#include "gyre_test.h"
#include "runtime/internals.h"

namespace gyre::test {
namespace {

constexpr uint64_t k2To40 = uint64_t{1} << 40;
constexpr uint64_t k2To62 = uint64_t{1} << 62;
constexpr uint64_t k2To63 = uint64_t{1} << 63;

TEST(Dims, HoldsUpToSixNumbers) {
  const Dims dims{512, 8, 128};
  EXPECT_EQ(dims.size(), 3u);
  EXPECT_EQ(dims[1], 8u);
  EXPECT_EQ(dims.text(), "[512, 8, 128]");
  EXPECT_EQ(Dims().text(), "[]");
  std::ostringstream out;
  out << dims;
  EXPECT_EQ(out.str(), dims.text());
  EXPECT_EQ(std::accumulate(dims.begin(), dims.end(), uint64_t{0}), 648u);
  EXPECT_EQ(Dims({1, 2, 3, 4, 5, 6}).size(), kMaxRank);
  EXPECT_REFUSED(("6", "got 7"), Dims({1, 2, 3, 4, 5, 6, 7}));
  const std::vector<uint64_t> many(1000, 1);
  EXPECT_REFUSED(("got 1000"), Dims{std::span(many)});
}

TEST(Dims, Compares) {
  EXPECT_EQ(Dims({1, 2}), Dims({1, 2}));
  EXPECT_FALSE(Dims({1, 2}) == Dims({2, 1}));
  EXPECT_FALSE(Dims({1, 0}) == Dims({1})) << "numbers past the end do not count";
}

class TensorTest : public testing::Test {
 protected:
  // 0, 1, 2, ... so that an element says where it lies.
  Tensor counted(const Dims& shape) const {
    const Tensor tensor = device_.tensor(DType::i32, shape);
    std::iota(tensor.data<int32_t>().begin(), tensor.data<int32_t>().end(), 0);
    return tensor;
  }
  static std::vector<int32_t> values(const Tensor& tensor) {
    std::vector<int32_t> all(tensor.elements());
    tensor.read_to(std::span(all));
    return all;
  }

  Device device_ = Device::open("cpu", {.threads = 1});
};

using Values = std::vector<int32_t>;

TEST_F(TensorTest, UndefinedIsEmptyAndRefusesViews) {
  const Tensor tensor;
  EXPECT_FALSE(tensor.defined());
  EXPECT_EQ(tensor.elements(), 0u);
  EXPECT_EQ(tensor.bytes(), 0u);
  EXPECT_EQ(tensor.span_bytes(), 0u);
  EXPECT_EQ(tensor.rank(), 0u);
  EXPECT_REFUSED(("undefined"), tensor.slice(0, 0, 0));
  EXPECT_REFUSED(("undefined"), tensor.permute({}));
  EXPECT_REFUSED(("undefined"), tensor.reshape({}));
  EXPECT_REFUSED(("undefined"), tensor.strided({}, {}));
  EXPECT_REFUSED(("undefined"), tensor.data<float>());
  EXPECT_REFUSED(("undefined"), tensor.write_from(std::span<const float>()));
  EXPECT_REFUSED(("undefined"), tensor.read_to(std::span<float>()));
}

TEST_F(TensorTest, NewOnesAreContiguousAndZero) {
  const Tensor tensor = device_.tensor(DType::f16, {3, 5, 7});
  EXPECT_EQ(tensor.strides(), Dims({35, 7, 1}));
  EXPECT_EQ(tensor.elements(), 105u);
  EXPECT_EQ(tensor.bytes(), 210u);
  EXPECT_EQ(tensor.span_bytes(), 210u);
  EXPECT_TRUE(tensor.is_contiguous());
  EXPECT_TRUE(tensor.is_injective());
  for (const Half half : tensor.data<const Half>()) ASSERT_EQ(half.bits, 0);
}

TEST_F(TensorTest, ScalarsAndEmptyTensors) {
  const Tensor scalar = device_.tensor(DType::f32, {});
  EXPECT_EQ(scalar.elements(), 1u);
  scalar.data<float>()[0] = 3;
  float value = 0;
  scalar.read_to(std::span(&value, 1));
  EXPECT_EQ(value, 3.0f);
  const Tensor empty = device_.tensor(DType::f32, {4, 0, 2});
  EXPECT_TRUE(empty.defined());
  EXPECT_EQ(empty.elements(), 0u);
  EXPECT_EQ(empty.span_bytes(), 0u);
  EXPECT_TRUE(empty.data<float>().empty());
  EXPECT_EQ(empty.reshape({0}).rank(), 1u);
}

TEST_F(TensorTest, EmptyTensorsAreContiguousHoweverPermuted) {
  const Tensor empty = device_.tensor(DType::f32, {4, 3, 0});
  EXPECT_TRUE(empty.permute({2, 1, 0}).is_contiguous());
  EXPECT_TRUE(empty.permute({2, 0, 1}).data<float>().empty());
}

TEST_F(TensorTest, ShapeAndStrideCheckTheDimension) {
  const Tensor tensor = counted({2, 3});
  EXPECT_EQ(tensor.shape(1), 3u);
  EXPECT_EQ(tensor.stride(0), 3u);
  EXPECT_REFUSED(("dimension 2", "rank 2"), tensor.shape(2));
  EXPECT_REFUSED(("dimension 9", "rank 2"), tensor.stride(tensor.rank() + 7));
}

TEST_F(TensorTest, SlicesAreRelativeToTheView) {
  const Tensor tensor = counted({10, 4});
  const Tensor part = tensor.slice(0, 3, 5).slice(0, 2, 2).slice(1, 1, 2);
  EXPECT_EQ(part.byte_offset(), (5 * 4 + 1) * sizeof(int32_t));
  EXPECT_EQ(values(part), (Values{21, 22, 25, 26}));
  EXPECT_EQ(part.bytes(), 4 * sizeof(int32_t)) << "of the view, not of the storage";
  EXPECT_EQ(part.span_bytes(), 6 * sizeof(int32_t));
  EXPECT_FALSE(part.is_contiguous());
}

TEST_F(TensorTest, AddressIsOfTheFirstElement) {
  EXPECT_EQ(Tensor().address(), 0u);
  EXPECT_EQ(device_.tensor(DType::f32, {0, 3}).address(), 0u);
  const Tensor tensor = counted({10, 4});
  EXPECT_EQ(tensor.address(), reinterpret_cast<uintptr_t>(tensor.data<int32_t>().data()));
  EXPECT_EQ(tensor.slice(0, 3, 2).address(), tensor.address() + 3 * 4 * sizeof(int32_t));
}

TEST_F(TensorTest, KnowsWhatWasWrappedReadOnly) {
  int32_t memory[4] = {};
  const int32_t* const constant = memory;
  EXPECT_FALSE(Tensor().is_read_only());
  EXPECT_FALSE(device_.wrap(memory, DType::i32, {4}).is_read_only());
  EXPECT_TRUE(device_.wrap(constant, DType::i32, {4}).slice(0, 1, 2).is_read_only());
}

TEST_F(TensorTest, SlicesStayInside) {
  const Tensor part = counted({10, 4}).slice(0, 3, 5);
  EXPECT_EQ(part.slice(0, 5, 0).elements(), 0u);
  EXPECT_REFUSED(("tensor.slice", "5 entries", "6"), part.slice(0, 0, 6));
  EXPECT_REFUSED(("tensor.slice", "from 6"), part.slice(0, 6, 0));
  EXPECT_REFUSED(("tensor.slice", "dimension 2", "rank 2"), part.slice(2, 0, 1));
  EXPECT_REFUSED(("tensor.slice", std::to_string(~uint64_t{0})), part.slice(0, 2, ~uint64_t{0}))
      << "begin + count passes 2^64";
}

TEST_F(TensorTest, Permutes) {
  const Tensor permuted = counted({2, 3, 4}).permute({2, 0, 1});
  EXPECT_EQ(permuted.shape(), Dims({4, 2, 3}));
  EXPECT_EQ(permuted.strides(), Dims({1, 12, 4}));
  EXPECT_EQ(values(permuted.slice(0, 1, 1)), (Values{1, 5, 9, 13, 17, 21}));
  EXPECT_REFUSED(("2 dimensions", "rank 1"), counted({2}).permute({0, 1}));
  EXPECT_REFUSED(("[0, 0]"), counted({2, 2}).permute({0, 0}));
  EXPECT_REFUSED(("[0, 2]"), counted({2, 2}).permute({0, 2}));
  EXPECT_REFUSED(("[0, 64]"), counted({2, 2}).permute({0, 64})) << "no shift by 64";
  EXPECT_REFUSED((std::to_string(k2To63)), counted({2, 2}).permute({0, k2To63}));
}

TEST_F(TensorTest, Reshapes) {
  const Tensor tensor = counted({2, 6});
  EXPECT_EQ(tensor.reshape({3, 4}).strides(), Dims({4, 1}));
  EXPECT_EQ(values(tensor.slice(0, 1, 1).reshape({6})), (Values{6, 7, 8, 9, 10, 11}));
  EXPECT_REFUSED(("[2, 6]", "[5, 2]"), tensor.reshape({5, 2}));
  EXPECT_REFUSED(("contiguous", "[1, 6]"), tensor.permute({1, 0}).reshape({12}));
  // 2^32 * 2^32 * 12 is 0 in 64 bits; so is 2^62 * 4 + ... : neither may pass as a match.
  EXPECT_REFUSED(("2^63"), tensor.reshape({uint64_t{1} << 32, uint64_t{1} << 32, 12}));
  EXPECT_REFUSED(("2^63"), device_.tensor(DType::u8, {0}).reshape({k2To62, 4}));
}

TEST_F(TensorTest, StridedViews) {
  const Tensor tensor = counted({24}).slice(0, 4, 20);
  EXPECT_EQ(values(tensor.strided({2, 3}, {10, 2}, 1)), (Values{5, 7, 9, 15, 17, 19}));
  EXPECT_EQ(values(tensor.strided({3}, {0}, 19)), (Values{23, 23, 23}));
  EXPECT_EQ(tensor.strided({0, 5}, {1, 1}).elements(), 0u);
  EXPECT_REFUSED(("tensor.strided", "20 elements"), tensor.strided({21}, {1}));
  EXPECT_REFUSED(("tensor.strided", "element 2"), tensor.strided({2, 3}, {10, 4}, 2));
  EXPECT_REFUSED(("1 strides", "rank 2"), tensor.strided({2, 2}, {1}));
  EXPECT_REFUSED(("tensor.strided"), tensor.strided({1}, {1}, ~uint64_t{0}));
  EXPECT_REFUSED(("2^63"), tensor.strided({2}, {k2To63}));
  EXPECT_REFUSED(("2^63"), tensor.strided({5, 5}, {k2To62, k2To62}));
  // 4 * (2^62 - 1) + 4 * 1 + 1 wraps to 1 in 64 bits.
  EXPECT_REFUSED(("2^63"), tensor.strided({5, 5}, {k2To62 - 1, 1}));
}

// A view of one element repeated 2^80 times fits in its memory; its count does not fit anywhere.
TEST_F(TensorTest, RepeatedElementsMustBeCountable) {
  const Tensor tensor = counted({8});
  EXPECT_EQ(tensor.strided({k2To40}, {0}).elements(), k2To40);
  EXPECT_REFUSED(("tensor.strided", "2^63"), tensor.strided({k2To40, k2To40}, {0, 0}));
  EXPECT_REFUSED(("tensor.strided", "2^63"), tensor.strided({k2To62 + 1, 4}, {0, 0}))
      << "counts 4 in 64 bits";
}

TEST_F(TensorTest, HostileSizesAreRefused) {
  EXPECT_REFUSED(("2^63", "[1099511627776, 1099511627776]"),
                 device_.tensor(DType::u8, {k2To40, k2To40}));
  EXPECT_REFUSED(("device.tensor"), device_.tensor(DType::f32, {k2To63 - 1}));
  EXPECT_REFUSED(("2^63"), device_.tensor(DType::u8, {k2To63}));
  EXPECT_ERROR(out_of_memory, (std::to_string(k2To63 - 1)),
               device_.tensor(DType::u8, {k2To63 - 1}));
  EXPECT_ERROR(out_of_memory, (std::to_string(k2To62)), device_.tensor(DType::f32, {k2To62 / 4}));
  EXPECT_REFUSED((std::to_string(kDTypeCount), "dtype"),
                 device_.tensor(static_cast<DType>(kDTypeCount), {1}));
  EXPECT_EQ(device_.tensor(DType::f32, {0, k2To63, k2To63}).elements(), 0u)
      << "nothing of anything is nothing";
}

TEST_F(TensorTest, CopiesShareMemory) {
  const Tensor tensor = counted({4});
  const Tensor copy =
      tensor;  // NOLINT(performance-unnecessary-copy-initialization): the copy is the test
  copy.data<int32_t>()[2] = 99;
  EXPECT_EQ(values(tensor), (Values{0, 1, 99, 3}));
  EXPECT_EQ(storage_of(copy), storage_of(tensor));
}

TEST_F(TensorTest, MovedFromIsUndefined) {
  Tensor tensor = counted({4}), taken = std::move(tensor);
  EXPECT_EQ(values(taken), (Values{0, 1, 2, 3}));
  // NOLINTNEXTLINE(bugprone-use-after-move): what is left is the test
  EXPECT_FALSE(tensor.defined());
  EXPECT_EQ(tensor.elements(), 0u);
  EXPECT_EQ(tensor.bytes(), 0u);
  EXPECT_EQ(tensor.span_bytes(), 0u);
  EXPECT_EQ(tensor.rank(), 0u);
  EXPECT_REFUSED(("undefined"), tensor.data<int32_t>());
  tensor = counted({2, 3});
  tensor = std::move(taken);
  EXPECT_EQ(values(tensor), (Values{0, 1, 2, 3}));
  EXPECT_EQ(taken.elements(), 0u);  // NOLINT(bugprone-use-after-move)
  Tensor& itself = tensor;
  tensor = std::move(itself);
  EXPECT_EQ(values(tensor), (Values{0, 1, 2, 3}));
}

// The extent counts, not the elements: the gaps of a view belong to it.
TEST_F(TensorTest, StridedReachesIntoTheGapsOfItsView) {
  const Tensor columns = counted({4, 4}).slice(1, 0, 2);
  EXPECT_EQ(values(columns.strided({14}, {1})),
            (Values{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}));
  EXPECT_REFUSED(("tensor.strided", "14 elements"), columns.strided({15}, {1}));
}

TEST_F(TensorTest, InjectiveFollowsTheStrides) {
  const Tensor tensor = counted({24});
  EXPECT_TRUE(tensor.strided({4, 6}, {6, 1}).is_injective());
  EXPECT_TRUE(tensor.strided({4, 6}, {1, 4}).is_injective());
  EXPECT_FALSE(tensor.strided({4, 6}, {5, 1}).is_injective());
  EXPECT_FALSE(tensor.strided({2}, {0}).is_injective());
  EXPECT_TRUE(tensor.strided({1, 6}, {0, 1}).is_injective());
  EXPECT_TRUE(tensor.strided({4, 6}, {5, 1}).slice(1, 0, 5).is_injective())
      << "a view may be what its parent is not";
  EXPECT_FALSE(tensor.strided({4, 6}, {5, 1}).permute({1, 0}).is_injective());
}

}  // namespace
}  // namespace gyre::test
