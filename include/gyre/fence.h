#pragma once

#include <memory>

#include "gyre/export.h"

namespace gyre {

class FenceState;

// Stands for submitted work. Dropping a fence does not cancel the work.
class GYRE_API Fence {
 public:
  Fence() = default;  // already complete

  void wait() const;  // throws what went wrong while the work ran
  bool done() const;

 private:
  friend class Encoder;
  friend class Graph;
  friend struct Internals;
  explicit Fence(std::shared_ptr<FenceState> state) : state_(std::move(state)) {}

  std::shared_ptr<FenceState> state_;
};

}  // namespace gyre
