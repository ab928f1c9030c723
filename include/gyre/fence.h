#pragma once

#include <memory>

#include "gyre/export.h"

namespace gyre {

class FenceState;

// Stands for submitted work. Dropping a fence does not cancel the work.
class GYRE_API Fence {
 public:
  Fence() = default;  // already complete
  explicit Fence(std::shared_ptr<FenceState> state) : state_(std::move(state)) {}

  void wait() const;  // throws what went wrong while the work ran
  bool done() const;

 private:
  std::shared_ptr<FenceState> state_;
};

}  // namespace gyre
