#pragma once
// Memory whose end is watched.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <memory>
#include <new>

namespace gyre::fibers {

// Shared memory of a block, or a tensor. What lies behind its end cannot be read.
class Guarded {
 public:
  void resize(size_t bytes) {
    static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t own = (bytes + 127) / 128 * 128, pages = (own + page - 1) / page * page;
    auto* const all = static_cast<unsigned char*>(
        mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (all == MAP_FAILED || mprotect(all + pages, page, PROT_NONE) != 0) throw std::bad_alloc();
    held_ = {all, [pages](unsigned char* x) { munmap(x, pages + page); }};
    data_ = all + pages - own, size_ = bytes;
  }
  unsigned char* data() const { return data_; }
  unsigned char* begin() const { return data_; }
  unsigned char* end() const { return data_ + size_; }
  size_t size() const { return size_; }

 private:
  std::shared_ptr<unsigned char> held_;
  unsigned char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace gyre::fibers
