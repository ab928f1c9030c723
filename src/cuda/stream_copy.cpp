// The stream's memory: host copies, and blocks taken from and given to the driver.
#include <algorithm>
#include <cstring>

#include "cuda/stream.h"

namespace gyre::cuda {

namespace {

// A call that leaves early waits for its copies first: who comes next uses the same staging memory.
class CopiesInFlight {
 public:
  CopiesInFlight(const Driver& api, CuStream stream) : api_(api), stream_(stream) {}
  CopiesInFlight(const CopiesInFlight&) = delete;
  CopiesInFlight& operator=(const CopiesInFlight&) = delete;
  ~CopiesInFlight() {
    if (!ended_) api_.stream_synchronize(stream_);  // why the call leaves is being thrown
  }
  void end() { ended_ = true; }

 private:
  const Driver& api_;
  CuStream stream_;
  bool ended_ = false;
};

}  // namespace

void Stream::prepare_staging() {
  for (int i = 0; i < 2; ++i) {
    if (staging_.half[i] == nullptr) {
      void* memory = nullptr;
      check(api_.host_take(&memory, Staging::kHalfBytes), "cuMemAllocHost");
      staging_.half[i] = static_cast<std::byte*>(memory);
    }
    if (staging_.done[i] == nullptr)
      check(api_.event_create(&staging_.done[i], kCuEventNoTiming), "cuEventCreate");
  }
}

void Stream::read(CuAddress from, void* host, uint64_t bytes) {
  context_->require_same_process();
  const std::lock_guard lock(staging_.mutex);
  require_alive();
  const Current current(*context_);
  prepare_staging();
  CopiesInFlight copies(api_, stream_);
  auto* const to = static_cast<std::byte*>(host);
  const uint64_t chunks = (bytes + Staging::kHalfBytes - 1) / Staging::kHalfBytes;
  const auto size = [&](uint64_t i) {
    return std::min(Staging::kHalfBytes, bytes - i * Staging::kHalfBytes);
  };
  for (uint64_t i = 0; i <= chunks; ++i) {
    if (i < chunks) {
      check(
          api_.copy_to_host(staging_.half[i % 2], from + i * Staging::kHalfBytes, size(i), stream_),
          "cuMemcpyDtoHAsync");
      check(api_.event_record(staging_.done[i % 2], stream_), "cuEventRecord");
    }
    if (i == 0) continue;
    const uint64_t last = i - 1;
    check(api_.event_synchronize(staging_.done[last % 2]), "cuEventSynchronize");
    std::memcpy(to + last * Staging::kHalfBytes, staging_.half[last % 2], size(last));
  }
  copies.end();
}

void Stream::write(CuAddress to, const void* host, uint64_t bytes) {
  context_->require_same_process();
  const std::lock_guard lock(staging_.mutex);
  require_alive();
  const Current current(*context_);
  prepare_staging();
  CopiesInFlight copies(api_, stream_);
  const auto* const from = static_cast<const std::byte*>(host);
  for (uint64_t at = 0, i = 0; at < bytes; at += Staging::kHalfBytes, ++i) {
    const uint64_t size = std::min(Staging::kHalfBytes, bytes - at);
    if (i >= 2) check(api_.event_synchronize(staging_.done[i % 2]), "cuEventSynchronize");
    std::memcpy(staging_.half[i % 2], from + at, size);
    check(api_.copy_to_device(to + at, staging_.half[i % 2], size, stream_), "cuMemcpyHtoDAsync");
    check(api_.event_record(staging_.done[i % 2], stream_), "cuEventRecord");
  }
  check(api_.stream_synchronize(stream_), "cuStreamSynchronize");
  copies.end();
}

CuAddress Stream::take(uint64_t bytes) {
  require_alive();
  const Current current(*context_);
  CuAddress address = 0;
  const CuResult result = api_.memory_take(&address, bytes);
  if (result == kCuOutOfMemory) return 0;
  check(result, "cuMemAlloc");
  try {
    zero(address, bytes);
  } catch (...) {
    api_.memory_give(address);
    throw;
  }
  return address;
}

void Stream::zero(CuAddress address, uint64_t bytes) {
  require_alive();
  const Current current(*context_);
  check(api_.memory_set(address, 0, bytes, stream_), "cuMemsetD8Async");
}

void Stream::give(CuAddress address) noexcept {
  const Current current(*context_);
  api_.stream_synchronize(stream_);  // submitted work may still use it; its errors are the fence's
  api_.memory_give(address);
}

}  // namespace gyre::cuda
