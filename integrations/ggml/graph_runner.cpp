#include "graph_runner.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "node.h"

namespace gyre::ggml {

float* FloatBuffer::get(uint64_t floats) {
  if (floats <= floats_) return memory_;
  std::free(memory_);
  floats_ = 0;
  memory_ = static_cast<float*>(std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64));
  if (memory_ != nullptr) floats_ = floats;
  return memory_;
}

bool is_verbose() {
  const char* const value = std::getenv("GYRE_GGML_VERBOSE");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

namespace {

bool has_memory(const abi::Tensor& node) {
  for (const abi::Tensor* const source : node.src) {
    if (source != nullptr && source->data == nullptr) return false;
  }
  return node.data != nullptr;
}

}  // namespace

GraphRunner::~GraphRunner() {
  if (!is_verbose() || computed_ + left_ == 0) return;
  say("computed " + std::to_string(computed_) + " attention nodes, left " + std::to_string(left_) +
      " to ggml" + (why_left_ != nullptr ? std::string(" (") + why_left_ + ")" : ""));
}

void GraphRunner::collect(abi::Graph* graph) {
  used_ = 0;
  const int nodes = host_.graph_n_nodes(graph);
  for (int i = 0; i < nodes; ++i) {
    abi::Tensor* const node = host_.graph_node(graph, i);
    if (node->op != host_.op_attention) continue;
    if (used_ == work_.size()) work_.push_back(std::make_unique<Work>());
    Work& work = *work_[used_];
    const char* why = read_node(host_, *node, work.problem);
    if (why == nullptr && !has_memory(*node)) why = "no memory";
    if (why != nullptr) {
      why_left_ = why;
      ++left_;
      continue;
    }
    work.runner = this;
    work.node = node;
    work.plan.emplace(work.problem);
    ++used_;
  }
}

bool GraphRunner::prepare_memory() {
  uint64_t partials = 0, scratch = 0;
  for (size_t i = 0; i < used_; ++i) {
    const Work& work = *work_[i];
    partials = std::max(partials, work.plan->partial_floats(work.problem));
    scratch = std::max(scratch, work.plan->scratch_floats(work.problem));
  }
  // Nodes run one after the other and may share. The first thread's scratch must be there; others
  // that get none do not help.
  float* const shared = partials > 0 ? partials_.get(partials) : nullptr;
  if ((partials > 0 && shared == nullptr) || scratch_[0].get(scratch) == nullptr) return false;
  for (size_t i = 0; i < used_; ++i)
    work_[i]->call.emplace(work_[i]->problem, *work_[i]->plan, shared);
  return true;
}

void GraphRunner::replace_nodes() {
  for (size_t i = 0; i < used_; ++i) {
    Work& work = *work_[i];
    std::memcpy(work.parameters, work.node->op_params, sizeof(work.parameters));
    const abi::CustomOp custom{run_node, abi::kAllThreads, &work};
    std::memset(work.node->op_params, 0, sizeof(work.node->op_params));
    std::memcpy(work.node->op_params, &custom, sizeof(custom));
    work.node->op = host_.op_custom;
  }
}

void GraphRunner::restore_nodes() {
  for (size_t i = 0; i < used_; ++i) {
    Work& work = *work_[i];
    std::memcpy(work.node->op_params, work.parameters, sizeof(work.parameters));
    work.node->op = host_.op_attention;
  }
}

abi::Status GraphRunner::run(abi::Backend* cpu, abi::ComputeGraph compute, abi::Graph* graph) {
  try {
    collect(graph);
  } catch (const std::bad_alloc&) {
    used_ = 0;
  }
  if (used_ == 0 || !prepare_memory()) return compute(cpu, graph);
  computed_ += used_;
  replace_nodes();
  const abi::Status status = compute(cpu, graph);
  restore_nodes();
  return status;
}

void GraphRunner::run_node(abi::Tensor* /*node*/, int thread, int threads, void* data) {
  Work& work = *static_cast<Work*>(data);
  const auto index = static_cast<size_t>(thread);
  float* const scratch =
      index < kMaxThreads
          ? work.runner->scratch_[index].get(work.plan->scratch_floats(work.problem))
          : nullptr;
  ggml::run(*work.call, static_cast<uint32_t>(threads), scratch);
}

}  // namespace gyre::ggml
