// Attention for few rows, which reading K and V bounds, and for any number where the machine
// multiplies what K and V are stored as: each block of keys passes through scores, softmax and the
// weighted sum of values while it is in the cache. Levels, f16 and bf16 go through the machine's
// own kernels (isa/) where it has them, everything else through f32.

#if defined(GYRE_CPU_ATTENTION_DECODE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_DECODE_INL_H
#undef GYRE_CPU_ATTENTION_DECODE_INL_H
#else
#define GYRE_CPU_ATTENTION_DECODE_INL_H
#endif

#include <algorithm>

#include "cpu/attention/dense-inl.h"
#include "cpu/attention/problem-inl.h"
#include "cpu/attention/queries-inl.h"
#include "cpu/attention/rotary-inl.h"
#include "cpu/attention/unpack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

// How K or V reaches the arithmetic: as it is stored, as levels that were first padded to whole
// groups (K) or rearranged to tiles (a latent's), as both operands of a latent, split into two bf16
// (a prompt's), or unpacked to f32.
enum class KvPath : uint8_t {
  packed,
  f32,
  bf16,
  f16,
  levels,
  padded_levels,
  tiled_levels,
  split,
  unpacked
};
struct KvPaths {
  KvPath k, v;
};

// Whether a row of K lies in whole groups of 16 bytes, as many coordinates as a kernel takes at a
// time.
inline bool KeysAreWhole(const abi::KvCacheLayout& cache) {
  const uint32_t step = abi::kv_high_bits(cache.format) == 1 ? 128
                        : cache.format == abi::kTq8          ? attention_kernels().byte_step
                        : cache.format == abi::kTq4          ? attention_kernels().nibble_step
                                                             : 64;
  return cache.head_dim % step == 0;
}

inline KvPath PathOf(const abi::KvCacheLayout& cache, bool keys, bool split) {
  const AttentionKernels& kernels = attention_kernels();
  switch (static_cast<KvFormat>(cache.format)) {
    case KvFormat::f32:
      return KvPath::f32;
    case KvFormat::bf16:
      return split ? KvPath::split : KvPath::bf16;
    case KvFormat::f16:
      return split ? KvPath::split : KvPath::f16;
    default:
      break;
  }
  if (!abi::kv_is_native(cache.format)) return KvPath::unpacked;
  if (!keys) return kernels.accumulate_levels != nullptr ? KvPath::levels : KvPath::unpacked;
  if (kernels.score_levels == nullptr) return KvPath::unpacked;
  const bool odd = kernels.odd_keys && cache.head_dim * abi::kv_bits(cache.format) >= 16 * 8;
  return odd || KeysAreWhole(cache) ? KvPath::levels : KvPath::padded_levels;
}

// A latent is both: levels are unpacked once, for the scores and for the weighted sum.
inline KvPaths PathsOf(const abi::AttentionParams& p, bool split) {
  if (p.latent == 0) return {PathOf(p.k, true, split), PathOf(p.v, false, split)};
  const KvPath k = PathOf(p.k, true, split), v = PathOf(p.k, false, split);
  if (!abi::kv_is_native(p.k.format)) return {k, v};
  if (k == KvPath::unpacked || v == KvPath::unpacked) return {KvPath::unpacked, KvPath::unpacked};
  const bool packs = attention_kernels().pack_latent != nullptr;
  if (packs && p.k.head_dim % kPackedLatentDim == 0) return {KvPath::packed, KvPath::packed};
  return {KvPath::padded_levels, KvPath::tiled_levels};
}

class Decode {
 public:
  // Whether the machine multiplies what K and V are stored as: then prompts are faster here than in
  // f32, too.
  static bool takes_prompts(const abi::AttentionParams& p) {
    const auto [k, v] = PathsOf(p, splits());
    if (k == KvPath::packed) return true;
    return (k == KvPath::levels || k == KvPath::padded_levels || k == KvPath::split) &&
           (v == KvPath::levels || v == KvPath::tiled_levels || v == KvPath::split);
  }
  explicit Decode(WorkTile& work)
      : work_(work), rotary_(work), paths_(PathsOf(*work.params, work.prompt && splits())) {
    value_blocks_ = PaddedBlocks(work_.v_dim(), 8);
    prepare_queries();
    // Padding of keys meets zeros of the queries; memory checkers want it to have been written.
    if (paths_.k == KvPath::padded_levels)
      std::fill_n(work_.scratch->levels,
                  size_t{kBlockKeys} * LevelsStride(work_.k_dim(), queries_.row_levels), int8_t{0});
  }

  bool run() {
    std::fill_n(work_.scratch->acc, size_t{work_.rows} * work_.v_dim(), 0.0f);
    return work_.for_blocks([&](const KeyBlock& block) {
      fresh_ = true;
      for (first_ = 0; first_ < work_.rows; first_ += kTileRows) {
        rows_ = std::min(work_.rows - first_, kTileRows);
        if (!is_seen(block)) continue;
        score(block);
        if (work_.latent()) add_rotary(block);
        float rescale[kTileRows];
        const bool uniform = make_probabilities(block, rescale);
        accumulate(block, rescale, uniform);
        fresh_ = false;
      }
    });
  }

  void read_row(uint32_t row, float* values) const {
    std::copy_n(work_.scratch->acc + size_t{row} * work_.v_dim(), work_.v_dim(), values);
  }

 private:
  // Whether prompts over f16 and bf16 are split into bf16.
  static bool splits() { return attention_kernels().score_prompt != nullptr; }

  // Whether some of the rows sees a key of the block. Bounds grow with the row.
  bool is_seen(const KeyBlock& block) const {
    return work_.bounds[first_].begin < block.key + block.end &&
           work_.bounds[first_ + rows_ - 1].end > block.key + block.begin;
  }

  void prepare_queries() {
    const bool levels = paths_.k == KvPath::levels || paths_.k == KvPath::padded_levels ||
                        paths_.k == KvPath::packed;
    const AttentionKernels& kernels = attention_kernels();
    const uint32_t step = work_.rows <= kernels.dot_rows ? 16 : kernels.byte_step;
    queries_.blocks = PaddedBlocks(work_.k_dim(), levels ? step : 8);
    const uint32_t last = queries_.blocks.count - 1;
    queries_.row_levels = queries_.blocks.begin[last] + queries_.blocks.size[last];
    std::fill_n(queries_.scale, work_.rows, 1.0f);
    q_stride_ = work_.k_dim();
    if (levels) {
      RoundQueries(work_, kernels.query_layout, queries_);
      if (kernels.arrange_queries != nullptr)
        kernels.arrange_queries(work_.scratch->operand, work_.rows, queries_.row_levels);
      return;
    }
    if (paths_.k == KvPath::split)
      q_stride_ = attention_kernels().split_queries(work_.scratch->q, work_.rows, work_.k_dim(),
                                                    work_.k.layout->format);
    if (paths_.k == KvPath::bf16 && attention_kernels().split_bf16_queries) SplitQueries(work_);
  }

  // A block of the other operand, fetched in `steps` steps: two streams keep the bus busy.
  static Prefetch prefetch_block(const HeadView& cache, const TilePlace& at, uint32_t tiles,
                                 uint32_t steps) {
    const uint64_t stride = cache.layout->codes_tile_stride;
    if (stride > uint64_t{4096} * abi::kKvTile) return {};  // rows far apart, other data between
    return {cache.tile(at), static_cast<uint32_t>((tiles * stride + steps - 1) / steps)};
  }

  ScoreJob score_job(const KeyBlock& block) const {
    const HeadView& k = work_.k;
    ScoreJob job{};
    job.keys = k.tile(block.at);
    job.key_stride = k.slot_stride();
    job.scales = k.tile_scales(block.at);
    job.scales_stride = k.layout->scales_tile_stride;
    job.format = k.layout->format;
    job.head_dim = work_.k_dim();
    job.key_count = block.lanes();
    job.rows = rows_;
    job.tile_rows = work_.rows;
    job.blocks = &queries_.blocks;
    // Split queries have two numbers of 16 bits for a coordinate, rounded ones one.
    const size_t row_bytes = size_t{paths_.k == KvPath::bf16 ? 4u : 2u} * queries_.row_levels;
    job.q = work_.scratch->operand + first_ * row_bytes;
    job.q_sums = queries_.sums + first_ * abi::kKvMaxScales;
    job.q_f32 = work_.scratch->q + size_t{first_} * q_stride_;
    job.scores = work_.scratch->logits;
    job.scratch = work_.scratch->kv;
    job.fresh = fresh_;
    job.prefetch = prefetch_block(work_.v, block.at, block.tiles(), block.lanes());
    return job;
  }

  void add_rotary(const KeyBlock& block) {
    if (fresh_) rotary_.load(block);
    rotary_.add(block, first_, rows_, queries_.scale + first_, work_.scratch->logits);
  }
  // What a score is to be multiplied by; with a rotary part it was.
  float unit(uint32_t row) const { return work_.latent() ? 1.0f : queries_.scale[first_ + row]; }

  void score(const KeyBlock& block) const {
    ScoreJob job = score_job(block);
    if (paths_.k == KvPath::levels) {
      if (!KeysAreWhole(*work_.k.layout)) job.key_dim = job.head_dim;
      job.head_dim = queries_.row_levels;
      return attention_kernels().score_levels(job);
    }
    if (paths_.k == KvPath::packed) {
      if (fresh_)
        attention_kernels().pack_latent({job.keys, job.key_stride, job.format, job.head_dim,
                                         job.key_count, work_.scratch->values});
      job.scratch = work_.scratch->values;
      return attention_kernels().score_latent(job);
    }
    if (paths_.k == KvPath::padded_levels) {
      int8_t* const levels = work_.scratch->levels;
      job.keys = reinterpret_cast<const uint8_t*>(levels);
      job.head_dim = queries_.row_levels;
      job.key_stride = LevelsStride(work_.k_dim(), queries_.row_levels);
      if (fresh_)
        UnpackBlockLevels(work_.k, block, queries_.blocks, static_cast<uint32_t>(job.key_stride),
                          levels);
      job.format = abi::kTq8;
      return attention_kernels().score_levels(job);
    }
    if (paths_.k == KvPath::unpacked) {
      UnpackBlock(work_.k, block, work_.scratch->kv);
      job.keys = reinterpret_cast<const uint8_t*>(work_.scratch->kv);
      job.key_stride = work_.k_dim() * sizeof(float);
    }
    score_dense(block, job);
  }

  // Dense rows are read one by one, from the first key of the block to the last.
  void score_dense(const KeyBlock& block, ScoreJob& job) const {
    job.keys += block.begin * job.key_stride;
    job.scores += block.begin;
    job.key_count = block.end - block.begin;
    const AttentionKernels& kernels = attention_kernels();
    switch (paths_.k) {
      case KvPath::f16:
        return kernels.score_f16 != nullptr ? kernels.score_f16(job) : ScoreDense<Half>(job);
      case KvPath::bf16:
        return kernels.score_bf16 != nullptr ? kernels.score_bf16(job) : ScoreDense<BFloat16>(job);
      case KvPath::split:
        return kernels.score_prompt(job);
      default:
        return ScoreDense<float>(job);
    }
  }

  // Scores become base-2 logits, then probabilities. True if all rows see the same keys.
  bool make_probabilities(const KeyBlock& block, float* rescale) {
    const bool branches = work_.touches_tree(block);
    bool uniform = !branches;
    for (uint32_t r = 0; r < rows_; ++r) {
      float* const logits = work_.scratch->logits + size_t{r} * kBlockKeys;
      const Share seen = work_.seen(block, first_ + r);
      const bool whole = !branches && seen.begin == 0 && seen.end == block.lanes();
      uniform = uniform && seen.begin == block.begin && seen.end == block.end;
      float factor = work_.params->scale * kLog2E * unit(r);
      if (!work_.plain() || !(factor > 0)) {
        work_.make_logits(first_ + r, block.key, block.lanes(), unit(r), logits);
        factor = 1.0f;
      }
      if (!whole) fill_hidden(block, r, seen, kMinusInfinity);
      rescale[r] = FoldLogits(logits, block.lanes(), factor, work_.state[first_ + r]);
      if (!whole) fill_hidden(block, r, seen, 0.0f);
    }
    return uniform;
  }

  // Overwrites the lanes that the row does not see.
  void fill_hidden(const KeyBlock& block, uint32_t row, const Share& seen, float value) const {
    float* const lane = work_.scratch->logits + size_t{row} * kBlockKeys;
    std::fill(lane, lane + std::min<uint64_t>(seen.begin, block.lanes()), value);
    std::fill(lane + std::min<uint64_t>(seen.end, block.lanes()), lane + block.lanes(), value);
    if (!work_.touches_tree(block)) return;
    for (uint64_t i = seen.begin; i < seen.end; ++i) {
      if (work_.tree_hides(block, first_ + row, i)) lane[i] = value;
    }
  }

  AccumulateJob accumulate_job(const KeyBlock& block, const float* rescale) const {
    const HeadView& v = work_.v;
    AccumulateJob job{};
    job.values = v.tile(block.at);
    job.value_stride = paths_.v == KvPath::levels ? v.layout->codes_tile_stride : v.slot_stride();
    job.scales = v.tile_scales(block.at);
    job.scales_stride = v.layout->scales_tile_stride;
    job.format = v.layout->format;
    job.head_dim = work_.v_dim();
    job.begin = block.begin;
    job.end = block.end;
    job.offset = block.offset();
    job.tiles = block.tiles();
    job.rows = rows_;
    job.blocks = &value_blocks_;
    job.p = work_.scratch->logits;
    job.rescale = rescale;
    job.acc = work_.scratch->acc + size_t{first_} * work_.v_dim();
    job.scratch = work_.scratch->values;
    job.fresh = fresh_;
    job.prefetch = prefetch_block(work_.k, block.next, block.tiles(), job.head_dim / 8);
    return job;
  }

  void accumulate(const KeyBlock& block, const float* rescale, bool uniform) const {
    AccumulateJob job = accumulate_job(block, rescale);
    if (paths_.v == KvPath::levels) return attention_kernels().accumulate_levels(job);
    if (paths_.v == KvPath::packed) {
      job.values = work_.scratch->values + size_t{kBlockKeys} * job.head_dim;
      return attention_kernels().accumulate_latent(job);
    }
    if (paths_.v == KvPath::split) return attention_kernels().accumulate_prompt(job);
    if (paths_.v == KvPath::tiled_levels) {
      int8_t* const tiles = work_.scratch->value_tiles();
      if (fresh_)
        TileBlockLevels(work_.scratch->levels, LevelsStride(work_.k_dim(), queries_.row_levels),
                        block, queries_.blocks, tiles);
      job.values = reinterpret_cast<const uint8_t*>(tiles);
      job.value_stride = uint64_t{work_.v_dim()} * abi::kKvTile;
      job.format = abi::kTq8;
      return attention_kernels().accumulate_levels(job);
    }
    if (paths_.v == KvPath::unpacked) {
      UnpackBlock(work_.v, block, work_.scratch->kv);
      job.values = reinterpret_cast<const uint8_t*>(work_.scratch->kv);
      job.value_stride = work_.v_dim() * sizeof(float);
    }
    if (uniform) return accumulate_dense(job);
    accumulate_by_row(block, job);
  }

  void accumulate_dense(const AccumulateJob& job) const {
    const AttentionKernels& kernels = attention_kernels();
    switch (paths_.v) {
      case KvPath::f16:
        return kernels.accumulate_f16 != nullptr ? kernels.accumulate_f16(job)
                                                 : AccumulateDense<Half>(job);
      case KvPath::bf16:
        return kernels.accumulate_bf16 != nullptr ? kernels.accumulate_bf16(job)
                                                  : AccumulateDense<BFloat16>(job);
      default:
        return AccumulateDense<float>(job);
    }
  }

  // A value that a row does not see may be NaN, and 0 times NaN is NaN: each row takes its own runs
  // of keys.
  void accumulate_by_row(const KeyBlock& block, AccumulateJob job) const {
    const float* const p = job.p;
    const float* const rescale = job.rescale;
    float* const acc = job.acc;
    constexpr float kOne = 1.0f;
    job.rows = 1;
    for (uint32_t r = 0; r < rows_; ++r) {
      const Share seen = work_.seen(block, first_ + r);
      job.p = p + size_t{r} * kBlockKeys;
      job.acc = acc + size_t{r} * job.head_dim;
      job.rescale = rescale + r;
      for (uint64_t lane = seen.begin; lane < seen.end;) {
        uint64_t end = lane;
        while (end < seen.end && !work_.tree_hides(block, first_ + r, end)) ++end;
        job.begin = static_cast<uint32_t>(lane);
        job.end = static_cast<uint32_t>(end);
        if (lane < end) {
          accumulate_dense(job);
          job.rescale = &kOne;  // older blocks are rescaled once
        }
        lane = std::max(end, lane + 1);
      }
    }
  }

  WorkTile& work_;
  const RotaryScores rotary_;
  const KvPaths paths_;
  uint32_t first_ = 0, rows_ = 0;  // rows at work: what the kernels take at a time
  bool fresh_ = true;              // they are the block's first
  uint32_t q_stride_ = 0;          // floats from row to row of the queries
  QueryOperand queries_;
  ScaleBlocks value_blocks_;
};

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
