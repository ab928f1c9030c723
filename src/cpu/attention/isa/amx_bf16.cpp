// A prompt's inner loops over f16 and bf16 with AMX's bf16 MMA. Nothing here may be instantiated
// elsewhere: the file is compiled with instructions other machines lack.
//
// A query in f32 is split into two bf16, hi, the nearest, and lo, the nearest to the rest; f16 is
// hi plus lo exactly, bf16 is hi alone. Of a product of two splits lo times lo is left out, 2^-16
// of it at most: three MMA over f16, two over bf16. An absolute error in a logit is a relative one
// in a probability, so that one would not do. Probabilities are the nearest bf16: a relative error
// of 2^-8 each at most, whatever the others are; over values of f16 two MMA, over bf16 one.
//
// The instruction flushes subnormal numbers: what is below 1e-38 is lost. What is not finite:
// scores that are not are computed again from hi alone, as a lo beside an infinity is NaN, or 0, or
// of the other sign. Values become 0 in the operand, and are added to the rows that see them.
#include <cstddef>

#include "cpu/attention/isa/amx_pack.h"
#include "cpu/attention/isa/amx_softmax.h"
#include "cpu/attention/isa/kernels.h"
#include "gyre/format.h"

namespace gyre::cpu {
namespace {

constexpr uint32_t kF16 = static_cast<uint32_t>(KvFormat::f16);

// Rounding must not make an infinity of a large number, nor a number of a NaN: the first is cut,
// the second replaced.
inline __m512 fit(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x),
                upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
  const __mmask16 large =
      _mm512_cmp_epi32_mask(size, _mm512_set1_epi32(0x7F7F0000), _MM_CMPINT_NLE);
  const __mmask16 nan = _mm512_cmp_epi32_mask(size, _mm512_set1_epi32(0x7F800000), _MM_CMPINT_NLE);
  const __m512i cut = _mm512_mask_and_epi32(bits, large, bits, upper);
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(cut, nan, _mm512_set1_epi32(0x7FC00000)));
}

// Splits 32 coordinates of a query, in the pairs that keys have: f16 is widened, and pairs up
// coordinates 16 apart; bf16 is as it is stored, neighbours beside each other.
inline Split split_query(const float* q, bool half) {
  const __m512 a = fit(_mm512_load_ps(q)), b = fit(_mm512_load_ps(q + 16));
  if (half) return split_nearest(a, b);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return split_nearest(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
}

// Queries become A operands in their own place: of a row all hi, then all lo, each padded with
// zeros to whole tiles. From the last row on: rows get longer.
uint32_t split_queries(float* q, uint32_t rows, uint32_t head_dim, uint32_t format) {
  const size_t padded = round_up(head_dim, kDepth);
  alignas(64) float row[abi::kKvMaxHeadDim] = {};
  for (size_t r = rows; r-- > 0;) {
    for (size_t c = 0; c < head_dim; ++c) row[c] = q[r * head_dim + c];
    float* const to = q + r * padded;
    for (size_t c = 0; c < padded; c += kDepth) {
      const Split parts = split_query(row + c, format == kF16);
      _mm512_storeu_si512(to + c / 2, parts.hi);
      _mm512_storeu_si512(to + (padded + c) / 2, parts.lo);
    }
  }
  return static_cast<uint32_t>(padded);
}

void pack_prompt_keys(const PromptBlock& block, PromptOperand& k) {
  if (k.format == kF16) {
    pack_keys<true>(block, k.head_dim, k.packed);
  } else {
    pack_keys<false>(block, k.head_dim, k.packed);
  }
  stores_are_done();
}

void pack_prompt_values(const PromptBlock& block, PromptOperand& v) {
  v.finite = v.format == kF16 ? pack_values<true>(block, v.lanes, v.head_dim, v.packed)
                              : pack_values<false>(block, v.lanes, v.head_dim, v.packed);
  stores_are_done();
}

// Part `step` of `steps` of the rows.
inline void prefetch_rows(const PromptPrefetch& next, size_t step, size_t steps) {
  const size_t count = next.end - next.begin;
  for (size_t i = count * step / steps; i < count * (step + 1) / steps; ++i) {
    const uint8_t* const row = next.block->rows[next.begin + i];
    if (row == nullptr) continue;
    for (size_t byte = 0; byte < next.row_bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
  }
}

// Dot products of two groups of 16 queries with two groups of 16 keys, from `packed` on. A second
// group that is not there is replaced.
template <bool kHalf, bool kHiAlone>
inline void multiply_keys(const uint8_t* packed, size_t head_dim, const float* queries, size_t rows,
                          float* to, size_t to_stride) {
  const size_t padded = round_up(head_dim, kDepth), stride = padded * sizeof(float);
  const auto* const q = reinterpret_cast<const uint8_t*>(queries);
  const uint8_t* const more_q = rows > kTileSide ? q + kTileSide * stride : q;
  multiply_split<!kHiAlone, kHalf && !kHiAlone, kHalf ? 2 : 1>(
      {{q, more_q},
       stride,
       padded * 2,
       {packed, packed + packed_key_bytes<kHalf>(head_dim)},
       padded / kDepth});
  const size_t bytes = to_stride * sizeof(float);
  _tile_stored(0, to, bytes);
  _tile_stored(1, to + kTileSide, bytes);
  _tile_stored(2, to + kTileSide * to_stride, bytes);
  _tile_stored(3, to + kTileSide * to_stride + kTileSide, bytes);
}

inline bool all_finite(const float* scores, size_t rows) {
  __m512 a = _mm512_setzero_ps(), b = a;  // 0 times what is not finite is NaN
  for (size_t r = 0; r < rows; ++r) {
    const float* const at = scores + r * kPromptStride;
    a = _mm512_fmadd_ps(_mm512_load_ps(at), _mm512_setzero_ps(), a);
    b = _mm512_fmadd_ps(_mm512_load_ps(at + kTileSide), _mm512_setzero_ps(), b);
  }
  return _mm512_cmp_ps_mask(_mm512_add_ps(a, b), _mm512_setzero_ps(), _CMP_UNORD_Q) == 0;
}

// Scores that are not finite, from hi alone.
template <bool kHalf>
void repair_scores(const uint8_t* packed, size_t head_dim, const float* q, size_t rows,
                   float* scores) {
  constexpr int kNotFinite = 0x99;  // fpclass: NaN of both kinds, infinities of both signs
  alignas(64) float of_hi[kPromptRows][2 * kTileSide];
  multiply_keys<kHalf, true>(packed, head_dim, q, rows, of_hi[0], 2 * kTileSide);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t i = 0; i < 2 * kTileSide; i += kTileSide) {
      float* const at = scores + r * kPromptStride + i;
      const __mmask16 wrong = _mm512_fpclass_ps_mask(_mm512_load_ps(at), kNotFinite);
      _mm512_mask_store_ps(at, wrong, _mm512_load_ps(of_hi[r] + i));
    }
  }
}

template <bool kHalf>
void score_rows(const PromptOperand& k, const float* q, const PromptRows& job) {
  for (size_t lane = job.begin; lane < job.end; lane += 2 * kTileSide) {
    prefetch_rows(job.keys, lane - job.begin, job.end - job.begin);
    const uint8_t* const packed = k.packed + lane / kTileSide * packed_key_bytes<kHalf>(k.head_dim);
    float* const scores = job.logits + lane;
    multiply_keys<kHalf, false>(packed, k.head_dim, q, job.rows, scores, kPromptStride);
    if (!all_finite(scores, job.rows))
      repair_scores<kHalf>(packed, k.head_dim, q, job.rows, scores);
  }
}

void score(const PromptOperand& k, const float* q, const PromptRows& job) {
  return k.format == kF16 ? score_rows<true>(k, q, job) : score_rows<false>(k, q, job);
}

// acc = acc * rescale + sums, for up to 32 rows and 16 coordinates.
inline void add_values(const PromptRows& job, const float (*sums)[kTileSide][kTileSide],
                       const float* rescale, float* acc, size_t head_dim, __mmask16 mask) {
  for (size_t r = 0; r < job.rows; ++r) {
    float* const place = acc + r * head_dim;
    const __m512 sum = _mm512_load_ps(sums[r / kTileSide * 2][r % kTileSide]);
    _mm512_mask_storeu_ps(
        place, mask,
        _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, place), _mm512_set1_ps(rescale[r]), sum));
  }
}

template <bool kHalf>
float stored_value(const uint8_t* at) {
  uint16_t stored = 0;
  __builtin_memcpy(&stored, at, 2);
  if constexpr (kHalf) return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(stored)));
  return __builtin_bit_cast(float, static_cast<uint32_t>(stored) << 16);
}

// Adds values that are not finite to the rows that see them.
template <bool kHalf>
void add_non_finite(const PromptOperand& v, const PromptBlock& block, const PromptRows& job,
                    float* acc) {
  for (size_t lane = job.begin; lane < job.end; ++lane) {
    if (block.rows[lane] == nullptr) continue;
    for (size_t c = 0; c < v.head_dim; ++c) {
      const float value = stored_value<kHalf>(block.rows[lane] + 2 * c);
      if (value - value == 0) continue;
      for (size_t r = 0; r < job.rows; ++r) {
        const auto* const weights =
            reinterpret_cast<const uint16_t*>(job.logits + r * kPromptStride);
        const float p = __builtin_bit_cast(float, static_cast<uint32_t>(weights[lane]) << 16);
        if (p != 0) acc[r * v.head_dim + c] += p * value;
      }
    }
  }
}

template <bool kHalf>
void accumulate_rows(const PromptOperand& v, const PromptBlock& block, const PromptRows& job,
                     const float* rescale, float* acc) {
  constexpr size_t kStride = kPromptStride * sizeof(float);
  alignas(64) float sums[2][4][kTileSide][kTileSide];  // while one is read the other is written
  const auto* const p = reinterpret_cast<const uint8_t*>(job.logits) + job.begin * 2;
  const uint8_t* const more_p = job.rows > kTileSide ? p + kTileSide * kStride : p;
  const size_t tile_column = v.lanes / kDepth * kPackedValueBytes<kHalf>;  // of 16 coordinates
  for (size_t c = 0; c < v.head_dim; c += 2 * kTileSide) {
    prefetch_rows(job.values, c, round_up(v.head_dim, 2 * kTileSide));
    const bool two = c + kTileSide < v.head_dim;
    const uint8_t* const at =
        v.packed + c / kTileSide * tile_column + job.begin / kDepth * kPackedValueBytes<kHalf>;
    multiply_split<false, kHalf, kHalf ? 2 : 1>({{p, more_p},
                                                 kStride,
                                                 0,
                                                 {at, two ? at + tile_column : at},
                                                 (job.end - job.begin) / kDepth});
    auto& out = sums[c / (2 * kTileSide) % 2];
    _tile_stored(0, out[0], 64);
    _tile_stored(1, out[1], 64);
    _tile_stored(2, out[2], 64);
    _tile_stored(3, out[3], 64);
    add_values(job, out, rescale, acc + c, v.head_dim, first_lanes(v.head_dim - c));
    if (two)
      add_values(job, out + 1, rescale, acc + c + kTileSide, v.head_dim,
                 first_lanes(v.head_dim - c - kTileSide));
  }
  if (!v.finite) add_non_finite<kHalf>(v, block, job, acc);
}

void accumulate(const PromptOperand& v, const PromptBlock& block, const PromptRows& job,
                const float* rescale, float* acc) {
  return v.format == kF16 ? accumulate_rows<true>(v, block, job, rescale, acc)
                          : accumulate_rows<false>(v, block, job, rescale, acc);
}

// Below: blocks of up to 64 keys, where only one of K and V is in 16 bits, or a latent is
// both: rows stay in 32 bits between the phases.

PromptBlock block_of(const uint8_t* rows, size_t stride, uint32_t begin, uint32_t end,
                     uint32_t offset) {
  PromptBlock block;
  block.begin = offset + begin;
  block.end = offset + end;
  for (uint32_t i = begin; i < end; ++i) block.rows[offset + i] = rows + i * stride;
  return block;
}

PromptRows rows_of(const PromptBlock& block, uint32_t rows, float* logits) {
  PromptRows job;
  job.rows = rows < kPromptRows ? rows : kPromptRows;
  job.begin = static_cast<uint32_t>(block.begin / kDepth * kDepth);
  job.end = static_cast<uint32_t>(round_up(block.end, kDepth));
  job.logits = logits;
  return job;
}

void score_prompt(const ScoreJob& job) {
  const PromptBlock block = block_of(job.keys, job.key_stride, 0, job.key_count, 0);
  PromptOperand k{static_cast<uint8_t*>(job.scratch), job.format, job.head_dim, kBlockKeys};
  if (job.fresh) pack_prompt_keys(block, k);
  alignas(64) float scores[kPromptRows * kPromptStride];
  for (uint32_t row = 0; row < job.rows; row += kPromptRows) {
    const PromptRows rows = rows_of(block, job.rows - row, scores);
    score(k, job.q_f32 + row * round_up(job.head_dim, kDepth), rows);
    for (size_t r = 0; r < rows.rows; ++r)
      __builtin_memcpy(job.scores + (row + r) * kBlockKeys, scores + r * kPromptStride,
                       job.key_count * sizeof(float));
  }
}

void accumulate_prompt(const AccumulateJob& job) {
  const PromptBlock block = block_of(job.values, job.value_stride, job.begin, job.end, job.offset);
  // Whether all values are finite stands behind the operand.
  auto* const packed = static_cast<uint8_t*>(job.scratch);
  bool& finite = *reinterpret_cast<bool*>(packed + kValueScratchBytes - 64);
  PromptOperand v{packed, job.format, job.head_dim, kBlockKeys};
  if (job.fresh) {
    pack_prompt_values(block, v);
    finite = v.finite;
  }
  v.finite = finite;
  const uint64_t lanes = ~uint64_t{0} >> (kBlockKeys - (job.end - job.begin)) << block.begin;
  alignas(64) float weights[kPromptRows * kPromptStride];
  for (uint32_t row = 0; row < job.rows; row += kPromptRows) {
    const PromptRows rows = rows_of(block, job.rows - row, weights);
    for (size_t r = 0; r < rows.rows; ++r) {
      const float* const p = job.p + (row + r) * kBlockKeys - job.offset;
      auto* const to = reinterpret_cast<uint16_t*>(weights + r * kPromptStride);
      for (uint32_t lane = rows.begin; lane < rows.end; lane += kTileSide) {
        // Around the block's lanes a row may hold anything.
        const auto there = static_cast<__mmask16>(lanes >> lane);
        _mm256_store_si256(
            reinterpret_cast<__m256i*>(to + lane),
            reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(there, p + lane))));
      }
    }
    stores_are_done();
    accumulate(v, block, rows, job.rescale + row, job.acc + size_t{row} * job.head_dim);
  }
}

}  // namespace

void add_amx_prompt_kernels(AttentionKernels& kernels) {
  kernels.split_queries = split_queries;
  kernels.score_prompt = score_prompt;
  kernels.accumulate_prompt = accumulate_prompt;
  static constexpr PromptKernels kPrompt{pack_prompt_keys, pack_prompt_values, score,
                                         find_max,         exponentiate,       accumulate};
  kernels.prompt = &kPrompt;
  kernels.f16_arithmetic = kernels.bf16_arithmetic = "bf16";
}

}  // namespace gyre::cpu
