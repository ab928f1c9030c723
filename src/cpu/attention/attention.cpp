// attention on the CPU. A task is an equal share of the work tiles: up to 64 rows of one KV head
// and one split of the keys.
#include "abi/attention.h"

#include <algorithm>

#include "cpu/attention/isa/kernels.h"
#include "cpu/kernels.h"
#include "cpu/kernels/select.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/attention.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/attention/decode-inl.h"
#include "cpu/attention/epilogue-inl.h"
#include "cpu/attention/prefill-inl.h"
#include "cpu/attention/problem-inl.h"
#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/rotation-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

using enum abi::AttentionArg;

template <class Q>
void LoadQueries(const WorkTile& work, uint64_t q) {
  for (uint32_t r = 0; r < work.rows; ++r) {
    float* const row = work.scratch->q + size_t{r} * work.k_dim();
    const uint64_t at =
        q + work.token(r) * work.params->q_token_stride + work.head(r) * work.params->q_head_stride;
    CopyRow(pointer<const Q>(at), row, work.k_dim());
    Rotate(work.k.layout->format, work.k_dim(), row);
  }
}

void StorePartial(const WorkTile& work, uint32_t row, uint64_t split, const float* values,
                  uint64_t partial) {
  const abi::AttentionParams& p = *work.params;
  const uint64_t n = work.v_dim();
  float* const place = pointer<float>(partial) +
                       ((split * p.tokens + work.token(row)) * p.heads + work.head(row)) * (n + 2);
  std::copy_n(values, n, place);
  place[n] = work.state[row].max * kLn2;
  place[n + 1] = work.state[row].sum;
}

template <class Out>
void StoreOutput(const WorkTile& work, uint32_t row, float* values, const uint64_t* args) {
  const abi::AttentionParams& p = *work.params;
  const uint64_t token = work.token(row), head = work.head(row), lse = args[arg_lse];
  StoreRow<Out>(work.state[row], values, work.v_dim(),
                {pointer<const float>(args[arg_sinks]), head,
                 args[arg_out] + token * p.out_token_stride + head * p.out_head_stride,
                 lse == 0 ? 0 : lse + token * p.lse_token_stride + head * p.lse_head_stride});
}

// Kernel: Decode or Prefill.
template <class Out, class Kernel>
void RunKernel(WorkTile& work, uint64_t split, const uint64_t* args) {
  Kernel kernel(work);
  kernel.run();
  alignas(64) float values[abi::kKvMaxHeadDim];
  for (uint32_t r = 0; r < work.rows; ++r) {
    kernel.read_row(r, values);
    Restore(work.v.layout->format, work.v_dim(), values);
    if (work.params->partial != 0) {
      StorePartial(work, r, split, values, args[arg_partial]);
    } else {
      StoreOutput<Out>(work, r, values, args);
    }
  }
}

// Rows [first_row, first_row + 64) of a KV head and keys of a split.
WorkTile MakeWorkTile(const abi::AttentionParams& p, const uint64_t* args, uint64_t kv_head,
                      uint64_t first_row, uint64_t split) {
  WorkTile work;
  work.params = &p;
  work.kv_head = kv_head;
  work.k = HeadView(p.k, args[arg_k_codes], args[arg_k_scales], kv_head);
  work.v = HeadView(p.v, args[arg_v_codes], args[arg_v_scales], kv_head);
  work.slopes = pointer<const float>(args[arg_slopes]);
  work.tree = pointer<const uint8_t>(args[arg_tree]);
  work.first_row = first_row;
  const uint64_t rows = p.tokens * (p.heads / p.kv_heads);
  work.rows = static_cast<uint32_t>(std::min<uint64_t>(rows - first_row, kTileRows));
  const uint64_t first = std::min(p.first_key + split * p.split_keys, p.end_key);
  work.first_key = static_cast<int64_t>(first);
  work.last_key =
      static_cast<int64_t>(p.partial == 0 ? p.end_key : std::min(first + p.split_keys, p.end_key));
  work.scratch = &ThreadScratch();
  work.start_rows();
  return work;
}

template <class Q, class Out>
void Attention(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  abi::AttentionParams p = *static_cast<const abi::AttentionParams*>(params);
  if (args[arg_state] != 0) abi::attention_follow(*pointer<const abi::KvState>(args[arg_state]), p);
  const uint64_t rows = p.tokens * (p.heads / p.kv_heads);
  const uint64_t tiles = (rows + kTileRows - 1) / kTileRows;
  const Share share = share_of(p.kv_heads * tiles * p.splits, task, tasks);
  for (uint64_t index = share.begin; index < share.end; ++index) {
    // Neighbouring tasks share keys.
    const uint64_t tile = index % tiles, split = index / tiles % p.splits;
    WorkTile work = MakeWorkTile(p, args, index / tiles / p.splits, tile * kTileRows, split);
    LoadQueries<Q>(work, args[arg_q]);
    if (work.rows <= kDecodeRows) {
      RunKernel<Out, Decode>(work, split, args);
    } else {
      RunKernel<Out, Prefill>(work, split, args);
    }
  }
}

TaskFn SelectAttention(uint64_t key) {
  const auto spec = spec_from_key<abi::AttentionSpec>(key);
  return select_float(spec.q_dtype, [&](auto q) {
    return select_float(spec.out_dtype,
                        [](auto out) -> TaskFn { return Attention<decltype(q), decltype(out)>; });
  });
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectAttention);

namespace {

bool is_format(uint32_t format) {
  return format <= static_cast<uint32_t>(KvFormat::bf16) || abi::kv_is_native(format) ||
         abi::kv_is_compat(format);
}

}  // namespace

TaskFn select_attention(uint64_t spec) {
  const auto types = spec_from_key<abi::AttentionSpec>(spec);
  if (!is_format(types.k_format) || !is_format(types.v_format)) return nullptr;
  return HWY_DYNAMIC_DISPATCH(SelectAttention)(spec);
}

std::string describe_attention(uint64_t spec) {
  const auto types = spec_from_key<abi::AttentionSpec>(spec);
  const AttentionKernels& kernels = attention_kernels();
  const auto products = [](uint32_t format, bool levels, bool half, bool bhalf) -> std::string {
    if (abi::kv_is_native(format)) return levels ? "int8" : "f32 (unpacked)";
    if (abi::kv_is_compat(format)) return "f32 (unpacked)";
    if (static_cast<KvFormat>(format) == KvFormat::f16 && half) return "f16";
    return static_cast<KvFormat>(format) == KvFormat::bf16 && bhalf ? "bf16" : "f32";
  };
  return std::string(kernels.name) + ": K " +
         products(types.k_format, kernels.score_levels != nullptr, kernels.score_f16 != nullptr,
                  kernels.score_bf16 != nullptr) +
         ", V " +
         products(types.v_format, kernels.accumulate_levels != nullptr,
                  kernels.accumulate_f16 != nullptr, kernels.accumulate_bf16 != nullptr);
}

uint32_t attention_tasks(const void* params, uint64_t /*spec*/) {
  constexpr uint64_t kMostTasks = 1 << 20;
  constexpr uint64_t kSmall = 1 << 16;  // products that are not worth waking a thread for
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  const uint64_t rows = p.tokens * (p.heads / p.kv_heads);
  const uint64_t tiles = (rows + kTileRows - 1) / kTileRows;
  // A cache's length is on the device: it may be as long as it can.
  const uint64_t keys = p.places.body_capacity != 0 ? p.capacity : p.length;
  const uint64_t products = std::max<uint64_t>(keys, 1) * rows * p.kv_heads * p.k.head_dim;
  if (products < kSmall) return 1;
  return static_cast<uint32_t>(std::min(p.kv_heads * tiles * p.splits, kMostTasks));
}

}  // namespace gyre::cpu
#endif
