#include "cpu/attention/planner.h"

#include <algorithm>

#include "abi/attention_plan.h"
#include "cpu/attention/isa/kernels.h"

namespace gyre::cpu {
namespace {

constexpr uint64_t kWorkTiles = 64;     // enough for the threads of most machines
constexpr uint32_t kFewestKeys = 1024;  // in a split: fewer, and the merge shows

constexpr uint64_t ceil_div(uint64_t a, uint64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

uint64_t choose_splits(const abi::AttentionProblem& p) {
  const uint64_t row_tiles = p.kv_heads * ceil_div(abi::attention_rows(p), kTileRows);
  const uint64_t wanted = kWorkTiles / std::min(kWorkTiles, row_tiles);
  return std::clamp<uint64_t>(wanted, 1, std::max<uint64_t>(ceil_div(p.keys, kFewestKeys), 1));
}

}  // namespace

bool plan_attention(const void* problem, const DeviceInfo& /*device*/, void* plan) {
  const auto& p = *static_cast<const abi::AttentionProblem*>(problem);
  *static_cast<abi::AttentionPlan*>(plan) =
      abi::attention_any_shape_plan(p, p.splits != 0 ? p.splits : choose_splits(p), kFewestKeys);
  return true;
}

}  // namespace gyre::cpu
