#include "runtime/layout.h"

#include "expect_error.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

constexpr uint64_t k2To62 = uint64_t{1} << 62;
constexpr uint64_t kMax = (uint64_t{1} << 63) - 1;

TEST(Layout, CountsElementsIn63Bits) {
  EXPECT_EQ(checked_elements("x", {}), 1u);
  EXPECT_EQ(checked_elements("x", {3, 4}), 12u);
  EXPECT_EQ(checked_elements("x", {kMax}), kMax);
  EXPECT_EQ(checked_elements("x", {k2To62, k2To62, 0}), 0u);
  EXPECT_REFUSED(("rope", "2^63"), checked_elements("rope", {kMax, 2}));
  EXPECT_REFUSED(("2^63"), checked_elements("x", {kMax + 1}));
  EXPECT_REFUSED(("2^63"), checked_elements("x", {k2To62, k2To62, 4})) << "2^126 is 0 in 64 bits";
}

TEST(Layout, MeasuresTheExtent) {
  EXPECT_EQ(checked_extent("x", {3, 4}, {10, 2}), 27u);
  EXPECT_EQ(checked_extent("x", {0, 4}, {10, 2}), 0u);
  EXPECT_EQ(checked_extent("x", {1, 1}, {kMax, kMax}), 1u);
  EXPECT_EQ(checked_extent("x", {2}, {kMax - 1}), kMax);
  EXPECT_REFUSED(("2^63"), checked_extent("x", {2}, {kMax}));
  EXPECT_REFUSED(("2^63"), checked_extent("x", {3}, {k2To62}));
  EXPECT_REFUSED(("2^63"), checked_extent("x", {2, 2}, {k2To62, k2To62}));
  EXPECT_REFUSED(("1 strides", "rank 2"), checked_extent("x", {2, 2}, {1}));
}

TEST(Layout, ContiguousStrides) {
  EXPECT_EQ(contiguous_strides({2, 3, 4}), Dims({12, 4, 1}));
  EXPECT_EQ(contiguous_strides({}), Dims());
  EXPECT_EQ(contiguous_strides({5, 1}), Dims({1, 1}));
}

// Every byte that a tensor's elements cover.
std::multiset<uint64_t> bytes_of(const Tensor& tensor) {
  std::multiset<uint64_t> bytes;
  const uint64_t unit = size_bytes(tensor.dtype());
  for (uint64_t n = 0; n < tensor.elements(); ++n) {
    uint64_t rest = n, at = tensor.byte_offset();
    for (uint32_t d = tensor.rank(); d-- > 0;) {
      at += rest % tensor.shape(d) * tensor.stride(d) * unit;
      rest /= tensor.shape(d);
    }
    for (uint64_t b = 0; b < unit; ++b) bytes.insert(at + b);
  }
  return bytes;
}

bool share_a_byte(const Tensor& a, const Tensor& b) {
  const auto in_a = bytes_of(a);
  for (const uint64_t byte : bytes_of(b)) {
    if (in_a.contains(byte)) return true;
  }
  return false;
}

Dims random_dims(std::mt19937& random, uint32_t rank, uint64_t min, uint64_t max) {
  Dims dims = contiguous_strides(Dims(std::vector<uint64_t>(rank, 1)));
  for (uint32_t d = 0; d < rank; ++d) dims[d] = min + random() % (max - min + 1);
  return dims;
}

// A view into `memory`, or an undefined tensor if the dice put it outside.
Tensor random_view(std::mt19937& random, const Tensor& memory) {
  const auto rank = static_cast<uint32_t>(random() % 4);
  const Dims shape = random_dims(random, rank, random() % 20 == 0 ? 0 : 1, 4);
  const Dims strides = random_dims(random, rank, 0, 12);
  try {
    return memory.strided(shape, strides, random() % 30);
  } catch (const Error&) {
    return {};
  }
}

class LayoutOracle : public testing::Test {
 protected:
  Device device_ = Device::open("cpu", {.threads = 1});
  Tensor memory_ = device_.tensor(DType::f16, {64});
};

TEST_F(LayoutOracle, InjectiveTensorsNeverRepeatAByte) {
  std::mt19937 random(1);
  int injective = 0;
  for (int round = 0; round < 30000; ++round) {
    const Tensor view = random_view(random, memory_);
    if (!view.defined() || !view.is_injective()) continue;
    ++injective;
    EXPECT_EQ(strides_nest(view.shape(), view.strides()), view.is_injective());
    const auto bytes = bytes_of(view);
    ASSERT_EQ(std::set<uint64_t>(bytes.begin(), bytes.end()).size(), bytes.size())
        << view.shape() << " " << view.strides();
  }
  EXPECT_GT(injective, 3000);
}

// Strides that nest must be recognised, or caches would be refused for no reason.
TEST_F(LayoutOracle, PermutedSlicesOfAContiguousTensorAreInjective) {
  std::mt19937 random(2);
  const Tensor whole = memory_.reshape({4, 4, 4});
  constexpr uint64_t kOrders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                      {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (int round = 0; round < 500; ++round) {
    Tensor view = whole;
    for (uint32_t d = 0; d < 3; ++d) {
      const uint64_t begin = random() % 5;
      view = view.slice(d, begin, random() % (5 - begin));
    }
    const auto& order = kOrders[random() % 6];
    EXPECT_TRUE(view.permute({order[0], order[1], order[2]}).is_injective());
  }
}

TEST_F(LayoutOracle, OverlapIsNeverMissed) {
  std::mt19937 random(3);
  const Tensor other_type = device_.wrap(memory_.data<Half>().data(), DType::u8, {128});
  int shared = 0;
  for (int round = 0; round < 20000; ++round) {
    const Tensor a = random_view(random, memory_);
    const Tensor b = random_view(random, round % 4 == 0 ? other_type : memory_);
    if (!a.defined() || !b.defined() || !share_a_byte(a, b)) continue;
    ++shared;
    ASSERT_TRUE(may_overlap(a, b))
        << a.shape() << a.strides() << " and " << b.shape() << b.strides();
    ASSERT_TRUE(may_overlap(b, a));
  }
  EXPECT_GT(shared, 1000);
}

// Same shape and nesting strides, moved by any distance: the answer is exact.
TEST_F(LayoutOracle, OverlapOfTwinsIsExact) {
  std::mt19937 random(4);
  int apart_in_range = 0;
  for (int round = 0; round < 20000; ++round) {
    const Tensor a = random_view(random, memory_);
    if (!a.defined() || !a.is_injective()) continue;
    Tensor b;
    try {
      b = memory_.strided(a.shape(), a.strides(), random() % 40);
    } catch (const Error&) {
      continue;
    }
    const bool shared = share_a_byte(a, b);
    ASSERT_EQ(may_overlap(a, b), shared)
        << a.shape() << a.strides() << " " << a.byte_offset() << " and " << b.byte_offset();
    const bool ranges_meet = a.elements() != 0 &&
                             a.byte_offset() < b.byte_offset() + b.span_bytes() &&
                             b.byte_offset() < a.byte_offset() + a.span_bytes();
    if (ranges_meet && !shared) ++apart_in_range;
  }
  EXPECT_GT(apart_in_range, 200) << "interleaved pairs were among them";
}

// Slices of one tensor step alike; their sizes may differ.
TEST_F(LayoutOracle, OverlapOfSlicesOfOneTensorIsExact) {
  std::mt19937 random(5);
  const Tensor whole = memory_.reshape({4, 4, 4});
  const auto slice = [&] {
    Tensor view = whole;
    for (uint32_t d = 0; d < 3; ++d) {
      const uint64_t begin = random() % 4;
      view = view.slice(d, begin, 1 + random() % (4 - begin));
    }
    return view;
  };
  int apart_in_range = 0;
  for (int round = 0; round < 20000; ++round) {
    const Tensor a = slice(), b = slice();
    const bool shared = share_a_byte(a, b);
    ASSERT_EQ(may_overlap(a, b), shared) << a.shape() << " at " << a.byte_offset() << " and "
                                         << b.shape() << " at " << b.byte_offset();
    const bool ranges_meet = a.byte_offset() < b.byte_offset() + b.span_bytes() &&
                             b.byte_offset() < a.byte_offset() + a.span_bytes();
    if (ranges_meet && !shared) ++apart_in_range;
  }
  EXPECT_GT(apart_in_range, 1000);
}

TEST_F(LayoutOracle, HeadsOfKAndVOfOtherLengthInOneBufferDoNotMeet) {
  const Tensor rows = device_.tensor(DType::f16, {8, 2, 96});
  EXPECT_FALSE(may_overlap(rows.slice(2, 0, 64), rows.slice(2, 64, 32)));
  EXPECT_TRUE(may_overlap(rows.slice(2, 0, 65), rows.slice(2, 64, 32)));
  // K0 V0 K1 V1, V shorter than its place.
  const Tensor turns = device_.tensor(DType::f16, {8, 4, 64});
  const Tensor k = turns.strided({8, 2, 64}, {256, 128, 1});
  EXPECT_FALSE(may_overlap(k, turns.strided({8, 2, 32}, {256, 128, 1}, 64)));
  EXPECT_TRUE(may_overlap(k, turns.strided({8, 2, 32}, {256, 128, 1}, 63)));
  EXPECT_TRUE(may_overlap(k, turns.strided({8, 1, 32}, {256, 9, 1}, 128)));
}

TEST_F(LayoutOracle, NothingOverlapsNothing) {
  EXPECT_FALSE(may_overlap(memory_, memory_.slice(0, 5, 0)));
  EXPECT_FALSE(may_overlap(memory_.slice(0, 5, 0), memory_));
  EXPECT_TRUE(may_overlap(memory_, memory_.slice(0, 5, 1)));
  EXPECT_FALSE(may_overlap(memory_, device_.tensor(DType::f16, {64}))) << "other storage";
}

// Two wraps of one memory are two storages at one address.
TEST_F(LayoutOracle, OverlapIsSeenAcrossWraps) {
  std::vector<uint8_t> bytes(64);
  const Tensor a = device_.wrap(bytes.data(), DType::u8, {40});
  const Tensor b = device_.wrap(bytes.data() + 30, DType::u8, {34});
  EXPECT_TRUE(may_overlap(a, b));
  EXPECT_FALSE(may_overlap(a.slice(0, 0, 30), b));
}

}  // namespace
}  // namespace gyre::test
