#include "cpu/memory.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace gyre::cpu {
namespace {

constexpr uint64_t kHugePage = uint64_t{2} << 20;

// Fresh pages, aligned so that all of them can be huge: a head-major cache is written in as many
// places as there are heads, and small pages would make each of them a miss in the address cache.
void* map_pages(uint64_t bytes) {
  const uint64_t mapped = bytes + kHugePage;
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(memory);
  const uint64_t skip = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  if (skip != 0) munmap(begin, skip);
  munmap(begin + skip + bytes, kHugePage - skip);
#if defined(MADV_HUGEPAGE)
  madvise(begin + skip, bytes, MADV_HUGEPAGE);  // a hint: its failure changes nothing
#endif
  return begin + skip;
}

// Large blocks come from fresh pages, zero without a write.
class HostMemory final : public MemorySource {
 public:
  void* take(uint64_t bytes) override {
    if (bytes >= kLarge) return map_pages(bytes);
    void* memory = ::operator new(bytes, kAlignment, std::nothrow);
    if (memory != nullptr) std::memset(memory, 0, bytes);
    return memory;
  }
  void give(void* memory, uint64_t bytes) override {
    if (bytes < kLarge) {
      ::operator delete(memory, kAlignment);
    } else {
      munmap(memory, bytes);
    }
  }
  void zero(void* memory, uint64_t bytes) override { std::memset(memory, 0, bytes); }
  void* host(void* memory) override { return memory; }

 private:
  static constexpr uint64_t kLarge = kHugePage / 2;
  static constexpr std::align_val_t kAlignment{128};  // two cache lines: no tensor shares one
};

}  // namespace

std::unique_ptr<MemorySource> host_memory() { return std::make_unique<HostMemory>(); }

}  // namespace gyre::cpu
