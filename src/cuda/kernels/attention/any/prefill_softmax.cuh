#pragma once
// Prefill attention: scores to weights, one warp per row. A weight over levels of V is probability
// times scale; all weights are f16 below 2^15 and a factor, bf16 with hi and lo parts over bf16.
#include "cuda/kernels/attention/any/prefill_problem.cuh"
#include "cuda/kernels/attention/common/unpack.cuh"
#include "cuda/kernels/convert.cuh"

namespace gyre::cuda {

constexpr uint32_t kRowKeys = kMaxStageKeys / kWarp;  // of a row, for a lane: every 32nd
constexpr int32_t kWeightExponent = 14;  // weights are scaled to end below 2^15, for f16's range

// Weights are stored in the order in which the MMA over V takes the keys.
template <uint32_t kV>
inline uint32_t weight_place(uint32_t key) {
  if constexpr (!abi::kv_is_native(kV)) return key;
  return key / 8 * 8 + value_place<kV>(key % 8);
}

// A row's logit in base 2.
inline float logit_of(const PrefillProblem& problem, uint32_t row, float score, uint64_t at) {
  const Rows& rows = problem.state();
  const abi::AttentionParams& p = problem.params;
  float x = score * rows.factor[row][0] * rows.factor[row][1] * p.scale;
  if (p.soft_cap > 0) x = soft_cap(x, p.soft_cap);
  if (rows.slope[row] != 0)
    x += rows.slope[row] * static_cast<float>(problem.key_of(at) - rows.position[row]);
  return x * kLog2E;
}

inline bool sees(const PrefillProblem& problem, uint32_t row, int64_t key,
                 const uint8_t* tree_mask) {
  if (key < problem.state().begin[row] || key >= problem.state().end[row]) return false;
  return tree_mask == nullptr ||
         !abi::tree_hides(tree_mask + problem.token(row) * problem.params.tree_stride, problem.mask,
                          key);
}

// Weights of one row for one scale block (V in levels), or for all coordinates: probability times
// scale, as f16 below 2^15 and a factor.
template <uint32_t kV>
inline void store_weights(const PrefillProblem& problem, uint32_t row, const float (&w)[kRowKeys],
                          uint32_t plane, int32_t bias) {
  const uint32_t lane = threadIdx.x % kWarp;
  int32_t up = kWeightExponent;
  if constexpr (abi::kv_is_native(kV)) {
    float largest = 0;
#pragma unroll
    for (uint32_t i = 0; i < kRowKeys; ++i) largest = fmaxf(largest, is_finite(w[i]) ? w[i] : 0.0f);
    largest = warp_max(largest);
    up = kWeightExponent - (largest == 0 ? 0 : exponent_of(largest));
  }
  auto* const to = reinterpret_cast<Half*>(problem.shared() + problem.layout.weights +
                                           plane * problem.layout.weights_plane +
                                           row * problem.layout.weights_pitch);
#pragma unroll
  for (uint32_t i = 0; i < kRowKeys; ++i) {
    const uint32_t key = lane + i * kWarp;
    if (key < problem.layout.stage_keys)
      to[weight_place<kV>(key)] = from_float<Half>(times_power(w[i], up));
  }
  const int32_t down = bias - up;
  if (lane == 0)
    problem.factors()[plane * problem.layout.rows + row] =
        make_float2(power_of_two(down >> 1), power_of_two(down - (down >> 1)));
}

template <uint32_t kV>
inline void make_weights(const PrefillProblem& problem, uint32_t row, const float (&prob)[kRowKeys],
                         const unsigned char* stage) {
  const uint32_t lane = threadIdx.x % kWarp;
  if constexpr (abi::kv_is_native(kV)) {
#pragma unroll 1
    for (uint32_t b = 0; b < problem.layout.v_blocks; ++b) {
      float w[kRowKeys];
#pragma unroll
      for (uint32_t i = 0; i < kRowKeys; ++i) {
        const uint32_t key = lane + i * kWarp;
        // The scale of a slot that is not seen may be NaN, or never written.
        w[i] = prob[i] == 0 || key >= problem.layout.stage_keys
                   ? 0.0f
                   : prob[i] * raw_scale(stage + problem.layout.v_scales +
                                             key / 8 * problem.layout.v_blocks * 16,
                                         b, key % 8);
      }
      store_weights<kV>(problem, row, w, b, kScaleBias);
    }
  } else if constexpr (kV == kFormatF16) {
    store_weights<kV>(problem, row, prob, 0, 0);
  } else if constexpr (kV == kFormatBf16) {
    auto* const to = reinterpret_cast<BFloat16*>(problem.shared() + problem.layout.weights +
                                                 row * problem.layout.weights_pitch);
#pragma unroll
    for (uint32_t i = 0; i < kRowKeys; ++i) {
      const uint32_t key = lane + i * kWarp;
      if (key >= problem.layout.stage_keys) continue;
      to[key] = from_float<BFloat16>(prob[i]);
      to[problem.layout.weights_plane / 2 + key] =
          from_float<BFloat16>(prob[i] - to_float(to[key]));
    }
    if (lane == 0) problem.factors()[row] = make_float2(1.0f, 1.0f);
  } else if (lane == 0) {
    problem.factors()[row] = make_float2(1.0f, 1.0f);
  }
}

// Rows that only fill the MMA keep the weight 0.
inline void clear_weights(const PrefillProblem& problem) {
  auto* const words = reinterpret_cast<uint32_t*>(problem.shared() + problem.layout.weights);
  for (uint32_t i = threadIdx.x; i < (problem.layout.stage - problem.layout.weights) / 4;
       i += blockDim.x)
    words[i] = 0;
}

// Which of a lane's keys a row sees, a bit each; missing: one is there and not seen.
inline uint32_t seen_keys(const PrefillProblem& problem, uint32_t stage, uint32_t row,
                          const uint8_t* tree_mask, bool& missing) {
  const uint64_t begin = uint64_t{stage} * problem.layout.stage_keys;
  missing = false;
  if (problem.walk.whole(begin) && tree_mask == nullptr) {
    const int64_t key = problem.key_of(begin);
    if (key >= problem.state().begin[row] &&
        key + problem.layout.stage_keys <= problem.state().end[row])
      return (1u << (problem.layout.stage_keys + kWarp - 1) / kWarp) - 1;
  }
  uint32_t seen = 0;
#pragma unroll 1
  for (uint32_t i = 0; i * kWarp < problem.layout.stage_keys; ++i) {
    const uint32_t at = threadIdx.x % kWarp + i * kWarp;
    if (at >= problem.layout.stage_keys || !problem.holds_key(begin + at)) continue;
    if (sees(problem, row, problem.key_of(begin + at), tree_mask)) {
      seen |= 1u << i;
    } else {
      missing = true;
    }
  }
  return seen;
}

// A warp merges the stage into one row's state; the scores become probabilities.
template <uint32_t kV>
inline void merge_stage(const PrefillProblem& problem, uint32_t stage, uint32_t row,
                        const uint8_t* tree_mask) {
  const uint32_t lane = threadIdx.x % kWarp;
  Rows& rows = problem.state();
  float* const scores = problem.logits() + row * problem.layout.logits_pitch;
  bool missing = false;
  const uint32_t seen = seen_keys(problem, stage, row, tree_mask, missing);
  float x[kRowKeys], largest = minus_infinity();
#pragma unroll
  for (uint32_t i = 0; i < kRowKeys; ++i) {
    const uint32_t at = lane + i * kWarp;
    x[i] = minus_infinity();
    if (at >= problem.layout.stage_keys || (seen >> i & 1) == 0) continue;
    float score = scores[at];
    for (uint32_t part = 1; part < problem.layout.warps_per_key; ++part)
      score += scores[part * problem.layout.rows * problem.layout.logits_pitch + at];
    x[i] = logit_of(problem, row, score, uint64_t{stage} * problem.layout.stage_keys + at);
    largest = fmaxf(largest, x[i]);
  }
  SoftmaxState state = rows.state[row];
  const float reference = SoftmaxState::reference(fmaxf(state.max, warp_max(largest)));
  float prob[kRowKeys], added = 0;
#pragma unroll
  for (uint32_t i = 0; i < kRowKeys; ++i) {
    prob[i] = exp2_fast(x[i] - reference);
    added += prob[i];
    if (lane + i * kWarp < problem.layout.stage_keys) scores[lane + i * kWarp] = prob[i];
  }
  const float rescale = state.merge<kWarp>({largest, added}, reference).rescale;
  missing = __any_sync(kAll, missing) != 0;
  make_weights<kV>(problem, row, prob, problem.stage(stage));
  __syncwarp();
  if (lane != 0) return;
  rows.state[row] = state;
  rows.rescale[row] = rescale;
  if (missing) atomicOr(&rows.hidden, 1u);  // several warps may set it
}

}  // namespace gyre::cuda
