// Names and grids of kernels/attention/.
#include <algorithm>

#include "cuda/attention/planner.h"
#include "cuda/kernels.h"
#include "cuda/kernels/attention/any/prefill_layout.cuh"
#include "cuda/kernels/attention/decode/decode_layout.cuh"
#include "cuda/kernels/attention/decode/paged_layout.cuh"
#include "cuda/kernels/attention/many_rows/drafts_layout.cuh"
#include "cuda/kernels/attention/many_rows/layout.cuh"
#include "cuda/kernels/attention/many_rows/unpacked.cuh"
#include "cuda/kernels/attention/merge_layout.cuh"
#include "cuda/types.h"
#include "gyre/format.h"
#include "runtime/require.h"

namespace gyre::cuda {
namespace {

constexpr uint64_t kMaxBlocks = (uint64_t{1} << 31) - 1;

bool is_format(uint32_t format) {
  return format <= static_cast<uint32_t>(KvFormat::bf16) || abi::kv_is_native(format) ||
         abi::kv_is_mlx_native(format);
}

// Stages of 128 keys only where four blocks fit side by side.
PrefillLayout first_plan(const abi::AttentionParams& p, uint32_t budget, uint32_t fourth) {
  const uint64_t rows = prefill_rows(p);
  for (uint32_t i = 0; i < kPrefillLayouts; ++i) {
    const PrefillLayout plan = prefill_layout(p.k, p.v, rows, i);
    if (plan.total <= (plan.stage_keys == kMaxStageKeys ? std::min(fourth, budget) : budget))
      return plan;
  }
  return {};
}

// Shared memory that each of some blocks side by side may use.
uint32_t share_of(const CudaLimits& limits, uint32_t blocks) {
  constexpr uint32_t kReserved = 1024;  // of every block, by the driver
  const uint32_t bytes = limits.shared_bytes_per_multiprocessor / blocks;
  return std::min(limits.shared_bytes_per_block, bytes > kReserved ? bytes - kReserved : 0);
}

// Two blocks side by side if that takes no rows from a block, else whatever fits.
PrefillLayout plan_of(const abi::AttentionParams& p, const CudaLimits& limits) {
  const uint32_t limit = limits.shared_bytes_per_block;
  const auto share = [&](uint32_t blocks) { return share_of(limits, blocks); };
  const PrefillLayout plan = first_plan(p, share(2), share(4));
  const uint64_t rows = prefill_rows(p);
  if (plan.total != 0 && plan.rows == (rows <= 8 ? 8u : 16u)) return plan;
  return first_plan(p, limit, limit);
}

// `fits` is false where the kernel's text has no such variant, whatever the GPU.
DecodeSharedLayout layout_of(const abi::AttentionDecodeSpec& s) {
  const bool alone = s.cluster == 1,
             together = s.cluster == kDecodePair || s.cluster == kDecodeCluster;
  if ((!alone && (!together || s.paged != 0)) || s.paged > 2) return {};
  if (s.head_dim == 0 || s.rows == 0) return {};
  const HeadDims dims(s.head_dim, abi::decode_value_dim(s));
  if (decode_block_rows(s.v_format, dims.v, s.rows) != s.rows) return {};
  return decode_shared_layout(s.k_format, s.v_format, dims, s.rows,
                              s.paged != 0 ? kDecodePages : s.cluster);
}

DecodeBlock block_of(const DecodeSharedLayout& layout, const CudaLimits& limits) {
  return decode_block(layout, decode_max_warps(layout), limits.shared_bytes_per_block,
                      share_of(limits, 2) + 1);
}

PagedLayout paged_layout_of(const abi::AttentionDecodeSpec& s) {
  return paged_layout(s.k_format, s.v_format, HeadDims(s.head_dim, abi::decode_value_dim(s)),
                      s.rows);
}

// Splits of a block, if every sequence has one query and is as long as the call allows.
uint64_t max_block_splits(const abi::AttentionParams& p, uint32_t rows, uint64_t blocks) {
  const abi::AttentionCut cut = decode_cut(rows);
  const uint64_t group = abi::sequence_split_keys(cut, p.table.max_kv_length);
  const uint64_t keys = group >> (group > cut.fewest_keys ? abi::kLargeGroupSplitsShift
                                                          : abi::kGroupSplitsShift),
                 splits = (p.table.max_kv_length + keys - 1) / keys;
  const uint64_t items = p.table.sequences * p.kv_heads * ((p.group + rows - 1) / rows);
  return (items * splits + blocks - 1) / blocks;
}

// Where fewer warps take a block's splits in two rounds, the others would leave no registers to the
// write ahead, beside which the block starts.
uint32_t block_warps(const abi::AttentionParams& p, const PagedLayout& layout, uint32_t rows,
                     uint64_t blocks) {
  const bool few =
      p.tokens <= p.table.sequences && max_block_splits(p, rows, blocks) <= 2 * kFewPagedWarps;
  return few ? std::min(layout.max_warps, kFewPagedWarps) : layout.max_warps;
}

// The command that unpacks has the layout of the one that it goes ahead of.
ManyRowsLayout layout_of(const abi::AttentionRowsSpec& s) {
  return many_rows_layout(s.k_format, s.v_format, s.k_dim, s.v_dim,
                          s.gpu == kManyRowsUnpack ? kManyRowsUnpacked : s.gpu);
}
bool is_unpacked(const abi::AttentionRowsSpec& s) {
  return s.gpu == kManyRowsUnpack || s.gpu == kManyRowsUnpacked;
}
bool is_drafts(const abi::AttentionRowsSpec& s) { return draft_groups(s.gpu) != 0; }
DraftsLayout drafts_of(const abi::AttentionRowsSpec& s) {
  return drafts_layout(s.k_format, s.v_format, s.k_dim, s.v_dim, draft_groups(s.gpu));
}

}  // namespace

std::string name_attention(uint64_t spec) {
  const auto types = spec_from_key<abi::AttentionSpec>(spec);
  if (!is_format(types.k_format) || !is_format(types.v_format) || types.latent != 0) return "";
  if (float_type(types.q_dtype) == nullptr || float_type(types.out_dtype) == nullptr) return "";
  return join("gyre::cuda::attention_prefill<", uint32_t{types.k_format}, "u, ",
              uint32_t{types.v_format}, "u>");
}

Launch launch_attention(const void* params, uint64_t /*spec*/, const CudaLimits& limits) {
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  const PrefillLayout plan = plan_of(p, limits);
  require(plan.total != 0, "attention: head dims ", p.k.head_dim, " and ", p.v.head_dim,
          " need more shared memory than a block of this GPU has, ", limits.shared_bytes_per_block,
          " bytes");
  const uint64_t rows = p.tokens * p.group;
  uint64_t blocks = (rows + plan.rows - 1) / plan.rows * p.splits * p.kv_heads;
  if (p.table.page_tokens != 0) {
    // As many as run at once, at most one for each tile that the batch may have.
    constexpr uint64_t kAtOnce = 4;
    blocks = std::min(((rows + plan.rows - 1) / plan.rows + p.table.sequences) * p.kv_heads,
                      std::max<uint64_t>(kAtOnce * limits.multiprocessors, 1));
  }
  return {{static_cast<uint32_t>(std::min(blocks, kMaxBlocks)), 1, 1}, plan.warps * 32, plan.total};
}

std::string name_attention_decode(uint64_t spec) {
  const auto s = spec_from_key<abi::AttentionDecodeSpec>(spec);
  if (!layout_of(s).fits) return "";
  const std::string cluster =
      s.paged != 0 ? (s.paged == 2 ? ", true" : ", false") : join(", ", uint32_t{s.cluster}, "u");
  const uint32_t value_dim = abi::decode_value_dim(s);
  const std::string values = value_dim == s.head_dim ? "" : join(", ", value_dim, "u");
  return join("gyre::cuda::attention_decode", s.paged != 0 ? "_paged<" : "<", uint32_t{s.k_format},
              "u, ", uint32_t{s.v_format}, "u, ", uint32_t{s.head_dim}, "u, ", uint32_t{s.rows},
              "u", cluster, values, ">");
}

bool fits_attention_decode(uint64_t spec, const CudaLimits& limits) {
  const auto s = spec_from_key<abi::AttentionDecodeSpec>(spec);
  if (s.cluster > 1 && limits.arch < 90) return false;
  const DecodeSharedLayout layout = layout_of(s);
  if (s.paged != 0) {
    const PagedLayout paged = paged_layout_of(s);
    return layout.fits &&
           paged_launch(paged, paged.max_warps, limits.shared_bytes_per_block).warps != 0;
  }
  return layout.fits && block_of(layout, limits).warps != 0;
}

Launch launch_attention_decode(const void* params, uint64_t spec, const CudaLimits& limits) {
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  const auto s = spec_from_key<abi::AttentionDecodeSpec>(spec);
  if (s.paged != 0) {
    const PagedLayout paged = paged_layout_of(s);
    const uint32_t blocks = paged_blocks(limits.multiprocessors);
    const PagedLaunch block =
        paged_launch(paged, block_warps(p, paged, s.rows, blocks), limits.shared_bytes_per_block);
    return {{blocks, 1, 1}, block.warps * 32, block.bytes};
  }
  const DecodeBlock block = block_of(layout_of(s), limits);
  const uint64_t rows = p.tokens * p.group, groups = (rows + s.rows - 1) / s.rows;
  return {{static_cast<uint32_t>(p.splits), static_cast<uint32_t>(groups),
           static_cast<uint32_t>(p.kv_heads)},
          block.warps * 32,
          block.bytes};
}

std::string name_attention_many_rows(uint64_t spec) {
  const auto s = spec_from_key<abi::AttentionRowsSpec>(spec);
  if (const uint32_t groups = drafts_of(s).groups; groups != 0) {
    return join("gyre::cuda::attention_drafts<", uint32_t{s.k_format}, "u, ", uint32_t{s.v_format},
                "u, ", uint32_t{s.k_dim}, "u, ", uint32_t{s.v_dim}, "u, ", groups, "u>");
  }
  if (layout_of(s).slots == 0) return "";
  if (s.gpu == kManyRowsUnpack) {
    return join("gyre::cuda::attention_many_rows_unpack<", uint32_t{s.k_format}, "u, ",
                uint32_t{s.v_format}, "u, ", uint32_t{s.k_dim}, "u, ", uint32_t{s.v_dim}, "u>");
  }
  // Unpacked, formats differ by the order of K's coordinates alone.
  uint32_t k = s.k_format, v = s.v_format;
  if (s.gpu == kManyRowsUnpacked)
    k = abi::kv_low_bits(k) == 2 ? abi::kTq2 : abi::kTq8, v = abi::kTq8;
  return join("gyre::cuda::attention_many_rows<", k, "u, ", v, "u, ", uint32_t{s.k_dim}, "u, ",
              uint32_t{s.v_dim}, "u, ", uint32_t{s.gpu}, "u>");
}

bool fits_attention_many_rows(uint64_t spec, const CudaLimits& limits) {
  const auto s = spec_from_key<abi::AttentionRowsSpec>(spec);
  if (is_drafts(s))
    return drafts_of(s).groups != 0 && many_rows_gpu(limits, false) == kManyRowsHopper;
  if (is_unpacked(s))
    return layout_of(s).slots != 0 && many_rows_gpu(limits, false) == kManyRowsHopper;
  return layout_of(s).slots != 0 &&
         (many_rows_gpu(limits, false) == s.gpu || many_rows_gpu(limits, true) == s.gpu);
}

Launch launch_attention_many_rows(const void* params, uint64_t spec, const CudaLimits& limits) {
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  const auto s = spec_from_key<abi::AttentionRowsSpec>(spec);
  if (is_drafts(s)) {
    const DraftsLayout drafts = drafts_of(s);
    return {{drafts_blocks(drafts, limits.multiprocessors), 1, 1}, drafts.threads(), drafts.total};
  }
  const ManyRowsLayout layout = layout_of(s);
  if (s.gpu == kManyRowsUnpack) {
    const uint64_t groups = (p.unpacked_room + kUnpackTiles - 1) / kUnpackTiles;
    const uint64_t at_once = uint64_t{limits.multiprocessors} * kUnpackBlocks / p.kv_heads;
    return {{static_cast<uint32_t>(std::clamp<uint64_t>(at_once, 1, groups)),
             static_cast<uint32_t>(p.kv_heads), 1},
            kUnpackThreads,
            kUnpackBytes};
  }
  const uint64_t rows = p.tokens * p.group;
  uint64_t blocks = (rows + layout.rows() - 1) / layout.rows() * p.splits * p.kv_heads;
  if (p.schedule_key != 0) {
    blocks = paged_blocks(limits.multiprocessors) * layout.blocks;
  } else if (p.table.page_tokens != 0) {
    // One for each multiprocessor, at most one for each tile that the batch may have.
    blocks = std::min(((rows + layout.rows() - 1) / layout.rows() + p.table.sequences) * p.kv_heads,
                      std::max<uint64_t>(limits.multiprocessors, 1));
  }
  return {
      {static_cast<uint32_t>(std::min(blocks, kMaxBlocks)), 1, 1}, layout.threads(), layout.total};
}

std::string name_attention_schedule(uint64_t /*spec*/) { return "gyre::cuda::attention_schedule"; }

Launch launch_attention_schedule(const void* params, uint64_t /*spec*/, const CudaLimits&) {
  constexpr uint32_t kThreads = 256;
  return {{static_cast<const abi::AttentionScheduleParams*>(params)->blocks, 1, 1}, kThreads, 0};
}

std::string name_attention_merge(uint64_t spec) {
  const char* const out = float_type(spec_from_key<abi::AttentionMergeSpec>(spec).out_dtype);
  return out == nullptr ? "" : join("gyre::cuda::attention_merge<", out, ">");
}

Launch launch_attention_merge(const void* params, uint64_t /*spec*/, const CudaLimits&) {
  const auto& p = *static_cast<const abi::AttentionMergeParams*>(params);
  return {{static_cast<uint32_t>(std::min(p.tokens * p.heads, kMaxBlocks)), 1, 1},
          kMergeThreads,
          merge_shared_bytes(static_cast<uint32_t>(p.head_dim))};
}

}  // namespace gyre::cuda
