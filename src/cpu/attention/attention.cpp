// attention on the CPU: one cache, or several sequences in pages. A task is a share of the work
// tiles: up to 64 rows of one KV head of a sequence, and all of their keys or a split of them.
#include "abi/attention.h"

#include <algorithm>
#include <limits>

#include "cpu/attention/cut.h"
#include "cpu/attention/isa/kernels.h"
#include "cpu/kernels.h"
#include "cpu/kernels/select.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/attention.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/attention/batch-inl.h"
#include "cpu/attention/decode-inl.h"
#include "cpu/attention/epilogue-inl.h"
#include "cpu/attention/prefill-inl.h"
#include "cpu/attention/problem-inl.h"
#include "cpu/attention/prompt-inl.h"
#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/rotation-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

inline void LoadQueries(const WorkTile& work, uint64_t q, DType dtype) {
  for (uint32_t r = 0; r < work.rows; ++r) {
    float* const row = work.scratch->q + size_t{r} * work.k_dim();
    const uint64_t at =
        q + work.token(r) * work.params->q_token_stride + work.head(r) * work.params->q_head_stride;
    RowToF32(at, dtype, row, work.k_dim());
    Rotate(work.k.layout->format, work.k_dim(), row);
    if (!work.latent()) continue;
    const uint32_t n = work.rotary_dim();
    float* const rotary = work.scratch->rotary_queries() + size_t{r} * n;
    RowToF32(at + work.k_dim() * size_bytes(dtype), dtype, rotary, n);
    Rotate(work.rotary.layout->format, n, rotary);
  }
}

// A row's output goes where the command wants it: rows of `out`, or states of rows or of splits.
struct RowTarget {
  const abi::AttentionParams& p;
  const uint64_t* args;
  DType dtype;

  float* state(uint64_t at, const WorkTile& work, uint32_t row, uint64_t split) const {
    const uint64_t place = (split * p.tokens + work.token(row)) * p.heads + work.head(row);
    return pointer<float>(at) + place * StateFloats(work.v_dim());
  }

  void store(const WorkTile& work, uint32_t row, SoftmaxState state_of_row, float* values) const {
    const uint64_t token = work.token(row), head = work.head(row), lse = args[arg_lse];
    if (p.partial == abi::kAttentionStates)
      return StoreState(state_of_row, values, work.v_dim(), state(args[arg_out], work, row, 0));
    // As it comes back from memory: a sequence in one split and one in several, of which one has
    // keys, give the same bits.
    state_of_row.max = state_of_row.max * kLn2 * kLog2E;
    StoreRow(state_of_row, values, work.v_dim(),
             {pointer<const float>(args[arg_sink_logits]), head,
              args[arg_out] + token * p.out_token_stride + head * p.out_head_stride,
              lse == 0 ? 0 : lse + token * p.lse_token_stride + head * p.lse_head_stride, dtype});
  }
};

// Splits of a sequence's keys, whose states meet in scratch memory.
class Splits {
 public:
  Splits(const abi::AttentionParams& p, uint64_t sequences, uint64_t max_query_length,
         uint64_t scratch)
      : layout_{sequences, p.kv_heads, p.splits,
                decode_rows(max_query_length, p.group, p.latent != 0),
                StateFloats(abi::attention_out_dim(p))},
        scratch_(pointer<float>(scratch)) {}

  float* state(const Sequence& s, uint64_t head, uint64_t split, uint32_t row) const {
    return scratch_ + layout_.state(s.index, head, split, row);
  }

  // Whether all splits are there, now that one more is. True once.
  bool complete(const Sequence& s, uint64_t head) const {
    // Not std::atomic_ref: the C++ library of Xcode 15, which macOS 14 has, is without.
    uint32_t* const counter =
        reinterpret_cast<uint32_t*>(scratch_) + layout_.counter(s.index, head);
    return __atomic_add_fetch(counter, 1u, __ATOMIC_ACQ_REL) == s.splits.count;
  }

  SoftmaxState merge(const Sequence& s, uint64_t head, uint32_t row, float* values) const {
    return MergeStates(state(s, head, 0, row), s.splits.count, layout_.split_floats(),
                       layout_.state_floats - 2, values);
  }

 private:
  SplitScratch layout_;
  float* scratch_;
};

// Only rows that are read and written depend on dtypes: the code exists once for all pairs.
class Command {
 public:
  struct DTypes {
    DType q, out;
  };

  HWY_NOINLINE static void Run(const void* params, const uint64_t* args, DTypes dtypes,
                               uint32_t task, uint32_t tasks) {
    abi::AttentionParams p = *static_cast<const abi::AttentionParams*>(params);
    if (p.table.page_tokens == 0 && args[arg_state] != 0)
      abi::attention_follow(*pointer<const abi::KvState>(args[arg_state]), p);
    Command(p, args, dtypes).run(task, tasks);
  }

 private:
  Command(const abi::AttentionParams& p, const uint64_t* args, DTypes dtypes)
      : p_(p),
        args_(args),
        q_dtype_(dtypes.q),
        prompts_decode_(Decode::takes_prompts(p)),
        batch_(p, args, prompts_decode_),
        target_{p, args, dtypes.out},
        splits_(p, batch_.sequences(),
                p.table.page_tokens != 0 ? p.table.max_query_length : p.tokens, args[arg_partial]) {
  }

  void run(uint32_t task, uint32_t tasks) {
    ForItems(batch_, task, tasks, [&](const Sequence& s, uint64_t item) {
      const uint64_t tile = item % s.row_tiles, split = item / s.row_tiles % s.splits.count;
      run_item(s, item / s.row_tiles / s.splits.count, tile, split);
    });
  }

  void run_item(const Sequence& s, uint64_t kv_head, uint64_t tile, uint64_t split) {
    if (task_ended()) return;
    WorkTile work = make_work(s, kv_head, tile * s.tile_rows, s.splits[split]);
    // A sequence with a wrong entry shows it in all rows: each tile of a prompt looks at all of
    // them, each split at its own, and the merge spreads what one found.
    const bool valid = s.valid && batch_.holds(s, s.prompt ? s.splits.all : s.splits[split]);
    if (!valid) {
      alignas(64) float values[abi::kKvMaxHeadDim];
      constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
      for (uint32_t r = 0; r < work.rows; ++r) {
        std::fill_n(values, work.v_dim(), kNaN);
        finish_row(s, work, split, r, {kNaN, kNaN}, values);
      }
    } else {
      LoadQueries(work, args_[arg_q], q_dtype_);
      if (s.prompt && !prompts_decode_) {
        run_kernel<Prefill>(s, work, split);
      } else if (s.prompt && Prompt::takes(p_)) {
        run_kernel<Prompt>(s, work, split);
      } else {
        run_kernel<Decode>(s, work, split);
      }
    }
    if (p_.partial == abi::kAttentionPartial || s.splits.count == 1) return;
    if (splits_.complete(s, kv_head)) merge_splits(s, work);
  }

  template <class Kernel>
  void run_kernel(const Sequence& s, WorkTile& work, uint64_t split) {
    Kernel kernel(work);
    if (!kernel.run()) return;
    alignas(64) float values[abi::kKvMaxHeadDim];
    for (uint32_t r = 0; r < work.rows; ++r) {
      kernel.read_row(r, values);
      Restore(work.v.layout->format, work.v_dim(), values);
      finish_row(s, work, split, r, work.state[r], values);
    }
  }

  void finish_row(const Sequence& s, const WorkTile& work, uint64_t split, uint32_t row,
                  const SoftmaxState& state, float* values) const {
    if (p_.partial == abi::kAttentionPartial) {
      StoreState(state, values, work.v_dim(), target_.state(args_[arg_partial], work, row, split));
    } else if (s.splits.count > 1) {
      StoreState(state, values, work.v_dim(), splits_.state(s, work.kv_head, split, row));
    } else {
      target_.store(work, row, state, values);
    }
  }

  void merge_splits(const Sequence& s, const WorkTile& work) const {
    alignas(64) float values[abi::kKvMaxHeadDim];
    for (uint32_t r = 0; r < work.rows; ++r) {
      const SoftmaxState state = splits_.merge(s, work.kv_head, r, values);
      target_.store(work, r, state, values);
    }
  }

  WorkTile make_work(const Sequence& s, uint64_t kv_head, uint64_t first_row,
                     const KeyRange& keys) const {
    WorkTile work;
    work.params = &p_;
    work.kv_head = kv_head;
    work.k = HeadView(p_.k, args_[arg_k_codes], args_[arg_k_scales], kv_head);
    work.v = HeadView(p_.v, args_[arg_v_codes], args_[arg_v_scales], kv_head);
    if (p_.latent != 0) {
      work.rotary = work.v;
      work.v = work.k;
    }
    work.alibi_slopes = pointer<const float>(args_[arg_alibi_slopes]);
    work.tree_mask = pointer<const uint8_t>(args_[arg_tree_mask]);
    work.table = s.table;
    work.prompt = s.prompt;
    work.first_token = s.first_token;
    work.first_row = first_row;
    work.rows =
        static_cast<uint32_t>(std::min<uint64_t>(s.tokens * p_.group - first_row, s.tile_rows));
    work.first_key = keys.begin;
    work.last_key = keys.end;
    work.mask = s.mask;
    work.scratch = static_cast<AttentionScratch*>(task_scratch());
    work.start_rows();
    return work;
  }

  const abi::AttentionParams& p_;
  const uint64_t* args_;
  DType q_dtype_;
  bool prompts_decode_;
  Batch batch_;
  RowTarget target_;
  Splits splits_;
};

template <class Q, class Out>
void Attention(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  Command::Run(params, args, {DTypeOf<Q>::value, DTypeOf<Out>::value}, task, tasks);
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
         abi::kv_is_mlx_native(format);
}

}  // namespace

TaskFn select_attention(uint64_t spec) {
  const auto types = spec_from_key<abi::AttentionSpec>(spec);
  if (!is_format(types.k_format) || !is_format(types.v_format)) return nullptr;
  attention_kernels();  // makes their table, which takes memory, before a task asks for it
  return HWY_DYNAMIC_DISPATCH(SelectAttention)(spec);
}

std::string describe_attention(uint64_t spec) {
  const auto types = spec_from_key<abi::AttentionSpec>(spec);
  const AttentionKernels& kernels = attention_kernels();
  const auto products = [&](uint32_t format, bool levels) -> std::string {
    if (abi::kv_is_native(format)) return levels ? "int8" : "f32 (unpacked)";
    if (abi::kv_is_mlx_native(format)) return "f32 (unpacked)";
    if (static_cast<KvFormat>(format) == KvFormat::f16) return kernels.f16_arithmetic;
    return static_cast<KvFormat>(format) == KvFormat::bf16 ? kernels.bf16_arithmetic : "f32";
  };
  const auto of_prompt = [&](uint32_t format) {
    const auto stored = static_cast<KvFormat>(format);
    return kernels.accumulate_prompt != nullptr &&
           (stored == KvFormat::f16 || stored == KvFormat::bf16);
  };
  const uint32_t v_format = types.latent != 0 ? types.k_format : types.v_format;
  return std::string(kernels.name) + ": K " +
         products(types.k_format, kernels.score_levels != nullptr) + ", V " +
         products(v_format, kernels.accumulate_levels != nullptr) +
         (of_prompt(v_format) ? ", weights of 8 bits" : "");
}

// Counters of splits. Calls of other shapes, and lists that were ended early, leave anything there.
ArgBytes zeroed_by_attention(const void* params) {
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  if (p.splits <= 1 || p.partial == abi::kAttentionPartial) return {};
  const uint64_t sequences = p.table.page_tokens != 0 ? p.table.sequences : 1;
  const SplitScratch layout{sequences, p.kv_heads, p.splits, 0, 0};
  return {abi::AttentionArg::arg_partial, layout.counters() * sizeof(float)};
}

uint32_t attention_tasks(const void* params, uint64_t /*spec*/) {
  constexpr uint64_t kMaxBatchTasks = 64;  // each reads the numbers of all sequences
  constexpr uint64_t kSmall = 1 << 16;     // products that are not worth waking a thread for
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  const bool paged = p.table.page_tokens != 0;
  const uint64_t rows = p.tokens * p.group, tiles = (rows + kTileRows - 1) / kTileRows;
  const uint64_t decode_rows = max_decode_rows(p.group, p.latent != 0);
  // Lengths are on the device: caches may be as long as they can.
  const uint64_t keys =
      paged ? p.table.max_kv_length : (p.places.body_capacity != 0 ? p.capacity : p.length);
  const uint64_t products = std::max<uint64_t>(keys, 1) * rows * p.kv_heads * p.k.head_dim;
  if (products < kSmall) return 1;
  const uint64_t each = p.kv_heads * p.splits;
  if (paged)
    return static_cast<uint32_t>(std::min((p.table.sequences + tiles) * each, kMaxBatchTasks));
  const bool cut = p.partial == abi::kAttentionPartial || rows <= decode_rows;
  const uint64_t items = tiles * (cut ? each : p.kv_heads);
  return task_count(items, items);
}

}  // namespace gyre::cpu
#endif
