#include "runtime/buffer_pool.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <iterator>
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
  constexpr uint64_t kMax = uint64_t{1} << 62;
  if (bytes > kMax)
    fail(ErrorCode::out_of_memory, "allocate: ", bytes, " bytes cannot be addressed");
  if (bytes == 0) return std::make_shared<Storage>(device_id_, Storage::Block{});
  const uint64_t block = block_bytes(bytes);
  void* const memory = take(bytes, block);
  try {
    const Storage::Block info{.address = reinterpret_cast<uintptr_t>(memory),
                              .bytes = bytes,
                              .host = source_->host(memory),
                              .read_only = false};
    return std::make_shared<PooledStorage>(shared_from_this(), memory, block, info);
  } catch (...) {
    release(memory, block);
    throw;
  }
}

// Zero-filled; counted as in use.
void* BufferPool::take(uint64_t bytes, uint64_t block) {
  void* memory = nullptr;
  {
    const std::lock_guard lock(mutex_);
    SizeClass& of_size = classes_[block];
    if (!of_size.free.empty()) {
      memory = of_size.free.back();
      of_size.free.pop_back();
      use_.cached_bytes -= block;
      ++use_.reuses;
    } else {
      constexpr size_t kFewest = 4;
      if (of_size.free.capacity() <= of_size.blocks)
        of_size.free.reserve(std::max(kFewest, 2 * of_size.free.capacity()));
      ++of_size.blocks;
    }
    use_.in_use_bytes += block;
  }
  try {
    if (memory != nullptr) {
      source_->zero(memory, bytes);
      return memory;
    }
    memory = source_->take(block);
    if (memory == nullptr) {
      trim();  // what is cached in other sizes may be what is missing
      memory = source_->take(block);
    }
    if (memory == nullptr) {
      fail(ErrorCode::out_of_memory, "allocate: no memory for ", bytes, " bytes; ",
           use().in_use_bytes - block, " bytes are in use");
    }
  } catch (...) {
    if (memory != nullptr) {
      release(memory, block);
    } else {
      const std::lock_guard lock(mutex_);
      use_.in_use_bytes -= block;
      --classes_.find(block)->second.blocks;
    }
    throw;
  }
  const std::lock_guard lock(mutex_);
  ++use_.system_allocations;
  return memory;
}

void BufferPool::release(void* memory, uint64_t block) noexcept {
  // A child of fork(): the lock may be one that nobody opens. The memory goes with the process.
  if (process_ != process_generation()) return;
  {
    const std::lock_guard lock(mutex_);
    use_.in_use_bytes -= block;
    if (use_.cached_bytes + block <= limit_bytes_) {
      classes_.find(block)->second.free.push_back(memory);
      use_.cached_bytes += block;
      return;
    }
    --classes_.find(block)->second.blocks;
  }
  source_->give(memory, block);
}

MemoryUse BufferPool::use() const {
  const std::lock_guard lock(mutex_);
  return use_;
}

// Block by block, so that the lock is not held while memory goes back.
void BufferPool::trim() noexcept {
  if (process_ != process_generation()) return;
  std::unique_lock lock(mutex_);
  for (auto at = classes_.begin(); at != classes_.end();) {
    const uint64_t block = at->first;
    if (!at->second.free.empty()) {
      void* const memory = at->second.free.back();
      at->second.free.pop_back();
      --at->second.blocks;
      use_.cached_bytes -= block;
      lock.unlock();
      source_->give(memory, block);
      lock.lock();
      at = classes_.lower_bound(block);
    } else {
      at = at->second.blocks == 0 ? classes_.erase(at) : std::next(at);
    }
  }
}

}  // namespace gyre
