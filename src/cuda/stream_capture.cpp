// Lists that go into a graph which a caller captures.
#include <utility>

#include "cuda/launch_order.h"
#include "cuda/stream.h"

namespace gyre::cuda {

CuGraphNode Stream::captured_tail(CuStream stream, uint64_t& capture) const {
  if (!context_->has_pdl()) return nullptr;
  CuCaptureStatus status = kCuNotCapturing;
  CuGraph graph = nullptr;
  const CuGraphNode* after = nullptr;
  const CuGraphEdge* edges = nullptr;
  size_t count = 0;
  CuGraphNodeType type = kCuKernelNodeType;
  const bool is_kernel =
      api_.capture_info(stream, &status, &capture, &graph, &after, &edges, &count) == kCuSuccess &&
      count == 1 && api_.graph_node_type(after[0], &type) == kCuSuccess &&
      type == kCuKernelNodeType;
  return is_kernel ? after[0] : nullptr;
}

void Stream::capture_all(CuStream to, const CommandList& list) {
  uint64_t capture = 0;
  const CuGraphNode tail = captured_tail(to, capture);
  const bool is_own = tail != nullptr && tail == captured_.tail && capture == captured_.capture;
  LaunchOrder order(list, context_->limits(), context_->has_pdl(), tail != nullptr,
                    is_own ? captured_.running : RunningWrites::anything());
  captured_ = {};
  for (size_t i = 0; i < list.commands.size(); ++i) {
    const LaunchOrder::Step& step = order.steps[i];
    Prepared run(list, list.commands[i], context_->limits(), step.early);
    if (run.empty()) continue;
    if (const CuResult result = launch(to, run, step.overlaps); result != kCuSuccess)
      fail_launch(result, list, list.commands[i]);
  }
  captured_.tail = captured_tail(to, captured_.capture);
  captured_.running = std::move(order.running);
}

}  // namespace gyre::cuda
