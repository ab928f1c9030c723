// Decode attention's inner loops over f16 with Armv8.2's widening multiply-add. Nothing here may be
// instantiated elsewhere: the file is compiled with instructions other machines lack.
#include <arm_neon.h>

#include <cstddef>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/prefetch.h"

namespace gyre::cpu {
namespace {

// Dot products of one query with four keys, in f32: rows share the widening of a key, and a query
// rounded to f16 would show.
struct ScoreSums {
  float32x4_t key[4];
  void clear() { key[0] = key[1] = key[2] = key[3] = vdupq_n_f32(0); }
  void add(float32x4_t query, const float32x4_t (&wide)[4]) {
    key[0] = vfmaq_f32(key[0], query, wide[0]);
    key[1] = vfmaq_f32(key[1], query, wide[1]);
    key[2] = vfmaq_f32(key[2], query, wide[2]);
    key[3] = vfmaq_f32(key[3], query, wide[3]);
  }
  float32x4_t of_keys() const {
    return vpaddq_f32(vpaddq_f32(key[0], key[1]), vpaddq_f32(key[2], key[3]));
  }
};

template <size_t kRows>
void score_f16_rows(const ScoreJob& job, size_t row, size_t key, size_t keys) {
  const float* q = job.q_f32 + row * job.head_dim;
  const float16_t* k[4];
  for (size_t i = 0; i < 4; ++i) {
    const size_t at = key + (i < keys ? i : 0);  // a key that is not there is replaced, not read
    k[i] = reinterpret_cast<const float16_t*>(job.keys + at * job.key_stride);
  }
  // One row alone sums lower and upper halves of vectors apart: more sums hide the add's latency.
  constexpr size_t kSums = kRows == 1 ? 2 : kRows;
  ScoreSums sums[kSums];
#pragma GCC unroll 4
  for (size_t r = 0; r < kSums; ++r) sums[r].clear();
  for (size_t c = 0; c < job.head_dim; c += 8, q += 8) {
    const float16x8_t k0 = vld1q_f16(k[0] + c), k1 = vld1q_f16(k[1] + c), k2 = vld1q_f16(k[2] + c),
                      k3 = vld1q_f16(k[3] + c);
    const float32x4_t low[4] = {vcvt_f32_f16(vget_low_f16(k0)), vcvt_f32_f16(vget_low_f16(k1)),
                                vcvt_f32_f16(vget_low_f16(k2)), vcvt_f32_f16(vget_low_f16(k3))};
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) sums[r].add(vld1q_f32(q + r * job.head_dim), low);
    const float32x4_t high[4] = {vcvt_high_f32_f16(k0), vcvt_high_f32_f16(k1),
                                 vcvt_high_f32_f16(k2), vcvt_high_f32_f16(k3)};
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r)
      sums[kRows == 1 ? 1 : r].add(vld1q_f32(q + r * job.head_dim + 4), high);
  }
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; ++r) {
    float32x4_t scores = sums[r].of_keys();
    if constexpr (kRows == 1) scores = vaddq_f32(scores, sums[1].of_keys());
    float lanes[4];
    vst1q_f32(lanes, scores);
    for (size_t i = 0; i < keys; ++i) job.scores[(row + r) * kBlockKeys + key + i] = lanes[i];
  }
}

void score_f16(const ScoreJob& job) {
  const size_t keys = job.key_count;
  for (size_t key = 0; key < keys; key += 4) {
    prefetch_steps(job.prefetch, key, key + 4);
    const size_t count = keys - key < 4 ? keys - key : 4;
    size_t row = 0;
    for (; row + 4 <= job.rows; row += 4) score_f16_rows<4>(job, row, key, count);
    for (; row + 2 <= job.rows; row += 2) score_f16_rows<2>(job, row, key, count);
    if (row < job.rows) score_f16_rows<1>(job, row, key, count);
  }
}

// sum += the lower or the upper half of v times one lane of p. Not with the intrinsics
// vfmlalq_laneq_*_f16: the instruction names the lane's register in four bits, clang 14 chooses
// among all 32 and cuts the number, v24 to v8 (LLVM issue 64104). "x" is the first 16.
template <int kLane>
inline float32x4_t add_low(float32x4_t sum, float16x8_t v, float16x8_t p) {
  asm("fmlal %0.4s, %1.4h, %2.h[%c3]" : "+w"(sum) : "w"(v), "x"(p), "i"(kLane));
  return sum;
}
template <int kLane>
inline float32x4_t add_high(float32x4_t sum, float16x8_t v, float16x8_t p) {
  asm("fmlal2 %0.4s, %1.4h, %2.h[%c3]" : "+w"(sum) : "w"(v), "x"(p), "i"(kLane));
  return sum;
}

// Adds one value times its probability to each row.
template <int kLane, size_t kRows, size_t kVectors>
inline void add_value(const uint8_t* value, const float16x8_t (&p)[kRows],
                      float32x4_t (&acc)[kRows][2 * kVectors]) {
  for (size_t i = 0; i < kVectors; ++i) {
    const float16x8_t v = vld1q_f16(reinterpret_cast<const float16_t*>(value) + 8 * i);
    for (size_t r = 0; r < kRows; ++r) {
      acc[r][2 * i] = add_low<kLane>(acc[r][2 * i], v, p[r]);
      acc[r][2 * i + 1] = add_high<kLane>(acc[r][2 * i + 1], v, p[r]);
    }
  }
}

// Probabilities of a block in f16, relative to the largest of each row.
struct F16Probabilities {
  alignas(16) float16_t p[kTileRows][kBlockKeys];
  float largest[kTileRows];
  bool needs_f32[kTileRows];  // the smallest would be lost in f16's range

  explicit F16Probabilities(const AccumulateJob& job) {
    for (size_t r = 0; r < job.rows; ++r) fill(job, r);
  }
  void fill(const AccumulateJob& job, size_t r) {
    const float* const from = job.p + r * kBlockKeys;
    const size_t first = size_t{job.begin} / 4 * 4;
    float32x4_t max = vdupq_n_f32(0), min = vdupq_n_f32(1);
    for (size_t i = first; i < job.end; i += 4) {
      const float32x4_t x = vld1q_f32(from + i);
      max = vmaxq_f32(max, x);
      min = vminq_f32(min, vbslq_f32(vceqzq_f32(x), vdupq_n_f32(1), x));  // 0: not seen
    }
    largest[r] = vmaxvq_f32(max);
    needs_f32[r] = !(vminvq_f32(min) >= 0x1p-14f * largest[r]) || !(largest[r] > 0x1p-100f);
    if (needs_f32[r]) return;
    const float inverse = 1.0f / largest[r];
    for (size_t i = first; i < job.end; i += 4)
      vst1_f16(p[r] + i, vcvt_f16_f32(vmulq_n_f32(vld1q_f32(from + i), inverse)));
  }
};

template <size_t kRows, size_t kVectors>
inline void accumulate_f16_chunk(const AccumulateJob& job, const F16Probabilities& half, size_t row,
                                 size_t c) {
  float32x4_t acc[kRows][2 * kVectors];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < 2 * kVectors; ++i) acc[r][i] = vdupq_n_f32(0);
  }
  const uint64_t stride = job.value_stride;
  const uint8_t* value = job.values + job.begin * stride + c * sizeof(float16_t);
  size_t key = job.begin;
  const auto one = [&] {
    float16x8_t weights[kRows];
    for (size_t r = 0; r < kRows; ++r) weights[r] = vdupq_n_f16(half.p[row + r][key]);
    add_value<0, kRows, kVectors>(value, weights, acc);
    ++key, value += stride;
  };
  while (key < job.end && key % 8 != 0) one();
  for (; key + 8 <= job.end; key += 8, value += 8 * stride) {
    float16x8_t weights[kRows];
    for (size_t r = 0; r < kRows; ++r) weights[r] = vld1q_f16(half.p[row + r] + key);
    add_value<0, kRows, kVectors>(value, weights, acc);
    add_value<1, kRows, kVectors>(value + stride, weights, acc);
    add_value<2, kRows, kVectors>(value + 2 * stride, weights, acc);
    add_value<3, kRows, kVectors>(value + 3 * stride, weights, acc);
    add_value<4, kRows, kVectors>(value + 4 * stride, weights, acc);
    add_value<5, kRows, kVectors>(value + 5 * stride, weights, acc);
    add_value<6, kRows, kVectors>(value + 6 * stride, weights, acc);
    add_value<7, kRows, kVectors>(value + 7 * stride, weights, acc);
  }
  while (key < job.end) one();
  // The block is summed up before it is added: single keys would vanish beside a large sum.
  float* const place = job.acc + row * job.head_dim + c;
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < 2 * kVectors; ++i) {
      float* const at = place + r * job.head_dim + 4 * i;
      const float32x4_t old = vmulq_n_f32(vld1q_f32(at), job.rescale[row + r]);
      vst1q_f32(at, vfmaq_n_f32(old, acc[r][i], half.largest[row + r]));
    }
  }
}

template <size_t kRows>
void accumulate_f16_rows(const AccumulateJob& job, const F16Probabilities& half, size_t row) {
  constexpr size_t kVectors = kRows == 1 ? 8 : 2;  // enough sums to hide the latency of the add
  size_t c = 0;
  for (; c + 8 * kVectors <= job.head_dim; c += 8 * kVectors) {
    if (row == 0) prefetch_steps(job.prefetch, c / 8, c / 8 + kVectors);
    accumulate_f16_chunk<kRows, kVectors>(job, half, row, c);
  }
  for (; c < job.head_dim; c += 8) accumulate_f16_chunk<kRows, 1>(job, half, row, c);
}

// A row whose probabilities f16 cannot hold, in f32.
void accumulate_in_f32(const AccumulateJob& job, size_t row) {
  const float* const p = job.p + row * kBlockKeys;
  float* const place = job.acc + row * job.head_dim;
  for (size_t c = 0; c < job.head_dim; c += 8) {
    float32x4_t low = vdupq_n_f32(0), high = vdupq_n_f32(0);
    for (size_t key = job.begin; key < job.end; ++key) {
      const auto* const values =
          reinterpret_cast<const float16_t*>(job.values + key * job.value_stride);
      const float16x8_t v = vld1q_f16(values + c);
      low = vfmaq_n_f32(low, vcvt_f32_f16(vget_low_f16(v)), p[key]);
      high = vfmaq_n_f32(high, vcvt_high_f32_f16(v), p[key]);
    }
    vst1q_f32(place + c, vaddq_f32(vmulq_n_f32(vld1q_f32(place + c), job.rescale[row]), low));
    vst1q_f32(place + c + 4,
              vaddq_f32(vmulq_n_f32(vld1q_f32(place + c + 4), job.rescale[row]), high));
  }
}

void accumulate_f16(const AccumulateJob& job) {
  const F16Probabilities half(job);
  for (size_t row = 0; row < job.rows;) {
    size_t together = 0;  // rows that f16 can hold
    while (together < 4 && row + together < job.rows && !half.needs_f32[row + together]) ++together;
    if (together == 0) accumulate_in_f32(job, row++);
    if (together == 4) accumulate_f16_rows<4>(job, half, row), row += 4;
    if (together == 2 || together == 3) accumulate_f16_rows<2>(job, half, row), row += 2;
    if (together == 1) accumulate_f16_rows<1>(job, half, row), row += 1;
  }
}

}  // namespace

void add_f16_attention_kernels(AttentionKernels& kernels) {
  kernels.score_f16 = score_f16;
  kernels.accumulate_f16 = accumulate_f16;
  kernels.f16_arithmetic = "f16";
}

}  // namespace gyre::cpu
