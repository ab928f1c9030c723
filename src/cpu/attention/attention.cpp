// attention and attention_merge on the CPU. A unit of work is a tile of rows of one KV head and one
// split of the keys; a task is an equal share of the units.
#include "abi/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/attention/isa/kernels.h"
#include "cpu/kernels.h"
#include "cpu/kernels/select.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/attention.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/attention/decode-inl.h"
#include "cpu/attention/prefill-inl.h"
#include "cpu/attention/problem-inl.h"
#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/rotation-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

using enum abi::AttentionArg;

// A sink is one more logit, whose value is 0.
HWY_INLINE void AddSink(const float* sinks, uint64_t head, RowState& state, float& keep) {
  keep = 1.0f;
  constexpr float kMost = std::numeric_limits<float>::max();
  float sink = kMinusInfinity;
  if (sinks != nullptr) sink = sinks[head];
  if (std::isfinite(sink)) sink = std::clamp(sink * kLog2E, -kMost, kMost);
  if (sink == kMinusInfinity) return;
  if (sink > state.max) {
    keep = Exp2One(state.max - sink);
    state.sum *= keep;
    state.max = sink;
  }
  state.sum += std::isnan(sink) ? sink : Exp2One(sink - state.max);
}

HWY_INLINE float LogSumExp(const RowState& state) {
  return state.sum == 0 ? kMinusInfinity : (state.max + std::log2(state.sum)) * kLn2;
}

template <class Q>
void LoadQueries(const AttentionUnit& u, uint64_t q) {
  for (uint32_t r = 0; r < u.rows; ++r) {
    float* const row = u.scratch->q + size_t{r} * u.k_dim();
    const uint64_t at =
        q + u.token(r) * u.params->q_token_stride + u.head(r) * u.params->q_head_stride;
    CopyRow(pointer<const Q>(at), row, u.k_dim());
    Rotate(u.k.layout->format, u.k_dim(), row);
  }
}

void StorePartial(const AttentionUnit& u, uint32_t row, uint64_t split, const float* values,
                  uint64_t partial) {
  const abi::AttentionParams& p = *u.params;
  const uint64_t n = u.v_dim();
  float* const place = pointer<float>(partial) +
                       ((split * p.tokens + u.token(row)) * p.heads + u.head(row)) * (n + 2);
  std::copy_n(values, n, place);
  place[n] = u.state[row].max * kLn2;
  place[n + 1] = u.state[row].sum;
}

// Where a row's output goes; lse 0: not wanted.
struct RowOutput {
  const float* sinks;
  uint64_t head;
  uint64_t out, lse;
};

// Divides by the softmax's denominator, the sink included, and writes.
template <class Out>
void StoreRow(RowState state, float* values, uint64_t head_dim, const RowOutput& to) {
  float keep = 1.0f;
  AddSink(to.sinks, to.head, state, keep);
  const float factor = state.sum == 0 ? 0.0f : keep / state.sum;
  for (uint64_t c = 0; c < head_dim; ++c) values[c] *= factor;
  CopyRow(static_cast<const float*>(values), pointer<Out>(to.out), head_dim);
  if (to.lse != 0) *pointer<float>(to.lse) = LogSumExp(state);
}

template <class Out>
void StoreOutput(const AttentionUnit& u, uint32_t row, float* values, const uint64_t* args) {
  const abi::AttentionParams& p = *u.params;
  const uint64_t token = u.token(row), head = u.head(row), lse = args[arg_lse];
  StoreRow<Out>(u.state[row], values, u.v_dim(),
                {pointer<const float>(args[arg_sinks]), head,
                 args[arg_out] + token * p.out_token_stride + head * p.out_head_stride,
                 lse == 0 ? 0 : lse + token * p.lse_token_stride + head * p.lse_head_stride});
}

template <class Out, class Engine>
void RunEngine(AttentionUnit& u, uint64_t split, const uint64_t* args) {
  Engine engine(u);
  engine.run();
  alignas(64) float values[abi::kKvMaxHeadDim];
  for (uint32_t r = 0; r < u.rows; ++r) {
    engine.read_row(r, values);
    Restore(u.v.layout->format, u.v_dim(), values);
    if (u.params->partial != 0) {
      StorePartial(u, r, split, values, args[arg_partial]);
    } else {
      StoreOutput<Out>(u, r, values, args);
    }
  }
}

HWY_INLINE Cache CacheOf(const abi::KvCacheLayout& layout, uint64_t codes, uint64_t scales,
                         uint64_t head) {
  return {&layout, pointer<const uint8_t>(codes) + head * layout.codes_head_stride,
          pointer<const uint8_t>(scales) + head * layout.scales_head_stride};
}

template <class Q, class Out>
void Attention(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  abi::AttentionParams p = *static_cast<const abi::AttentionParams*>(params);
  if (args[arg_state] != 0) abi::attention_follow(*pointer<const abi::KvState>(args[arg_state]), p);
  const uint64_t rows = p.tokens * (p.heads / p.kv_heads);
  const uint64_t tiles = (rows + kAttentionRows - 1) / kAttentionRows;
  const Share share = share_of(p.kv_heads * tiles * p.splits, task, tasks);
  for (uint64_t index = share.begin; index < share.end; ++index) {
    // Neighbouring tasks share keys.
    const uint64_t tile = index % tiles, split = index / tiles % p.splits;
    AttentionUnit u;
    u.params = &p;
    u.kv_head = index / tiles / p.splits;
    u.k = CacheOf(p.k, args[arg_k_codes], args[arg_k_scales], u.kv_head);
    u.v = CacheOf(p.v, args[arg_v_codes], args[arg_v_scales], u.kv_head);
    u.slopes = pointer<const float>(args[arg_slopes]);
    u.tree = pointer<const uint8_t>(args[arg_tree]);
    u.first_row = tile * kAttentionRows;
    u.rows = static_cast<uint32_t>(std::min<uint64_t>(rows - u.first_row, kAttentionRows));
    const uint64_t first = std::min(p.first_key + split * p.split_keys, p.end_key);
    u.first_key = static_cast<int64_t>(first);
    u.last_key = static_cast<int64_t>(p.partial == 0 ? p.end_key
                                                     : std::min(first + p.split_keys, p.end_key));
    u.scratch = &ThreadScratch();
    u.find_bounds();
    LoadQueries<Q>(u, args[arg_q]);
    if (u.rows <= kFewRows) {
      RunEngine<Out, Stream>(u, split, args);
    } else {
      RunEngine<Out, Tile>(u, split, args);
    }
  }
}

// Partial states of one row, put together in the order of the splits.
template <class Out>
void Merge(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::AttentionMergeParams*>(params);
  const uint64_t rows = p.tokens * p.heads, stride = p.head_dim + 2;
  alignas(64) float sum[abi::kKvMaxHeadDim];
  const Share share = share_of(rows, task, tasks);
  for (uint64_t row = share.begin; row < share.end; ++row) {
    const float* const first = pointer<const float>(args[0]) + row * stride;
    RowState state;
    for (uint64_t s = 0; s < p.splits; ++s)
      state.max = std::max(state.max, first[s * rows * stride + p.head_dim] * kLog2E);
    std::fill_n(sum, p.head_dim, 0.0f);
    for (uint64_t s = 0; s < p.splits; ++s) {
      const float* const part = first + s * rows * stride;
      if (part[p.head_dim + 1] == 0) continue;  // a split without keys
      const float weight = state.max == kMinusInfinity
                               ? part[p.head_dim + 1]  // only NaN was seen
                               : Exp2One(part[p.head_dim] * kLog2E - state.max);
      state.sum += weight * part[p.head_dim + 1];
      for (uint64_t c = 0; c < p.head_dim; ++c) sum[c] += weight * part[c];
    }
    const uint64_t token = row / p.heads, head = row % p.heads;
    StoreRow<Out>(
        state, sum, p.head_dim,
        {pointer<const float>(args[3]), head,
         args[1] + token * p.out_token_stride + head * p.out_head_stride,
         args[2] == 0 ? 0 : args[2] + token * p.lse_token_stride + head * p.lse_head_stride});
  }
}

TaskFn SelectAttention(uint64_t key) {
  const auto spec = spec_from_key<abi::AttentionSpec>(key);
  return select_float(spec.q_dtype, [&](auto q) {
    return select_float(spec.out_dtype,
                        [](auto out) -> TaskFn { return Attention<decltype(q), decltype(out)>; });
  });
}

TaskFn SelectMerge(uint64_t key) {
  return select_float(spec_from_key<abi::AttentionMergeSpec>(key).out_dtype,
                      [](auto out) -> TaskFn { return Merge<decltype(out)>; });
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectAttention);
HWY_EXPORT(SelectMerge);

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
TaskFn select_attention_merge(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectMerge)(spec); }

std::string describe_attention(uint64_t spec) {
  const auto types = spec_from_key<abi::AttentionSpec>(spec);
  const AttentionKernels& kernels = attention_kernels();
  const auto products = [](uint32_t format, bool levels, bool half, bool bhalf) -> std::string {
    if (abi::kv_is_native(format)) return levels ? "int8" : "f32 (decoded)";
    if (abi::kv_is_compat(format)) return "f32 (decoded)";
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
  const uint64_t tiles = (rows + kAttentionRows - 1) / kAttentionRows;
  // A cache's length is on the device: it may be as long as it can.
  const uint64_t keys = p.places.body_capacity != 0 ? p.capacity : p.length;
  const uint64_t products = std::max<uint64_t>(keys, 1) * rows * p.kv_heads * p.k.head_dim;
  if (products < kSmall) return 1;
  return static_cast<uint32_t>(std::min(p.kv_heads * tiles * p.splits, kMostTasks));
}

uint32_t attention_merge_tasks(const void* params, uint64_t /*spec*/) {
  constexpr uint64_t kFloatsPerTask = 32 << 10;
  const auto& p = *static_cast<const abi::AttentionMergeParams*>(params);
  const uint64_t rows = p.tokens * p.heads;
  return static_cast<uint32_t>(std::clamp<uint64_t>(rows * p.splits * p.head_dim / kFloatsPerTask,
                                                    1, std::min<uint64_t>(rows, 1 << 20)));
}

}  // namespace gyre::cpu
#endif
