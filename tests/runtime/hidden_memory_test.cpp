// write_from and read_to on memory that the host cannot reach, by a device that only pretends.
#include <cstring>
#include <numeric>

#include "expect_error.h"
#include "gyre_test.h"
#include "runtime/buffer_pool.h"
#include "runtime/device_impl.h"

namespace gyre::test {
namespace {

struct Copies {
  std::vector<uint64_t> reads, writes;  // bytes of each
};

class HiddenMemory final : public MemorySource {
 public:
  explicit HiddenMemory(Copies& copies) : copies_(copies) {}

  void* take(uint64_t bytes) override { return std::calloc(1, bytes); }
  void give(void* memory, uint64_t /*bytes*/) override { std::free(memory); }
  void zero(void* memory, uint64_t bytes) override { std::memset(memory, 0, bytes); }
  void* host(void* /*memory*/) override { return nullptr; }
  void read(const void* memory, void* to, uint64_t bytes) override {
    std::memcpy(to, memory, bytes);
    copies_.reads.push_back(bytes);
  }
  void write(void* memory, const void* from, uint64_t bytes) override {
    std::memcpy(memory, from, bytes);
    copies_.writes.push_back(bytes);
  }

 private:
  Copies& copies_;
};

class HiddenDevice final : public DeviceImpl {
 public:
  explicit HiddenDevice(Copies& copies)
      : pool_(std::make_shared<BufferPool>(id(), std::make_unique<HiddenMemory>(copies), 0)) {}

  const DeviceInfo& info() const override { return info_; }
  std::shared_ptr<Storage> allocate(uint64_t bytes) override { return pool_->allocate(bytes); }
  std::shared_ptr<Storage> wrap(const Storage::Block& block, std::shared_ptr<void>) override {
    return std::make_shared<Storage>(id(), Storage::Block{block.address, block.bytes, nullptr});
  }
  std::shared_ptr<const Pipeline> pipeline(const KernelInfo&, uint64_t) override { return nullptr; }
  std::string describe(const KernelInfo&, uint64_t) const override { return ""; }
  bool has(const KernelInfo&, uint64_t) const override { return false; }
  uint32_t loaded_pipelines(const KernelInfo&) const override { return 0; }
  std::shared_ptr<FenceState> submit(const CommandList&) override { return nullptr; }
  std::unique_ptr<GraphImpl> instantiate(CommandList) override { return nullptr; }
  MemoryUse memory() const override { return pool_->use(); }
  void trim() override { pool_->trim(); }

 private:
  DeviceInfo info_;
  std::shared_ptr<BufferPool> pool_;
};

class HiddenMemoryTest : public testing::Test {
 protected:
  std::vector<int32_t> counting(uint64_t count, int32_t first = 1) const {
    std::vector<int32_t> values(count);
    std::iota(values.begin(), values.end(), first);
    return values;
  }
  static void write(const Tensor& to, const std::vector<int32_t>& values) {
    to.write_from(std::span<const int32_t>(values));
  }
  static std::vector<int32_t> read(const Tensor& from) {
    std::vector<int32_t> values(from.elements());
    from.read_to(std::span<int32_t>(values));
    return values;
  }

  Copies copies_;
  Device device_ = device_of(std::make_shared<HiddenDevice>(copies_));
};

TEST_F(HiddenMemoryTest, AContiguousTensorIsOneCopy) {
  const Tensor tensor = device_.tensor(DType::i32, {4, 3, 5});
  EXPECT_EQ(read(tensor), std::vector<int32_t>(60, 0)) << "zero-filled";
  write(tensor, counting(60));
  EXPECT_EQ(read(tensor), counting(60));
  EXPECT_EQ(copies_.writes, (std::vector<uint64_t>{240}));
  EXPECT_EQ(copies_.reads, (std::vector<uint64_t>{240, 240}));
}

TEST_F(HiddenMemoryTest, AStridedWriteTouchesItsRunsOnly) {
  const Tensor tensor = device_.tensor(DType::i32, {4, 3, 5}), view = tensor.slice(1, 1, 1);
  write(view, counting(20, 100));
  EXPECT_EQ(copies_.writes, std::vector<uint64_t>(4, 20));
  std::vector<int32_t> expected(60, 0);
  for (int32_t i = 0; i < 20; ++i) expected[i / 5 * 15 + 5 + i % 5] = 100 + i;
  EXPECT_EQ(read(tensor), expected);
  EXPECT_EQ(read(view), counting(20, 100));
  EXPECT_EQ(copies_.reads.back(), (3 * 15 + 5) * sizeof(int32_t)) << "its span at once";
}

TEST_F(HiddenMemoryTest, OuterDimensionsJoinARun) {
  const Tensor tensor = device_.tensor(DType::i32, {4, 3, 5});
  write(tensor.slice(0, 1, 2), counting(30));
  EXPECT_EQ(copies_.writes, (std::vector<uint64_t>{120}));
  write(tensor.slice(0, 2, 1).slice(1, 0, 2), counting(10));
  EXPECT_EQ(copies_.writes.back(), 40u) << "a dimension of one entry has no say";
}

TEST_F(HiddenMemoryTest, APermutedTensorKeepsItsOrder) {
  const Tensor tensor = device_.tensor(DType::i32, {2, 3});
  write(tensor.permute({1, 0}), {1, 2, 3, 4, 5, 6});
  EXPECT_EQ(read(tensor), (std::vector<int32_t>{1, 3, 5, 2, 4, 6}));
  EXPECT_EQ(read(tensor.permute({1, 0})), counting(6));
}

TEST_F(HiddenMemoryTest, AWideViewIsReadRunByRun) {
  const Tensor tensor = device_.tensor(DType::i32, {3, 1 << 19}), column = tensor.slice(1, 7, 2);
  write(column, counting(6));
  EXPECT_EQ(read(column), counting(6));
  EXPECT_EQ(copies_.reads, std::vector<uint64_t>(3, 8));
}

TEST_F(HiddenMemoryTest, ARepeatedElementIsRead) {
  const Tensor tensor = device_.tensor(DType::i32, {3});
  write(tensor, {7, 8, 9});
  EXPECT_EQ(read(tensor.strided({2, 3}, {0, 1})), (std::vector<int32_t>{7, 8, 9, 7, 8, 9}));
}

TEST_F(HiddenMemoryTest, IsNotHandedOut) {
  const Tensor tensor = device_.tensor(DType::i32, {3});
  EXPECT_REFUSED(("tensor.data", "not visible"), tensor.data<int32_t>());
  int32_t somewhere = 0;
  const Tensor wrapped = device_.wrap(&somewhere, DType::i32, {1});
  EXPECT_ERROR(unsupported, ("not visible"), read(wrapped));
  EXPECT_ERROR(unsupported, ("not visible"), write(wrapped, {1}));
}

}  // namespace
}  // namespace gyre::test
