#include "cpu/attention/planner.h"

#include "abi/attention_plan.h"
#include "cpu/attention/cut.h"

namespace gyre::cpu {
namespace {

// Splits that the keys of a sequence may be in; the kernel merges their states.
abi::AttentionPlan plan_splits(const abi::AttentionProblem& p) {
  const uint64_t group = p.heads / p.kv_heads;
  const uint64_t queries = p.sequences != 0 ? p.max_query_length : p.tokens;
  const bool latent = p.latent != 0;
  const bool decodes = p.sequences != 0 || queries * group <= max_decode_rows(group, latent);
  const uint64_t splits = decodes ? max_splits(p.keys) : 1;
  abi::AttentionPlan plan = abi::attention_any_shape_plan(p, 1, 0);
  plan.splits = splits;
  plan.fewest_split_keys = static_cast<uint32_t>(kCut.fewest_keys);
  if (splits == 1) return plan;
  const uint64_t sequences = p.sequences != 0 ? p.sequences : 1;
  plan.reduce = abi::AttentionReduce::in_kernel;
  plan.scratch_floats =
      SplitScratch{sequences, p.kv_heads, splits, decode_rows(queries, group, latent),
                   uint64_t{abi::attention_out_dim(p)} + 2}
          .floats();
  return plan;
}

}  // namespace

bool plan_attention(const void* problem, const DeviceInfo& /*device*/, void* plan) {
  const auto& p = *static_cast<const abi::AttentionProblem*>(problem);
  *static_cast<abi::AttentionPlan*>(plan) =
      p.splits != 0 ? abi::attention_any_shape_plan(p, p.splits, 0) : plan_splits(p);
  return true;
}

}  // namespace gyre::cpu
