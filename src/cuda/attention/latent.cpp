// Names, grids and plans of kernels/attention/latent/.
#include <algorithm>
#include <bit>

#include "cuda/attention/planner.h"
#include "cuda/kernels.h"
#include "cuda/kernels/attention/latent/layout.cuh"
#include "cuda/types.h"
#include "runtime/require.h"

namespace gyre::cuda {
namespace {

constexpr uint32_t kHopperKeys = 64, kOtherKeys = 32;  // of a stage
constexpr uint32_t kOtherGpus = 1;                     // AttentionLatentSpec::gpu

uint32_t stage_keys(const abi::AttentionLatentSpec& s) {
  return s.gpu == kOtherGpus ? kOtherKeys : kHopperKeys;
}
LatentLayout layout_of(const abi::AttentionLatentSpec& s) {
  if (s.part >= abi::kLatentParts || s.gpu > kOtherGpus) return {};
  return latent_layout(s.k_format, s.v_format, s.k_dim16 * 16u, s.v_dim16 * 16u, stage_keys(s));
}
bool fits(const abi::AttentionLatentSpec& s, const CudaLimits& limits) {
  const LatentLayout layout = layout_of(s);
  return layout.keys != 0 && layout.total <= limits.shared_bytes_per_block;
}

// Offsets and copies of 16 bytes.
bool takes(const abi::AttentionProblem& p) {
  constexpr uint64_t kMax = uint64_t{1} << 30;
  const auto aligned = [](const abi::KvCacheLayout& half) {
    const uint64_t row =
        abi::kv_is_native(half.format) ? half.codes_tile_stride : half.codes_tile_stride / 8;
    return (row | half.scales_tile_stride) % 16 == 0;
  };
  return p.tree_mask == 0 && p.kv_heads == 1 && p.keys <= kMax && p.capacity <= kMax &&
         p.tokens * p.heads < kMax && p.sequences < kMax &&
         (p.addresses | p.page_stride) % 16 == 0 && aligned(p.k) && aligned(p.v);
}

}  // namespace

abi::AttentionPlan plan_latent(const abi::AttentionProblem& p, const CudaLimits& limits) {
  abi::AttentionPlan plan = abi::attention_default_plan(p);
  abi::AttentionLatentSpec s =
      abi::attention_latent_spec(p.k.format, p.v.format, p.k.head_dim, p.v.head_dim, 0);
  // DType's bf16 is KvFormat's.
  s.bf16 = p.k.format == kFormatBf16 && p.v.format == kFormatBf16 && p.q_dtype == kFormatBf16;
  s.gpu = limits.arch == 90 && fits(s, limits) ? 0 : kOtherGpus;
  if (!takes(p) || !fits(s, limits)) return plan;  // no kernel: the op refuses
  // A row's state is as long as some keys: more rows, longer splits.
  constexpr uint64_t kMaxBytes = uint64_t{512} << 20;
  const uint64_t rows = p.tokens * p.heads, state = (p.k.head_dim + 2) * sizeof(float);
  const uint64_t split = p.heads <= 32 ? 256 : 512;
  uint64_t splits =
      std::clamp<uint64_t>(std::bit_ceil((p.keys + split - 1) / split), 1, kLatentMaxSplits);
  if (p.sequences == 0 && p.tokens > kLatentCutTokens) splits = 1;
  while (splits > 1 && rows * splits * state > kMaxBytes) splits /= 2;
  plan.spec = spec_key(s);
  plan.kernel = abi::AttentionKernel::attention_latent;
  plan.reduce = abi::AttentionReduce::in_kernel;
  plan.splits = splits;
  plan.fewest_split_keys = static_cast<uint32_t>(split);
  plan.scratch_floats =
      latent_scratch(rows, std::max<uint64_t>(p.sequences, 1), splits, p.k.head_dim, p.v.head_dim)
          .total /
      sizeof(float);
  return plan;
}

std::string name_attention_latent(uint64_t spec) {
  const auto s = spec_from_key<abi::AttentionLatentSpec>(spec);
  if (layout_of(s).keys == 0) return "";
  const char* const parts[] = {"_prepare", "", "_reduce"};
  return join("gyre::cuda::attention_latent", parts[s.part], "<", uint32_t{s.k_format}, "u, ",
              uint32_t{s.v_format}, "u, ", s.k_dim16 * 16u, "u, ", s.v_dim16 * 16u, "u, ",
              stage_keys(s), "u, ", s.bf16 != 0 ? "true" : "false", ">");
}

// A spec for any GPU is one of a Hopper.
bool fits_attention_latent(uint64_t spec, const CudaLimits& limits) {
  auto s = spec_from_key<abi::AttentionLatentSpec>(spec);
  if (limits.arch != 90) s.gpu = kOtherGpus;
  return fits(s, limits);
}

Launch launch_attention_latent(const void* params, uint64_t spec, const CudaLimits& limits) {
  constexpr uint64_t kMaxBlocks = uint64_t{1} << 20;
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  const auto s = spec_from_key<abi::AttentionLatentSpec>(spec);
  const LatentScratch scratch = latent_scratch(p);
  const auto blocks = [&](uint64_t count) {
    return static_cast<uint32_t>(std::clamp<uint64_t>(count, 1, kMaxBlocks));
  };
  switch (s.part) {
    case 0:
      return {{blocks(p.tokens * p.heads) + 1, 1, 1}, kLatentThreads, 0};
    case 1:
      return {{blocks(std::min<uint64_t>(scratch.max_works, limits.multiprocessors)), 1, 1},
              kLatentThreads,
              layout_of(s).total};
    default:
      return {{blocks(scratch.max_tiles * kLatentRows), 1, 1}, kLatentThreads, 0};
  }
}

}  // namespace gyre::cuda
