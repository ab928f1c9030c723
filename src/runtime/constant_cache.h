#pragma once

#include <array>
#include <cstdint>
#include <mutex>

#include "gyre/tensor.h"

namespace gyre {

// Small tables that ops derive from their options, kept on the device so that a decode loop makes
// each of them once. Bounded: the oldest goes first, and lives on in the lists that use it.
// Thread-safe.
class ConstantCache {
 public:
  using Key = std::array<uint64_t, 6>;  // the first word names the table's kind

  template <class Make>
  Tensor find_or_make(const Key& key, const Make& make) {
    const std::lock_guard lock(mutex_);
    for (const Entry& entry : entries_) {
      if (entry.key == key && entry.tensor.defined()) return entry.tensor;
    }
    Tensor made = make();
    entries_[next_] = Entry{key, made};
    next_ = (next_ + 1) % entries_.size();
    return made;
  }

 private:
  struct Entry {  // not a pair: clang 14 forgets to emit its destructor
    Key key{};
    Tensor tensor;
  };
  std::mutex mutex_;
  std::array<Entry, 32> entries_;
  size_t next_ = 0;
};

}  // namespace gyre
