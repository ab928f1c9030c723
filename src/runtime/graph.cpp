#include "gyre/graph.h"

#include <utility>

#include "runtime/device_impl.h"
#include "runtime/require.h"

namespace gyre {

void Fence::wait() const try {
  if (state_ != nullptr) state_->wait();
} catch (const std::bad_alloc&) {
  out_of_memory("fence.wait");
}

bool Fence::done() const { return state_ == nullptr || state_->done(); }

Graph::Graph(Device device, std::unique_ptr<GraphImpl> impl)
    : device_(std::move(device)), impl_(std::move(impl)) {}
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&& other) noexcept {
  // The graph goes before the device that runs it.
  impl_ = std::move(other.impl_);
  device_ = std::move(other.device_);
  return *this;
}
Graph::~Graph() = default;

Fence Graph::replay() const try {
  require(impl_ != nullptr, "graph.replay: used after it was moved from");
  impl_of(device_)->require_same_process("graph.replay");
  impl_->notes.check("graph.replay");
  Fence fence(impl_->replay());
  impl_->notes.notify(ListOutcome::replayed, nullptr);
  return fence;
} catch (const std::bad_alloc&) {
  out_of_memory("graph.replay");
}

uint32_t Graph::size() const {
  require(impl_ != nullptr, "graph.size: used after it was moved from");
  return impl_->size();
}

}  // namespace gyre
