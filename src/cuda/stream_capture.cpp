// Lists that go into a graph which a caller captures.
#include <utility>

#include "cuda/launch_order.h"
#include "cuda/stream.h"

namespace gyre::cuda {

Stream::CaptureTail Stream::captured_tail(CuStream stream) const {
  CaptureTail tail;
  if (!context_->has_pdl()) return tail;
  CuCaptureStatus status = kCuNotCapturing;
  CuGraph graph = nullptr;
  const CuGraphNode* after = nullptr;
  const CuGraphEdge* edges = nullptr;
  size_t count = 0;
  CuGraphNodeType type = kCuKernelNodeType;
  const CuResult result =
      api_.capture_info(stream, &status, &tail.capture, &graph, &after, &edges, &count);
  if (result != kCuSuccess || status != kCuCapturing) return {};
  for (size_t i = 0; edges != nullptr && i < count; ++i)
    tail.is_open = tail.is_open || edges[i].type == kCuProgrammatic.type;
  if (count == 1 && !tail.is_open && api_.graph_node_type(after[0], &type) == kCuSuccess &&
      type == kCuKernelNodeType)
    tail.kernel = after[0];
  return tail;
}

void Stream::capture_all(CuStream to, const CommandList& list) {
  const CaptureTail tail = captured_tail(to);
  RunningWrites beside;
  if (tail.is_open || tail.kernel != nullptr) beside = RunningWrites::unknown();
  if (tail.kernel != nullptr && tail.kernel == captured_.tail.kernel &&
      tail.capture == captured_.tail.capture)
    beside = captured_.running;
  LaunchOrder order(list, context_->limits(), context_->has_pdl(), tail.kernel != nullptr,
                    std::move(beside));
  captured_ = {};
  for (size_t i = 0; i < list.commands.size(); ++i) {
    const LaunchOrder::Step& step = order.steps[i];
    Prepared run(list, list.commands[i], context_->limits(), step.early);
    if (run.empty()) continue;
    if (const CuResult result = launch(to, run, step.overlaps); result != kCuSuccess)
      fail_launch(result, list, list.commands[i]);
  }
  captured_.tail = captured_tail(to);
  captured_.running = std::move(order.running);
}

}  // namespace gyre::cuda
