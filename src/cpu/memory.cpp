#include "cpu/memory.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace gyre::cpu {
namespace {

// Large blocks come from fresh pages: zero without a write, huge where the system offers it.
class HostMemory final : public MemorySource {
 public:
  void* take(uint64_t bytes) override {
    if (bytes < kLarge) {
      void* memory = ::operator new(bytes, kAlignment, std::nothrow);
      if (memory != nullptr) std::memset(memory, 0, bytes);
      return memory;
    }
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
#if defined(MADV_HUGEPAGE)
    madvise(memory, bytes, MADV_HUGEPAGE);  // a hint: its failure changes nothing
#endif
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
  static constexpr uint64_t kLarge = uint64_t{1} << 20;
  static constexpr std::align_val_t kAlignment{128};  // two cache lines: no tensor shares one
};

}  // namespace

std::unique_ptr<MemorySource> host_memory() { return std::make_unique<HostMemory>(); }

}  // namespace gyre::cpu
