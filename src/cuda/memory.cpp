#include "cuda/memory.h"

#include <utility>

#include "runtime/require.h"

namespace gyre::cuda {
namespace {

CuAddress address_of(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

class DeviceMemory final : public MemorySource {
 public:
  explicit DeviceMemory(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) {}

  void* take(uint64_t bytes) override {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): an address that only the GPU follows
    return reinterpret_cast<void*>(static_cast<uintptr_t>(stream_->take(bytes)));
  }
  void give(void* memory, uint64_t /*bytes*/) override { stream_->give(address_of(memory)); }
  void zero(void* memory, uint64_t bytes) override { stream_->zero(address_of(memory), bytes); }
  void* host(void* /*memory*/) override { return nullptr; }
  void read(const void* memory, void* host, uint64_t bytes) override {
    stream_->read(address_of(memory), host, bytes);
  }
  void write(void* memory, const void* host, uint64_t bytes) override {
    stream_->write(address_of(memory), host, bytes);
  }

 private:
  std::shared_ptr<Stream> stream_;
};

class WrappedStorage final : public Storage {
 public:
  WrappedStorage(uint64_t device_id, std::shared_ptr<Stream> stream, const Block& block,
                 std::shared_ptr<void> owner)
      : Storage(device_id, block), stream_(std::move(stream)), owner_(std::move(owner)) {}

  bool held_by_work() const override { return true; }
  void read(uint64_t offset, void* to, uint64_t bytes) const override {
    stream_->read(address() + offset, to, bytes);
  }
  void write(uint64_t offset, const void* from, uint64_t bytes) const override {
    stream_->write(address() + offset, from, bytes);
  }

 private:
  std::shared_ptr<Stream> stream_;
  std::shared_ptr<void> owner_;
};

bool is_memory_of(const Context& context, CuAddress address) {
  const Current current(context);
  unsigned type = 0;
  int ordinal = -1;
  return context.api().pointer_attribute(&type, kCuMemoryType, address) == kCuSuccess &&
         context.api().pointer_attribute(&ordinal, kCuDeviceOrdinal, address) == kCuSuccess &&
         type == kCuDeviceMemory && ordinal == context.ordinal();
}

}  // namespace

std::unique_ptr<MemorySource> device_memory(std::shared_ptr<Stream> stream) {
  return std::make_unique<DeviceMemory>(std::move(stream));
}

std::shared_ptr<Storage> wrap_memory(uint64_t device_id, std::shared_ptr<Stream> stream,
                                     const Storage::Block& block, std::shared_ptr<void> owner) {
  if (block.bytes != 0 && !is_memory_of(stream->context(), block.address)) {
    fail(ErrorCode::unsupported, "device.wrap: ", block.host, " is not memory of ",
         stream->context().name(),
         "; memory of the host cannot be wrapped there, copy it with tensor.write_from");
  }
  Storage::Block on_device = block;
  on_device.host = nullptr;
  return std::make_shared<WrappedStorage>(device_id, std::move(stream), on_device,
                                          std::move(owner));
}

}  // namespace gyre::cuda
