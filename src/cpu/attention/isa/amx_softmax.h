#pragma once
// Softmax of a prompt's rows in AVX-512: logits in f32 become weights in bf16, in their place. All
// of it anonymous, so that each file has its own copy.

#include "cpu/attention/isa/prompt_kernels.h"
#include "cpu/attention/isa/weights_avx512.h"

namespace gyre::cpu {
namespace {

void find_max(const PromptRows& job, float* max) {
  for (size_t row = 0; row < job.rows; row += 4) {
    __m512 v[4];
#pragma GCC unroll 4
    for (size_t r = 0; r < 4; ++r) {
      const float* const at = job.logits + (row + r < job.rows ? row + r : row) * kPromptStride;
      __m512 even = _mm512_load_ps(at + job.begin), odd = _mm512_load_ps(at + job.begin + 16);
      for (size_t lane = job.begin + 32; lane < job.end; lane += 32) {
        even = _mm512_max_ps(even, _mm512_load_ps(at + lane));
        odd = _mm512_max_ps(odd, _mm512_load_ps(at + lane + 16));
      }
      v[r] = _mm512_max_ps(even, odd);
    }
    const __m128 four = reduce_rows(v, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
    _mm_store_ps(max + row, four);
  }
}

// Exp2 of softmax-inl.h.
inline __m512 exp2_of(__m512 x) {
  const __m512 magic = _mm512_set1_ps(12582912.0f + 127.0f);
  const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-127.0f), x);  // NaN stays NaN
  const __m512 shifted = _mm512_add_ps(bounded, magic);
  const __m512 f = _mm512_sub_ps(bounded, _mm512_sub_ps(shifted, magic));
  __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(0.00133336f), _mm512_set1_ps(0.00961813f));
  y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(0.0555041f));
  y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(0.240226507f));
  y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(0.693147181f));
  y = _mm512_fmadd_ps(f, y, _mm512_set1_ps(1.0f));
  const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_mul_ps(y, _mm512_castsi512_ps(power));
}

void exponentiate(const PromptRows& job, const float* factor, const float* reference, float* sums) {
  for (size_t row = 0; row < job.rows; row += 4) {
    __m512 sum[4];
    for (size_t r = 0; r < 4; ++r) {
      sum[r] = _mm512_setzero_ps();
      if (row + r >= job.rows) continue;
      float* const at = job.logits + (row + r) * kPromptStride;
      auto* const weights = reinterpret_cast<uint16_t*>(at);
      const __m512 f = _mm512_set1_ps(factor[row + r]), m = _mm512_set1_ps(reference[row + r]);
      __m512 odd = _mm512_setzero_ps();
#pragma GCC unroll 2
      for (size_t lane = job.begin; lane < job.end; lane += 32) {
        // Not fused: the largest must come out as exactly 1.
        const __m512 a = _mm512_sub_ps(_mm512_mul_ps(_mm512_load_ps(at + lane), f), m);
        const __m512 b = _mm512_sub_ps(_mm512_mul_ps(_mm512_load_ps(at + lane + 16), f), m);
        const __m512 early = exp2_of(a), late = exp2_of(b);
        sum[r] = _mm512_add_ps(sum[r], early);
        odd = _mm512_add_ps(odd, late);
        _mm512_store_si512(weights + lane,
                           reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(late, early)));
      }
      sum[r] = _mm512_add_ps(sum[r], odd);
    }
    const __m128 four = reduce_rows(sum, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
    _mm_store_ps(sums + row, four);
  }
}

}  // namespace
}  // namespace gyre::cpu
