// Caches and sources beyond 2^32 elements. The memory is reserved, not filled: only the pages of
// the few rows that a call touches become real. Where a 32-bit index would have landed must stay
// zero.
#include <sys/mman.h>

#include "gyre_test.h"
#include "run_now.h"

namespace gyre::test {
namespace {

constexpr uint64_t k2To32 = uint64_t{1} << 32;

// Zero-filled address space; pages exist once they are written.
class Sparse {
 public:
  explicit Sparse(uint64_t bytes) : bytes_(bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    memory_ = memory == MAP_FAILED ? nullptr : memory;
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  ~Sparse() {
    if (memory_ != nullptr) munmap(memory_, bytes_);
  }

  bool reserved() const { return memory_ != nullptr; }
  template <class T>
  T* data() const {
    return static_cast<T*>(memory_);
  }

 private:
  uint64_t bytes_;
  void* memory_;
};

class KvCopyLarge : public testing::Test {
 protected:
  // [tokens, heads, head_dim] f32 with values that name their place.
  Tensor source(const Dims& shape) const {
    const Tensor tensor = device_.tensor(DType::f32, shape);
    const auto data = tensor.data<float>();
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i + 1);
    return tensor;
  }

  Device device_ = Device::open("cpu", {.threads = 2});
};

TEST_F(KvCopyLarge, HeadMajorCache) {
  constexpr uint64_t kHeads = 3;
  constexpr uint64_t kCapacity = uint64_t{1} << 30;
  constexpr uint64_t kHeadDim = 3;
  const Sparse memory(kHeads * kCapacity * kHeadDim * sizeof(Half));
  if (!memory.reserved()) GTEST_SKIP() << "no address space";
  const Tensor cache = device_.wrap(memory.data<Half>(), DType::f16, {kHeads, kCapacity, kHeadDim});
  const Tensor k = source({2, kHeads, kHeadDim});
  kv_copy(RunNow(device_), {.k = k, .k_cache = cache.permute({1, 0, 2})},
          {.position = kCapacity - 1, .cache = CacheKind::ring});
  for (uint64_t head = 0; head < kHeads; ++head) {
    for (uint64_t e = 0; e < kHeadDim; ++e) {
      const uint64_t last = (head * kCapacity + kCapacity - 1) * kHeadDim + e;
      const uint64_t first = head * kCapacity * kHeadDim + e;
      EXPECT_EQ(memory.data<Half>()[last], Half(static_cast<float>(head * kHeadDim + e + 1)));
      EXPECT_EQ(memory.data<Half>()[first],
                Half(static_cast<float>((kHeads + head) * kHeadDim + e + 1)));
      for (const uint64_t index : {first, last}) {
        if (index < k2To32) continue;
        EXPECT_EQ(memory.data<Half>()[index - k2To32].bits, 0) << "a 32-bit index lands here";
      }
    }
  }
}

TEST_F(KvCopyLarge, TokenMajorCacheAndPositionPast32Bits) {
  constexpr uint64_t kCapacity = 2 * k2To32 + 7;
  const Sparse memory(kCapacity * sizeof(Half));
  if (!memory.reserved()) GTEST_SKIP() << "no address space";
  const Tensor cache = device_.wrap(memory.data<Half>(), DType::f16, {kCapacity, 1, 1});
  Encoder encoder(device_);
  kv_copy(encoder, {.k = source({3, 1, 1}), .k_cache = cache}, {.position = k2To32 + 5});
  kv_copy(encoder, {.k = source({3, 1, 1}), .k_cache = cache}, {.position = 2 * k2To32 + 4});
  encoder.submit().wait();
  for (uint64_t t = 0; t < 3; ++t) {
    const Half expected(static_cast<float>(t + 1));
    EXPECT_EQ(memory.data<Half>()[k2To32 + 5 + t], expected);
    EXPECT_EQ(memory.data<Half>()[2 * k2To32 + 4 + t], expected);
  }
  for (uint64_t slot = 0; slot < 16; ++slot) EXPECT_EQ(memory.data<Half>()[slot].bits, 0) << slot;
  EXPECT_THROW(
      kv_copy(encoder, {.k = source({4, 1, 1}), .k_cache = cache}, {.position = kCapacity - 3}),
      Error);
}

TEST_F(KvCopyLarge, SourcePast32Bits) {
  constexpr uint64_t kTokens = k2To32 / 2 + 9;
  constexpr uint64_t kHeadDim = 3;
  const Sparse memory(kTokens * kHeadDim * sizeof(Half));
  if (!memory.reserved()) GTEST_SKIP() << "no address space";
  const uint64_t begin = kTokens - 2;
  for (uint64_t i = 0; i < 2 * kHeadDim; ++i)
    memory.data<Half>()[begin * kHeadDim + i] = Half(static_cast<float>(i + 1));
  const Tensor k = device_.wrap(static_cast<const void*>(memory.data<Half>()), DType::f16,
                                {kTokens, 1, kHeadDim});
  const Tensor cache = device_.tensor(DType::f32, {4, 1, kHeadDim});
  kv_copy(RunNow(device_), {.k = k, .k_cache = cache}, {.position = 1, .source_begin = begin});
  for (uint64_t i = 0; i < 4 * kHeadDim; ++i) {
    const bool written = i >= kHeadDim && i < 3 * kHeadDim;
    EXPECT_EQ(cache.data<float>()[i], written ? static_cast<float>(i - kHeadDim + 1) : 0.0f);
  }
}

// More tokens than slots, by more than 2^32: only the last ones are read.
TEST_F(KvCopyLarge, DropsMoreThan32BitsOfTokensOnARing) {
  constexpr uint64_t kTokens = k2To32 + 11;
  const Sparse memory(kTokens * sizeof(Half));
  if (!memory.reserved()) GTEST_SKIP() << "no address space";
  for (uint64_t i = 1; i <= 7; ++i) memory.data<Half>()[kTokens - i] = Half(static_cast<float>(i));
  const Tensor k = device_.wrap(memory.data<Half>(), DType::f16, {kTokens, 1, 1});
  const Tensor cache = device_.tensor(DType::f16, {7, 1, 1});
  kv_copy(RunNow(device_), {.k = k, .k_cache = cache}, {.position = 3, .cache = CacheKind::ring});
  for (uint64_t i = 1; i <= 7; ++i) {
    const uint64_t slot = (3 + kTokens - i) % 7;
    EXPECT_EQ(cache.data<Half>()[slot], Half(static_cast<float>(i))) << slot;
  }
}

}  // namespace
}  // namespace gyre::test
