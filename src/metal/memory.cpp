#include "metal/memory.h"

#include <cstring>
#include <utility>

#include "runtime/process.h"
#include "runtime/require.h"

namespace gyre::metal {
namespace {

class SharedMemory final : public MemorySource {
 public:
  explicit SharedMemory(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) {}

  void* take(uint64_t bytes) override {
    stream_->retire();
    Buffers& buffers = stream_->buffers();
    if (void* const memory = buffers.take(bytes)) return memory;
    stream_->settle();  // what submitted work holds may be what is missing
    return buffers.take(bytes);
  }
  // Submitted work holds its storages: what comes back is used by nobody.
  void give(void* memory, uint64_t /*bytes*/) override { stream_->buffers().give(memory); }
  void zero(void* memory, uint64_t bytes) override { std::memset(memory, 0, bytes); }
  void* host(void* /*memory*/) override { return nullptr; }
  void read(const void* memory, void* to, uint64_t bytes) override {
    stream_->wait();
    std::memcpy(to, memory, bytes);
  }
  void write(void* memory, const void* from, uint64_t bytes) override {
    stream_->wait();
    std::memcpy(memory, from, bytes);
  }

 private:
  std::shared_ptr<Stream> stream_;
};

class WrappedStorage final : public BoundStorage {
 public:
  WrappedStorage(uint64_t device_id, std::shared_ptr<Stream> stream, const Block& block,
                 const Binding& binding, std::shared_ptr<void> owner)
      : BoundStorage(device_id, block, binding),
        stream_(std::move(stream)),
        owner_(std::move(owner)) {}
  ~WrappedStorage() override {
    if (binding().buffer != nullptr && process_ == process_generation())
      stream_->buffers().api().buffer_free(binding().buffer);
  }

  void read(uint64_t offset, void* to, uint64_t bytes) const override {
    stream_->wait();
    std::memcpy(to, at(offset), bytes);
  }
  void write(uint64_t offset, const void* from, uint64_t bytes) const override {
    stream_->wait();
    std::memcpy(at(offset), from, bytes);
  }

 private:
  void* at(uint64_t offset) const {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the caller's pointer, kept as an address
    return reinterpret_cast<void*>(static_cast<uintptr_t>(address() + offset));
  }

  std::shared_ptr<Stream> stream_;
  std::shared_ptr<void> owner_;
  const uint64_t process_ = process_generation();
};

}  // namespace

std::unique_ptr<MemorySource> shared_memory(std::shared_ptr<Stream> stream) {
  return std::make_unique<SharedMemory>(std::move(stream));
}

std::shared_ptr<Storage> wrap_memory(uint64_t device_id, std::shared_ptr<Stream> stream,
                                     const Storage::Block& block, std::shared_ptr<void> owner) {
  const Buffers& buffers = stream->buffers();
  Binding binding;
  if (block.bytes != 0) {
    const uint64_t page = buffers.device().page_bytes;
    const uint64_t begin = block.address / page * page;
    const uint64_t pages = (block.address - begin + block.bytes - 1) / page + 1;
    const bool fits = pages <= buffers.device().buffer_bytes / page;
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the page of the caller's pointer
    void* const first = reinterpret_cast<void*>(static_cast<uintptr_t>(begin));
    if (fits) binding.buffer = buffers.api().buffer_wrap(first, pages * page);
    if (binding.buffer == nullptr) {
      fail(ErrorCode::unsupported, "device.wrap: Metal does not take the memory at ", block.host,
           "; copy it with tensor.write_from");
    }
    binding.offset = block.address - begin;
  }
  Storage::Block shared = block;
  shared.host = nullptr;
  try {
    return std::make_shared<WrappedStorage>(device_id, stream, shared, binding, std::move(owner));
  } catch (...) {
    if (binding.buffer != nullptr) buffers.api().buffer_free(binding.buffer);
    throw;
  }
}

}  // namespace gyre::metal
