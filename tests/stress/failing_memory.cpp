#include "stress/failing_memory.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace gyre::test {

FailingMemory& failing_memory() {
  static constinit FailingMemory memory;
  return memory;
}

}  // namespace gyre::test

namespace {

void* take(size_t bytes, size_t align) noexcept {
  if (gyre::test::failing_memory().refuses()) return nullptr;
  bytes = std::max<size_t>(bytes, 1);
  if (align <= alignof(std::max_align_t)) return std::malloc(bytes);
  return std::aligned_alloc(align, (bytes + align - 1) / align * align);
}

void* take_or_throw(size_t bytes, size_t align) {
  void* const memory = take(bytes, align);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// Every form: the sanitizers' own would not call these.
void* operator new(size_t bytes) { return take_or_throw(bytes, 0); }
void* operator new[](size_t bytes) { return take_or_throw(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t align) {
  return take_or_throw(bytes, static_cast<size_t>(align));
}
void* operator new[](size_t bytes, std::align_val_t align) {
  return take_or_throw(bytes, static_cast<size_t>(align));
}
void* operator new(size_t bytes, const std::nothrow_t& /*tag*/) noexcept { return take(bytes, 0); }
void* operator new[](size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  return take(bytes, 0);
}
void* operator new(size_t bytes, std::align_val_t align, const std::nothrow_t& /*tag*/) noexcept {
  return take(bytes, static_cast<size_t>(align));
}
void* operator new[](size_t bytes, std::align_val_t align, const std::nothrow_t& /*tag*/) noexcept {
  return take(bytes, static_cast<size_t>(align));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*bytes*/) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t /*bytes*/) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t /*align*/) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t /*align*/) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*bytes*/, std::align_val_t /*align*/) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, size_t /*bytes*/, std::align_val_t /*align*/) noexcept {
  std::free(memory);
}
void operator delete(void* memory, const std::nothrow_t& /*tag*/) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t& /*tag*/) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t /*align*/,
                     const std::nothrow_t& /*tag*/) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::align_val_t /*align*/,
                       const std::nothrow_t& /*tag*/) noexcept {
  std::free(memory);
}
