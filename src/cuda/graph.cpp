#include "cuda/graph.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cuda/launch_order.h"
#include "cuda/pipeline.h"

namespace gyre::cuda {
namespace {

// A list as a CUDA graph, and what it uses. A replay in flight keeps it.
class BuiltGraph {
 public:
  BuiltGraph(std::shared_ptr<Stream> stream, CommandList list)
      : stream_(std::move(stream)), list_(std::move(list)) {
    const Current current(context());
    check(api().graph_create(&graph_, 0), "cuGraphCreate");
    try {
      add_commands();
      if (!nodes_.empty())
        check(api().graph_instantiate(&exec_, graph_, 0), "cuGraphInstantiateWithFlags");
    } catch (...) {
      destroy();
      throw;
    }
  }
  BuiltGraph(const BuiltGraph&) = delete;
  BuiltGraph& operator=(const BuiltGraph&) = delete;
  ~BuiltGraph() {
    if (context().is_inherited()) return;
    const Current current(context());
    destroy();
  }

  const CommandList& list() const { return list_; }
  CuGraphExec exec() const { return exec_; }  // null: nothing to run

 private:
  const Context& context() const { return stream_->context(); }
  const Driver& api() const { return context().api(); }
  void check(CuResult result, const char* call) const { context().check(result, call); }

  void destroy() const {
    if (exec_ != nullptr) api().graph_exec_destroy(exec_);
    if (graph_ != nullptr) api().graph_destroy(graph_);
  }

  // Commands between two barriers do not depend on each other; each waits for all of the level
  // before. After a single one they may begin before it has ended: all kernels of the tables
  // pdl_wait.
  void add_commands() {
    std::vector<CuGraphNode> before, level;
    RunningWrites ahead;  // where a node starts behind the single node of `before`
    RunningWrites last;
    for (const Command& command : list_.commands) {
      if (command.barrier && !level.empty()) {
        before = std::move(level);
        level.clear();
        ahead = last;
      }
      const bool early = before.size() == 1 && waits_by_itself(command) && context().has_pdl();
      const RunningWrites running = early ? ahead : RunningWrites();
      Prepared run(list_, command, context().limits(), running.early_reads(list_, command));
      if (run.empty()) continue;
      last = running.after(list_, command, launches_first(command));
      const uint32_t* const grid = run.shape.grid;
      const CuKernelNode values = {.function = run.function,
                                   .grid = {grid[0], grid[1], grid[2]},
                                   .block = {run.shape.block, 1, 1},
                                   .shared_bytes = run.shape.shared_bytes,
                                   .params = run.params,
                                   .extra = nullptr,
                                   .kernel = nullptr,
                                   .context = nullptr};
      CuGraphNode node = nullptr;
      check(
          api().graph_add_kernel(&node, graph_, before.data(), early ? 0 : before.size(), &values),
          stream_->command_text(list_, command).c_str());
      if (early)
        check(api().graph_add_edges(graph_, before.data(), &node, &kCuProgrammatic, 1),
              "cuGraphAddDependencies");
      level.push_back(node);
      nodes_.push_back(node);
    }
  }

  std::shared_ptr<Stream> stream_;
  CommandList list_;
  CuGraph graph_ = nullptr;
  CuGraphExec exec_ = nullptr;
  std::vector<CuGraphNode> nodes_;
};

// Holds no reference to the device: the public Graph does.
class CudaGraph final : public GraphImpl {
 public:
  CudaGraph(std::shared_ptr<Stream> stream, TraceLog& trace, CommandList list)
      : stream_(std::move(stream)),
        trace_(trace),
        built_(std::make_shared<BuiltGraph>(stream_, std::move(list))) {}

  std::shared_ptr<FenceState> replay() override {
    // A graph as a whole has no times for its nodes, so the commands run one by one.
    if (trace_.enabled()) {
      stream_->run_timed(built_->list(), trace_);
      return nullptr;
    }
    if (built_->exec() == nullptr) return nullptr;
    if (stream_->checks_each_launch()) return stream_->submit(built_->list());
    return stream_->replay(built_->exec(), built_->list(), built_);
  }
  uint32_t size() const override { return static_cast<uint32_t>(built_->list().commands.size()); }

 private:
  std::shared_ptr<Stream> stream_;
  TraceLog& trace_;
  std::shared_ptr<const BuiltGraph> built_;
};

}  // namespace

std::unique_ptr<GraphImpl> make_graph(std::shared_ptr<Stream> stream, TraceLog& trace,
                                      CommandList list) {
  return std::make_unique<CudaGraph>(std::move(stream), trace, std::move(list));
}

}  // namespace gyre::cuda
