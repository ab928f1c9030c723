#pragma once

#include <atomic>

#include "bound.h"

namespace gyre::python {

struct BoundKvPages {
  Device device;
  KvPages pages;
};

struct BoundScratch {
  Device device;
  Tensor tensor{};
  std::atomic<bool> busy = false;
};

// The scratch memory of a call, null if it has none; refused while another call has it.
class UsedScratch {
 public:
  UsedScratch(BoundScratch* scratch, const char* op) : scratch_(scratch) {
    if (scratch != nullptr && scratch->busy.exchange(true, std::memory_order_acquire))
      refuse(op, ": the scratch is in use by another call");
  }
  UsedScratch(const UsedScratch&) = delete;
  UsedScratch& operator=(const UsedScratch&) = delete;
  ~UsedScratch() {
    if (scratch_ != nullptr) scratch_->busy.store(false, std::memory_order_release);
  }

  Tensor* tensor() const { return scratch_ != nullptr ? &scratch_->tensor : nullptr; }

 private:
  BoundScratch* scratch_;
};

}  // namespace gyre::python
