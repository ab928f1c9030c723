#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "gyre/device.h"
#include "runtime/process.h"
#include "runtime/storage.h"

namespace gyre {

// Where a backend's memory comes from.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  virtual void* take(uint64_t bytes) = 0;  // zero-filled; null when there is none
  virtual void give(void* memory, uint64_t bytes) = 0;
  virtual void zero(void* memory, uint64_t bytes) = 0;
  virtual void* host(void* memory) = 0;  // null where the host cannot reach it
  // As Storage has them; called only where host() is null.
  virtual void read(const void* /*memory*/, void* /*to*/, uint64_t /*bytes*/) {
    Storage::refuse_copy();
  }
  virtual void write(void* /*memory*/, const void* /*from*/, uint64_t /*bytes*/) {
    Storage::refuse_copy();
  }
};

// Hands out zero-filled storage and keeps freed blocks for reuse. A block belongs to the Storage
// that holds it and comes back only in that Storage's destructor: there is no release call to make
// twice. Thread-safe. Storage may outlive the device.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  BufferPool(uint64_t device_id, std::unique_ptr<MemorySource> source, uint64_t limit_bytes);
  ~BufferPool();

  std::shared_ptr<Storage> allocate(uint64_t bytes);
  MemoryUse use() const;
  void trim() noexcept;

  // Block size for a request: at most an eighth more, at most 2 MiB more.
  static uint64_t block_bytes(uint64_t bytes);

 private:
  class PooledStorage;

  // Blocks of one size. `free` has room for all of them: giving one back takes no memory.
  struct SizeClass {
    std::vector<void*> free;
    uint64_t blocks = 0;  // free and handed out
  };

  void* take(uint64_t bytes, uint64_t block);
  void release(void* memory, uint64_t block) noexcept;

  const uint64_t device_id_;
  const uint64_t limit_bytes_;
  const uint64_t process_ = process_generation();
  std::unique_ptr<MemorySource> source_;
  mutable std::mutex mutex_;
  std::map<uint64_t, SizeClass> classes_;  // by block size
  MemoryUse use_;
};

}  // namespace gyre
