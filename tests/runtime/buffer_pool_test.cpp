#include "runtime/buffer_pool.h"

#include <cstring>
#include <mutex>
#include <thread>

#include "expect_error.h"
#include "gyre_test.h"
#include "in_threads.h"

namespace gyre::test {
namespace {

// What the pool did with its memory; outlives the pool.
struct Ledger {
  std::mutex mutex;
  std::map<void*, uint64_t> out;  // taken and not given back
  uint64_t taken = 0;
  uint64_t mistakes = 0;  // given back twice, or with another size
  uint64_t limit_bytes = ~uint64_t{0}, out_bytes = 0;
};

class CountingMemory final : public MemorySource {
 public:
  explicit CountingMemory(std::shared_ptr<Ledger> ledger) : ledger_(std::move(ledger)) {}

  void* take(uint64_t bytes) override {
    const std::lock_guard lock(ledger_->mutex);
    if (bytes > ledger_->limit_bytes - ledger_->out_bytes) return nullptr;
    void* memory = ::operator new(bytes);
    std::memset(memory, 0, bytes);
    ledger_->out[memory] = bytes;
    ledger_->out_bytes += bytes;
    ++ledger_->taken;
    return memory;
  }
  void give(void* memory, uint64_t bytes) override {
    const std::lock_guard lock(ledger_->mutex);
    const auto entry = ledger_->out.find(memory);
    if (entry == ledger_->out.end() || entry->second != bytes) {
      ++ledger_->mistakes;
      return;
    }
    ledger_->out.erase(entry);
    ledger_->out_bytes -= bytes;
    ::operator delete(memory);
  }
  void zero(void* memory, uint64_t bytes) override { std::memset(memory, 0, bytes); }
  void* host(void* memory) override { return memory; }

 private:
  std::shared_ptr<Ledger> ledger_;
};

std::span<uint8_t> bytes_of(const Storage& storage) {
  return {static_cast<uint8_t*>(storage.host()), storage.bytes()};
}

bool all_equal(const Storage& storage, uint8_t value) {
  const auto bytes = bytes_of(storage);
  return std::all_of(bytes.begin(), bytes.end(), [&](uint8_t b) { return b == value; });
}

class Pool : public testing::Test {
 protected:
  std::shared_ptr<BufferPool> make_pool(uint64_t limit_bytes = 1 << 20) {
    return std::make_shared<BufferPool>(7, std::make_unique<CountingMemory>(ledger_), limit_bytes);
  }
  void TearDown() override {
    EXPECT_EQ(ledger_->mistakes, 0u);
    EXPECT_TRUE(ledger_->out.empty()) << ledger_->out.size() << " blocks were never given back";
  }

  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
};

TEST_F(Pool, HandsOutWhatWasAskedFor) {
  const auto pool = make_pool();
  const auto storage = pool->allocate(1000);
  EXPECT_EQ(storage->bytes(), 1000u);
  EXPECT_EQ(storage->device_id(), 7u);
  EXPECT_EQ(storage->address(), reinterpret_cast<uintptr_t>(storage->host()));
  EXPECT_FALSE(storage->read_only());
  EXPECT_TRUE(all_equal(*storage, 0));
}

TEST_F(Pool, ReusedMemoryIsZeroAgain) {
  const auto pool = make_pool();
  uint64_t address = 0;
  {
    const auto storage = pool->allocate(1000);
    std::fill(bytes_of(*storage).begin(), bytes_of(*storage).end(), uint8_t{0xAB});
    address = storage->address();
  }
  const auto storage = pool->allocate(1001);
  EXPECT_EQ(storage->address(), address) << "same block size, so the block comes back";
  EXPECT_TRUE(all_equal(*storage, 0));
  EXPECT_EQ(pool->use().reuses, 1u);
  EXPECT_EQ(pool->use().system_allocations, 1u);
}

TEST_F(Pool, CountsBytesBackToZero) {
  const auto pool = make_pool();
  {
    const auto a = pool->allocate(1000);
    const auto b = pool->allocate(5000);
    EXPECT_EQ(pool->use().in_use_bytes,
              BufferPool::block_bytes(1000) + BufferPool::block_bytes(5000));
    EXPECT_EQ(pool->use().cached_bytes, 0u);
  }
  EXPECT_EQ(pool->use().in_use_bytes, 0u);
  EXPECT_EQ(pool->use().cached_bytes,
            BufferPool::block_bytes(1000) + BufferPool::block_bytes(5000));
  pool->trim();
  EXPECT_EQ(pool->use().cached_bytes, 0u);
  EXPECT_TRUE(ledger_->out.empty());
}

TEST_F(Pool, KeepsNoMoreThanItsLimit) {
  const auto pool = make_pool(4096);
  {
    std::vector<std::shared_ptr<Storage>> held;
    for (int i = 0; i < 10; ++i) held.push_back(pool->allocate(1024));
  }
  EXPECT_LE(pool->use().cached_bytes, 4096u);
  EXPECT_GE(pool->use().cached_bytes, 4096u - 1024u);
  EXPECT_EQ(ledger_->out_bytes, pool->use().cached_bytes) << "the rest went back";
  const auto none = make_pool(0);
  none->allocate(100);
  EXPECT_EQ(none->use().cached_bytes, 0u);
}

TEST_F(Pool, EmptyRequestsTakeNoMemory) {
  const auto pool = make_pool();
  const auto storage = pool->allocate(0);
  EXPECT_EQ(storage->bytes(), 0u);
  EXPECT_EQ(ledger_->taken, 0u);
  EXPECT_EQ(pool->use().in_use_bytes, 0u);
}

TEST_F(Pool, BlocksWasteLittle) {
  constexpr uint64_t kMiB = 1 << 20;
  std::mt19937_64 random(1);
  for (int i = 0; i < 200000; ++i) {
    const uint64_t bytes = i < 5000 ? static_cast<uint64_t>(i) + 1
                                    : (random() >> (random() % 62)) % (uint64_t{1} << 62) + 1;
    const uint64_t block = BufferPool::block_bytes(bytes);
    ASSERT_GE(block, bytes);
    ASSERT_LT(block - bytes, std::clamp<uint64_t>(bytes / 8, 256, 2 * kMiB)) << bytes;
    ASSERT_EQ(BufferPool::block_bytes(block), block) << "a freed block finds its own kind again";
    ASSERT_GE(BufferPool::block_bytes(bytes + 1), block) << "and never a smaller request's";
  }
}

TEST_F(Pool, SaysWhenMemoryIsOut) {
  const auto pool = make_pool();
  ledger_->limit_bytes = 10000;
  const auto held = pool->allocate(4096);
  EXPECT_ERROR(out_of_memory, ("9000 bytes", "4096 bytes are in use"), pool->allocate(9000));
  EXPECT_EQ(pool->use().in_use_bytes, 4096u) << "the failed request is not counted";
  EXPECT_ERROR(out_of_memory, (std::to_string(~uint64_t{0})), pool->allocate(~uint64_t{0}));
}

TEST_F(Pool, GivesItsCacheUpBeforeItFails) {
  const auto pool = make_pool();
  ledger_->limit_bytes = 10000;
  pool->allocate(8192);  // cached now
  const auto storage = pool->allocate(4096);
  EXPECT_EQ(storage->bytes(), 4096u);
  EXPECT_EQ(pool->use().cached_bytes, 0u);
}

TEST_F(Pool, StorageMayOutliveIt) {
  auto pool = make_pool();
  auto storage = pool->allocate(3000);
  pool.reset();
  std::fill(bytes_of(*storage).begin(), bytes_of(*storage).end(), uint8_t{1});
  EXPECT_TRUE(all_equal(*storage, 1));
  storage.reset();
  EXPECT_TRUE(ledger_->out.empty()) << "the last storage takes the pool with it";
}

// Each owner writes its own mark over its whole storage and finds it there later: a storage with
// two owners would show the other one's.
TEST_F(Pool, NeverTwoOwnersUnderFourThreads) {
  const auto pool = make_pool(1 << 16);
  std::atomic<uint64_t> broken{0};
  in_threads(4, [&](size_t thread) {
    std::mt19937 random(static_cast<uint32_t>(thread));
    std::vector<std::pair<std::shared_ptr<Storage>, uint8_t>> held;
    for (int i = 0; i < 8000; ++i) {
      if (held.size() < 6 && random() % 2 == 0) {
        auto storage = pool->allocate(1 + random() % 3000);
        if (!all_equal(*storage, 0)) ++broken;
        const auto mark = static_cast<uint8_t>(thread * 60 + random() % 60 + 1);
        std::fill(bytes_of(*storage).begin(), bytes_of(*storage).end(), mark);
        held.emplace_back(std::move(storage), mark);
      } else if (!held.empty()) {
        const size_t which = random() % held.size();
        if (!all_equal(*held[which].first, held[which].second)) ++broken;
        held.erase(held.begin() + static_cast<ptrdiff_t>(which));
      }
      if (random() % 500 == 0) pool->trim();
    }
  });
  EXPECT_EQ(broken.load(), 0u);
  EXPECT_EQ(pool->use().in_use_bytes, 0u);
  EXPECT_LE(pool->use().cached_bytes, 1u << 16);
  EXPECT_GT(pool->use().reuses, 0u);
  EXPECT_EQ(pool->use().system_allocations, ledger_->taken);
}

// One storage shared by many handles goes back once, with the last of them.
TEST_F(Pool, SharedStorageGoesBackOnce) {
  const auto pool = make_pool();
  auto storage = pool->allocate(500);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([copy = storage] {
      for (int i = 0; i < 1000; ++i) const auto again = copy;
    });
  }
  EXPECT_EQ(pool->use().in_use_bytes, BufferPool::block_bytes(500));
  storage.reset();
  for (std::thread& thread : threads) thread.join();
  threads.clear();
  EXPECT_EQ(pool->use().in_use_bytes, 0u);
  EXPECT_EQ(pool->use().cached_bytes, BufferPool::block_bytes(500));
}

}  // namespace
}  // namespace gyre::test
