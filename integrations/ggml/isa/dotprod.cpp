// Scores of keys in ggml's blocks with Armv8.2's int8 dot product: four codes of a key times four
// coordinates of four queries, hi and lo. Nothing here may be instantiated elsewhere: the file is
// compiled with instructions other machines lack.
#include <arm_neon.h>

#include "isa/level_queries.h"

namespace gyre::ggml {
namespace {

constexpr size_t kRows = 4, kKeys = 4;  // rows of a group, cells that share a pass over them
using Block = QueryBlock<kRows>;

struct Codes {
  int8x16_t half[2];
};

// q8_0's levels, the others' codes.
template <RowType kType>
inline Codes load_codes(const uint8_t* block) {
  const uint8_t* const at = block + kCodes<kType>;
  if constexpr (kType == RowType::q8_0) {
    const auto* const levels = reinterpret_cast<const int8_t*>(at);
    return {{vld1q_s8(levels), vld1q_s8(levels + 16)}};
  } else {
    const uint8x16_t both = vld1q_u8(at);
    uint8x16_t codes[2] = {vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8(both, 4)};
    if constexpr (kHasFifthBit<kType>) {
      const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
      for (size_t i = 0; i < 2; ++i) {
        const uint8_t* const fifth = at - 4 + 2 * i;
        const uint8x16_t bytes = vcombine_u8(vdup_n_u8(fifth[0]), vdup_n_u8(fifth[1]));
        codes[i] = vorrq_u8(codes[i], vandq_u8(vtstq_u8(bytes, bit), vdupq_n_u8(16)));
      }
    }
    return {{vreinterpretq_s8_u8(codes[0]), vreinterpretq_s8_u8(codes[1])}};
  }
}

inline void widen(const uint16_t* halves, float* floats) {
  for (size_t i = 0; i < kBlockKeys; i += 4)
    vst1q_f32(floats + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves + i))));
}

// Four cells' dot products with the group, a row to a lane.
struct Sums {
  int32x4_t hi[kKeys], lo[kKeys];

  template <size_t kFour>
  void add_four(const Block& q, const Codes (&codes)[kKeys]) {
    const int8x16_t query_hi = vld1q_s8(q.codes[kFour][0]);
    const int8x16_t query_lo = vld1q_s8(q.codes[kFour][kRows]);
    for (size_t k = 0; k < kKeys; ++k) {
      const int8x16_t code = codes[k].half[kFour / 4];
      hi[k] = vdotq_laneq_s32(hi[k], query_hi, code, kFour % 4);
      lo[k] = vdotq_laneq_s32(lo[k], query_lo, code, kFour % 4);
    }
  }
  void add(const Block& q, const Codes (&codes)[kKeys]) {
    for (size_t k = 0; k < kKeys; ++k) {
      hi[k] = vld1q_s32(q.start);
      lo[k] = vld1q_s32(q.start + kRows);
    }
    add_four<0>(q, codes);
    add_four<1>(q, codes);
    add_four<2>(q, codes);
    add_four<3>(q, codes);
    add_four<4>(q, codes);
    add_four<5>(q, codes);
    add_four<6>(q, codes);
    add_four<7>(q, codes);
  }
  float32x4_t joined(size_t k) const {
    return vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(hi[k], 8), lo[k]));
  }
};

// Scores of four cells, a row to a lane, as rows.
inline void store_scores(const float32x4_t (&score)[kKeys], uint32_t rows, float* to) {
  const float32x4x2_t a = vtrnq_f32(score[0], score[1]), b = vtrnq_f32(score[2], score[3]);
  const float32x4_t of_row[kRows] = {
      vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0])),
      vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1])),
      vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0])),
      vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]))};
  for (size_t r = 0; r < rows; ++r) vst1q_f32(to + r * kBlockKeys, of_row[r]);
}

template <RowType kType>
bool score_type(const LevelScores& job) {
  using Factors = CellFactors<kType>;
  Factors factors;
  if (!factors.load(job, widen)) return false;
  const Block* const q = query_blocks<kRows>(job.q);
  for (size_t key = 0; key < job.count; key += kKeys) {
    const uint8_t* at[kKeys];
    float32x4_t score[kKeys];
    for (size_t k = 0; k < kKeys; ++k) {
      fetch_row(job, key + k);
      // A cell that is not there is replaced, not read.
      at[k] = job.keys + (key + k < job.count ? key + k : key) * job.stride;
      score[k] = vdupq_n_f32(0);
    }
    for (size_t block = 0; block < job.dim / kBlock; ++block) {
      Codes codes[kKeys];
      for (size_t k = 0; k < kKeys; ++k)
        codes[k] = load_codes<kType>(at[k] + block * row_format(kType).block_bytes);
      Sums sums;
      sums.add(q[block], codes);
      const float32x4_t factor = vld1q_f32(q[block].factor + kRows);
      for (size_t k = 0; k < kKeys; ++k) {
        const float32x4_t scale = vmulq_n_f32(factor, factors.scale[block][key + k]);
        score[k] = vfmaq_f32(score[k], sums.joined(k), scale);
        if constexpr (Factors::kHasMinimum)
          score[k] =
              vfmaq_n_f32(score[k], vld1q_f32(q[block].sum), factors.minimum[block][key + k]);
      }
    }
    store_scores(score, job.rows, job.logits + key);
  }
  return true;
}

bool score(const LevelScores& job) {
  return with_level_type(job.type,
                         [&](auto type) { return score_type<decltype(type)::value>(job); });
}

bool pack_queries(const float* q, uint32_t rows, uint64_t stride, uint32_t dim, RowType keys,
                  float* to) {
  return pack_query_group<kRows>(q, rows, stride, dim, level_bias(keys), to);
}

}  // namespace

LevelKernels dotprod_level_kernels() { return {"dotprod", kRows, pack_queries, score}; }

}  // namespace gyre::ggml
