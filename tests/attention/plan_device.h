#pragma once
// Attention on a device that has addresses but no memory, a planner, and whatever pipeline it is
// asked for: what ops record on it, and what they ask for on the way, can be read.

#include "abi/attention_plan.h"
#include "cuda/attention/planner.h"
#include "gyre_test.h"
#include "runtime/device_impl.h"
#include "runtime/require.h"

namespace gyre::test {

constexpr cuda::CudaLimits kH200{132, 227 << 10, 228 << 10, 90};

class NoGraph final : public GraphImpl {
 public:
  std::shared_ptr<FenceState> replay() override { return nullptr; }
  uint32_t size() const override { return 0; }
};

class PlanDevice final : public DeviceImpl {
 public:
  using Planner = std::function<bool(const void* problem, void* plan)>;  // empty: nothing to choose

  explicit PlanDevice(Planner planner) : planner_(std::move(planner)) { info_.name = "plan"; }

  const DeviceInfo& info() const override { return info_; }
  std::shared_ptr<Storage> allocate(uint64_t bytes) override {
    const uint64_t address = next_;
    next_ += (bytes + 511) / 256 * 256;
    return std::make_shared<Storage>(id(), Storage::Block{address, bytes, nullptr});
  }
  std::shared_ptr<Storage> wrap(const Storage::Block& block, std::shared_ptr<void>) override {
    return std::make_shared<Storage>(id(), block);
  }
  std::shared_ptr<const Pipeline> pipeline(const KernelInfo& kernel, uint64_t spec) override {
    auto& made = pipelines_[{&kernel, spec}];
    if (made == nullptr) made = std::make_shared<Pipeline>(kernel, spec);
    asked_.push_back(made.get());
    return made;
  }
  std::string describe(const KernelInfo& kernel, uint64_t) const override { return kernel.name; }
  bool has(const KernelInfo&, uint64_t) const override { return true; }
  bool plan(const KernelInfo&, const void* problem, void* plan) const override {
    return planner_ && planner_(problem, plan);
  }
  uint32_t loaded_pipelines(const KernelInfo&) const override { return 0; }
  std::shared_ptr<FenceState> submit(const CommandList& list) override {
    for (const Command& command : list.commands) {
      recorded_.push_back(command.pipeline);
      if (command.pipeline->kernel->params_bytes != sizeof(abi::AttentionParams)) continue;
      params_.push_back(*static_cast<const abi::AttentionParams*>(list.params_of(command)));
      partials_.push_back(list.args_of(command)[abi::arg_partial]);
    }
    return nullptr;
  }
  std::unique_ptr<GraphImpl> instantiate(CommandList list) override {
    submit(list);
    return std::make_unique<NoGraph>();
  }
  MemoryUse memory() const override { return {}; }
  void trim() override {}

  // Pipelines that were asked for, and those of the commands that were submitted or kept.
  const std::vector<const Pipeline*>& asked() const { return asked_; }
  const std::vector<const Pipeline*>& recorded() const { return recorded_; }
  // Params of attention and attention_decode.
  const std::vector<abi::AttentionParams>& params() const { return params_; }
  const std::vector<uint64_t>& partials() const { return partials_; }  // their addresses

 private:
  DeviceInfo info_;
  Planner planner_;
  uint64_t next_ = 1 << 20;
  std::map<std::pair<const KernelInfo*, uint64_t>, std::shared_ptr<Pipeline>> pipelines_;
  std::vector<const Pipeline*> asked_, recorded_;
  std::vector<abi::AttentionParams> params_;
  std::vector<uint64_t> partials_;
};

// What an attention op is called with.
struct PlanCase {
  uint64_t heads = 32, kv_heads = 8, head_dim = 128, keys = 4096;
  const char* formats = "f16";  // of K and V, "+" between them if they differ
  uint64_t tokens = 1;
  uint64_t v_head_dim = 0;  // 0: head_dim
  uint64_t window = 0;
  uint64_t splits = 0;  // not 0: attention_partial
  bool tree_mask = false;
  bool keeps_scratch = true;  // the caller, from call to call
};

inline KvFormat k_format(const PlanCase& p) {
  const std::string text = p.formats;
  return kv_format(text.substr(0, text.find('+')));
}
inline KvFormat v_format(const PlanCase& p) {
  const std::string text = p.formats;
  return kv_format(text.substr(text.find('+') + 1));
}

inline std::string text_of(const abi::AttentionPlan& plan) {
  std::string text = "any shape";
  if (plan.kernel == abi::AttentionKernel::attention_decode) {
    const auto spec = spec_from_key<abi::AttentionDecodeSpec>(plan.spec);
    text = join("decode ", uint32_t{spec.rows}, " rows");
    if (spec.cluster > 1) text += join(", clusters of ", uint32_t{spec.cluster});
  }
  if (plan.kernel == abi::AttentionKernel::attention_many_rows) text = "many rows";
  text += join(", ", plan.splits, " splits");
  if (plan.reduce == abi::AttentionReduce::in_kernel)
    text += plan.scratch_floats != 0 ? ", in kernel" : ", in cluster";
  if (plan.reduce == abi::AttentionReduce::separate) text += ", separate";
  return text;
}

// Records problems and keeps what was planned for the last one.
class CudaPlans {
 public:
  explicit CudaPlans(const cuda::CudaLimits& limits)
      : impl_(std::make_shared<PlanDevice>([this, limits](const void* problem, void* plan) {
          problem_ = *static_cast<const abi::AttentionProblem*>(problem);
          cuda::plan_attention(problem, limits, plan);
          plan_ = *static_cast<const abi::AttentionPlan*>(plan);
          return true;
        })),
        device_(device_of(impl_)) {}
  CudaPlans(const CudaPlans&) = delete;  // the planner writes here
  CudaPlans& operator=(const CudaPlans&) = delete;

  Tensor queries(const PlanCase& p) const {
    return device_.tensor(DType::f16, {p.tokens, p.heads, p.head_dim});
  }
  KvBuffer cache(const PlanCase& p, KvRole role) const {
    const bool k = role == KvRole::k;
    return KvBuffer::allocate(device_, {k ? k_format(p) : v_format(p), role, p.kv_heads, p.keys,
                                        k || p.v_head_dim == 0 ? p.head_dim : p.v_head_dim});
  }
  std::string of(const PlanCase& p) { return of(p, cache(p, KvRole::k), cache(p, KvRole::v)); }
  std::string of(const PlanCase& p, const KvBuffer& k, const KvBuffer& v) {
    Encoder encoder(device_);
    const Tensor q = queries(p);
    const uint64_t v_dim = v.shape.head_dim;
    AttentionOptions options{.length = p.keys, .mask = {.window = p.window}};
    if (p.tree_mask) options.mask.tree_mask = device_.tensor(DType::u8, {p.tokens, p.tokens});
    if (p.splits != 0) {
      const Tensor partial =
          device_.tensor(DType::f32, attention_partial_shape(p.splits, q.shape(), v_dim));
      attention_partial(encoder, {q, k, v, partial}, options);
    } else {
      const Tensor out = device_.tensor(DType::bf16, {p.tokens, p.heads, v_dim});
      Tensor scratch;
      attention(encoder,
                {.q = q,
                 .k_cache = k,
                 .v_cache = v,
                 .out = out,
                 .scratch = p.keeps_scratch ? &scratch : nullptr},
                options);
      const bool merges = plan_.reduce == abi::AttentionReduce::separate;
      EXPECT_EQ(scratch.defined(), p.keeps_scratch && (merges || plan_.scratch_floats != 0));
    }
    encoder.submit();
    return text_of(plan_);
  }

  const Device& device() const { return device_; }
  const PlanDevice& impl() const { return *impl_; }
  const abi::AttentionProblem& problem() const { return problem_; }
  const abi::AttentionPlan& plan() const { return plan_; }

 private:
  std::shared_ptr<PlanDevice> impl_;
  Device device_;
  abi::AttentionProblem problem_{};
  abi::AttentionPlan plan_{};
};

}  // namespace gyre::test
