#pragma once
// How far an output is from attention in double precision: one query token, all keys seen.

#include <algorithm>
#include <cmath>
#include <vector>

#include "gyre/tensor.h"

namespace gyre::bench {

// q, out: [1, heads, head_dim]; k, v: [length, kv_heads, head_dim], all contiguous f32.
inline double attention_nmse(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v) {
  const uint64_t heads = q.shape(1), n = q.shape(2), length = k.shape(0), kv_heads = k.shape(1);
  const float *qs = q.data<const float>().data(), *ks = k.data<const float>().data(),
              *vs = v.data<const float>().data(), *outs = out.data<const float>().data();
  double error = 0, energy = 0;
  std::vector<double> logits(length), sum(n);
  for (uint64_t h = 0; h < heads; ++h) {
    const uint64_t kv_head = h / (heads / kv_heads);
    for (uint64_t j = 0; j < length; ++j) {
      const float* const row = ks + (j * kv_heads + kv_head) * n;
      double dot = 0;
      for (uint64_t c = 0; c < n; ++c) dot += double{qs[h * n + c]} * double{row[c]};
      logits[j] = dot / std::sqrt(static_cast<double>(n));
    }
    const double max = *std::max_element(logits.begin(), logits.end());
    double total = 0;
    std::fill(sum.begin(), sum.end(), 0.0);
    for (uint64_t j = 0; j < length; ++j) {
      const float* const row = vs + (j * kv_heads + kv_head) * n;
      const double p = std::exp(logits[j] - max);
      total += p;
      for (uint64_t c = 0; c < n; ++c) sum[c] += p * double{row[c]};
    }
    for (uint64_t c = 0; c < n; ++c) {
      const double wanted = sum[c] / total, off = double{outs[h * n + c]} - wanted;
      error += off * off;
      energy += wanted * wanted;
    }
  }
  return error / energy;
}

}  // namespace gyre::bench
