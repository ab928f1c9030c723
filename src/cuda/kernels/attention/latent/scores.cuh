#pragma once
// Latent attention: the warpgroup of scores. It multiplies 64 rows with a stage of keys and hands
// the weights to the warpgroups of values.
#include "cuda/kernels/attention/common/row_products.cuh"
#include "cuda/kernels/attention/common/softmax.cuh"
#include "cuda/kernels/attention/latent/traits.cuh"
#include "cuda/kernels/block_shared.cuh"
#include "cuda/kernels/float16_instructions.cuh"

namespace gyre::cuda {

// Weights end below 2 to the first, and may end above it by 2 to the second. Small ones would be
// subnormal in f16; large ones, times values of bf16, would leave the range of f32.
template <class T>
constexpr float kLatentWeightExponent = T::kBf16K ? -40.0f : 8.0f;
template <class T>
constexpr float kLatentWeightLag = T::kBf16K ? 20.0f : 7.0f;

template <class T>
class LatentScores {
 public:
  LatentScores(const abi::AttentionParams& p, const Args& args, const LatentScratch& scratch)
      : p_(p), args_(args), scratch_(scratch), state_(latent_state<T>()) {}

  void run(const LatentWork& work, uint32_t item) {
    copy_queries(work);
    const LatentWalk walk = LatentWalk::of<T::kKeys>(p_, work);
    start(work, walk);
    copy_wait<0>();
    fence_operands();
    sync();
    const uint32_t stages = walk.template stages<T::kKeys>();
#pragma unroll 1
    for (uint32_t stage = 0; stage < stages; ++stage, ++count_.n) {
      const uint32_t slot = count_.slot();
      float s[T::kKeyTiles][4];
      wait_for_phase(&state_.full[slot], count_.phase());
      if constexpr (T::kCopied) fence_operands();
      begin_scores<T>(dynamic_shared() + T::kLayout.q, latent_slot<T>(slot), s);
      wait_for_product(s);
      float rescale[2];
      softmax_weights(slot, s, rescale);
      hand_over(s, rescale);
    }
    finish(work, item);
  }

 private:
  struct Row {
    float factor, max, reference, sum;
    int32_t begin;   // the first key that it sees
    uint32_t count;  // and how many, counted from the walk's first
    int32_t position;
    float slope;
  };

  static uint32_t row_of(uint32_t i) {
    return threadIdx.x / kWarp % 4 * 16 + threadIdx.x % kWarp / 4 + 8 * i;
  }
  static void sync() { sync_named_barrier<kLatentGroup / kWarp>(1); }
  uint64_t row_of_q(const LatentWork& work, uint32_t r) const {
    return uint64_t{work.first_token} * p_.heads + work.first_row + r;
  }

  // Rows that a work item does not have keep what was there: nobody reads their products.
  void copy_queries(const LatentWork& work) {
    constexpr uint32_t kChunks = T::kKDim / 8;
    const uint64_t from = args_.at[arg_partial] + scratch_.q + row_of_q(work, 0) * T::kKDim * 2;
    unsigned char* const to = dynamic_shared() + T::kLayout.q;
    sync();  // the last products have read them
    for (uint32_t i = threadIdx.x; i < work.rows() * kChunks; i += kLatentGroup)
      copy_async<16>(
          shared_address(to + operand_byte(T::kLayout.q_panel, i / kChunks, i % kChunks)),
          pointer<const void>(from + uint64_t{i} * 16), true);
    copy_commit();
  }

  void start(const LatentWork& work, const LatentWalk& walk) {
    const abi::RowMask<int64_t> mask = latent_mask(p_, work);
    const auto heads = static_cast<uint32_t>(p_.heads);
    soft_ = p_.soft_cap > 0 || args_.at[arg_alibi_slopes] != 0;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const bool real = row_of(i) < work.rows();
      const uint32_t row = work.first_row + (real ? row_of(i) : 0), token = row / heads;
      const abi::RowBounds<int64_t> b = abi::row_bounds<int64_t>(mask, token, work.begin, work.end);
      Row& r = rows_[i];
      r.factor = !real ? 1.0f
                       : __uint_as_float(load_bits(args_.at[arg_partial] + scratch_.factors +
                                                       row_of_q(work, row - work.first_row) * 4,
                                                   0, true));
      r.max = r.reference = minus_infinity();
      r.sum = 0;
      r.begin = static_cast<int32_t>(b.begin) - walk.first_key;
      r.count = real ? static_cast<uint32_t>(b.end - b.begin) : 0;
      r.position = static_cast<int32_t>(abi::row_position<int64_t>(mask, token)) - walk.first_key;
      r.slope =
          !real || args_.at[arg_alibi_slopes] == 0
              ? 0.0f
              : __uint_as_float(load_bits(args_.at[arg_alibi_slopes], row - token * heads, true)) *
                    kLog2E;
    }
    unit_exponent_ = 0;
  }

  // Scores become weights relative to a reference, times the keys' units; `rescale` is the factor
  // of what was there.
  void softmax_weights(uint32_t slot, float (&s)[T::kKeyTiles][4], float (&rescale)[2]) {
    const uint32_t j = threadIdx.x % 4;
    const auto* const numbers = reinterpret_cast<const int2*>(state_.numbers[slot]) + j;
    const auto* const units = reinterpret_cast<const float2*>(state_.units[slot]) + j;
    const bool has_units = (state_.has_units[slot][0] | state_.has_units[slot][T::kKeys / 64]) != 0;
    if (__builtin_expect(has_units, 0)) {
      float unit_exponent = unit_exponent_;
#pragma unroll
      for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
        const float2 unit = units[t * 4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) s[t][i] *= i % 2 == 0 ? unit.x : unit.y;
        if (is_finite(unit.x))
          unit_exponent = fmaxf(unit_exponent, static_cast<float>(exponent_of(unit.x)));
        if (is_finite(unit.y))
          unit_exponent = fmaxf(unit_exponent, static_cast<float>(exponent_of(unit.y)));
      }
      unit_exponent_ = warp_max<4>(unit_exponent);
    }
    if (__builtin_expect(soft_, 0)) cap(numbers, s);
#pragma unroll
    for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
      const int2 number = numbers[t * 4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const auto from =
            static_cast<uint32_t>((i % 2 == 0 ? number.x : number.y) - rows_[i / 2].begin);
        // Slots without a key have the number -1.
        if (from >= rows_[i / 2].count) s[t][i] = minus_infinity();
      }
    }
    float factor[2], reference[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      Row& r = rows_[i];
      float max = r.max;
#pragma unroll
      for (uint32_t t = 0; t < T::kKeyTiles; ++t)
        max = fmaxf(max, fmaxf(s[t][2 * i], s[t][2 * i + 1]));
      r.max = warp_max<4>(max);
      factor[i] = soft_ ? 1.0f : r.factor;
      float next = r.max == minus_infinity()
                       ? minus_infinity()
                       : r.max * factor[i] - kLatentWeightExponent<T> + unit_exponent_;
      // Sums are seldom rescaled: a reference stays while weights are in range.
      if (next - r.reference <= kLatentWeightLag<T>) next = r.reference;
      reference[i] = SoftmaxState::reference(next);
      rescale[i] = exp2_fast(r.reference - reference[i]);
      r.reference = next;
      r.sum *= rescale[i];
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      float sum = 0;
#pragma unroll
      for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
        s[t][i] = exp2_fast(fmaf(s[t][i], factor[i / 2], -reference[i / 2]));
        sum += s[t][i];
      }
      rows_[i / 2].sum += sum;
    }
    if (__builtin_expect(has_units, 0)) {
#pragma unroll
      for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
        const float2 unit = units[t * 4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i)
          s[t][i] = s[t][i] == 0 ? 0.0f : s[t][i] * (i % 2 == 0 ? unit.x : unit.y);
      }
    }
  }

  // A soft cap and slopes: scores become logits in base 2.
  void cap(const int2* numbers, float (&s)[T::kKeyTiles][4]) const {
    const float limit = p_.soft_cap, inverse = 1.0f / limit;
#pragma unroll
    for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
      const int2 number = numbers[t * 4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const Row& r = rows_[i / 2];
        const int32_t key = i % 2 == 0 ? number.x : number.y;
        s[t][i] = soft_logit(s[t][i] * r.factor, limit, inverse, r.slope, key - r.position);
      }
    }
  }

  // Weights as A fragments: the thread with the same number in a warpgroup of values reads them.
  void hand_over(float (&s)[T::kKeyTiles][4], const float (&rescale)[2]) {
    auto* const to = reinterpret_cast<uint4*>(dynamic_shared() + T::kLayout.weights);
#pragma unroll
    for (uint32_t part = 0; part < T::kWeightParts; ++part) {
      wait_for_phase(&state_.weights_empty, handed_++ % 2 ^ 1);
#pragma unroll
      for (uint32_t step = 0; step < T::kKeys / 16; ++step) {
        float(&a)[4] = s[2 * step], (&b)[4] = s[2 * step + 1];
        to[step * kLatentGroup + threadIdx.x] =
            make_uint4(hand_pair(a[0], a[1]), hand_pair(a[2], a[3]), hand_pair(b[0], b[1]),
                       hand_pair(b[2], b[3]));
      }
      if (part == 0 && threadIdx.x % 4 == 0) {
        state_.rescale[row_of(0)] = rescale[0];
        state_.rescale[row_of(1)] = rescale[1];
      }
      arrive_warp(&state_.weights_full);
    }
  }
  // Two weights as they are multiplied; what bf16 leaves of them stays.
  static uint32_t hand_pair(float& a, float& b) {
    const uint32_t two = pack_16(a, b, T::kBf16K);
    if constexpr (T::kWeightParts == 2) {
      a -= __uint_as_float(two << 16);
      b -= __uint_as_float(two & 0xFFFF0000u);
    }
    return two;
  }

  // {reference, sum, largest logit} behind the values of the row's state, in base 2.
  void finish(const LatentWork& work, uint32_t item) {
    const bool invalid = state_.invalid[item % 2] != 0;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const float sum = warp_sum<4>(rows_[i].sum);
      if (threadIdx.x % 4 != 0 || row_of(i) >= work.rows()) continue;
      float* const to =
          latent_row_state(p_, args_, scratch_, row_of_q(work, row_of(i)), work.split()) +
          T::kLatentDim;
      to[0] = rows_[i].reference;
      to[1] = invalid ? __uint_as_float(0x7FC00000u) : sum;
      to[2] = rows_[i].max == minus_infinity() ? minus_infinity()
                                               : rows_[i].max * (soft_ ? 1.0f : rows_[i].factor);
    }
    arrive_warp(&state_.done[item % 2]);
  }

  const abi::AttentionParams& p_;
  const Args& args_;
  const LatentScratch& scratch_;
  LatentState& state_;
  StageCount count_;
  uint32_t handed_ = 0;  // parts of weights
  Row rows_[2];
  float unit_exponent_ = 0;  // the exponent of the largest unit so far, at least 0
  bool soft_ = false;
};

}  // namespace gyre::cuda
