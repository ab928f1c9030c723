#include "runtime/buffer_pool.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <utility>

#include "runtime/require.h"

namespace gyre {

class BufferPool::PooledStorage final : public Storage {
 public:
  PooledStorage(std::shared_ptr<BufferPool> pool, void* memory, uint64_t block, const Block& info)
      : Storage(pool->device_id_, info),
        pool_(std::move(pool)),
        memory_(memory),
        block_bytes_(block) {}
  ~PooledStorage() override { pool_->release(memory_, block_bytes_); }

  void read(uint64_t offset, void* to, uint64_t bytes) const override {
    pool_->source_->read(static_cast<std::byte*>(memory_) + offset, to, bytes);
  }
  void write(uint64_t offset, const void* from, uint64_t bytes) const override {
    pool_->source_->write(static_cast<std::byte*>(memory_) + offset, from, bytes);
  }

 private:
  std::shared_ptr<BufferPool> pool_;
  void* memory_;
  uint64_t block_bytes_;
};

BufferPool::BufferPool(uint64_t device_id, std::unique_ptr<MemorySource> source,
                       uint64_t limit_bytes)
    : device_id_(device_id), limit_bytes_(limit_bytes), source_(std::move(source)) {}

BufferPool::~BufferPool() { trim(); }

uint64_t BufferPool::block_bytes(uint64_t bytes) {
  constexpr uint64_t kSmallest = 256;
  constexpr uint64_t kLargestStep = uint64_t{2} << 20;
  const uint64_t step = std::clamp(std::bit_floor(bytes) / 8, kSmallest, kLargestStep);
  return (bytes + step - 1) / step * step;
}

std::shared_ptr<Storage> BufferPool::allocate(uint64_t bytes) {
  constexpr uint64_t kMost = uint64_t{1} << 62;
  if (bytes > kMost)
    fail(ErrorCode::out_of_memory, "allocate: ", bytes, " bytes cannot be addressed");
  if (bytes == 0) return std::make_shared<Storage>(device_id_, Storage::Block{});
  const uint64_t block = block_bytes(bytes);
  void* memory = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (const auto entry = free_.find(block); entry != free_.end() && !entry->second.empty()) {
      memory = entry->second.back();
      entry->second.pop_back();
      use_.cached_bytes -= block;
      use_.in_use_bytes += block;
      ++use_.reuses;
    }
  }
  if (memory != nullptr) {
    source_->zero(memory, bytes);
  } else {
    memory = source_->take(block);
    if (memory == nullptr) {
      trim();  // what is cached in other sizes may be what is missing
      memory = source_->take(block);
    }
    if (memory == nullptr) {
      fail(ErrorCode::out_of_memory, "allocate: no memory for ", bytes, " bytes; ",
           use().in_use_bytes, " bytes are in use");
    }
    const std::lock_guard lock(mutex_);
    use_.in_use_bytes += block;
    ++use_.system_allocations;
  }
  const Storage::Block info{.address = reinterpret_cast<uintptr_t>(memory),
                            .bytes = bytes,
                            .host = source_->host(memory),
                            .read_only = false};
  return std::make_shared<PooledStorage>(shared_from_this(), memory, block, info);
}

void BufferPool::release(void* memory, uint64_t block) {
  {
    const std::lock_guard lock(mutex_);
    use_.in_use_bytes -= block;
    if (use_.cached_bytes + block <= limit_bytes_) {
      free_[block].push_back(memory);
      use_.cached_bytes += block;
      return;
    }
  }
  source_->give(memory, block);
}

MemoryUse BufferPool::use() const {
  const std::lock_guard lock(mutex_);
  return use_;
}

void BufferPool::trim() {
  std::map<uint64_t, std::vector<void*>> freed;
  {
    const std::lock_guard lock(mutex_);
    freed.swap(free_);
    use_.cached_bytes = 0;
  }
  for (const auto& [block, blocks] : freed) {
    for (void* memory : blocks) source_->give(memory, block);
  }
}

}  // namespace gyre
