#pragma once
// How far an output is from attention in double precision: one query token, all keys seen.

#include <algorithm>
#include <cmath>
#include <vector>

#include "gyre/tensor.h"

namespace gyre::bench {

inline std::vector<float> floats_of(const Tensor& tensor) {
  std::vector<float> values(tensor.elements());
  tensor.read_to(std::span<float>(values));
  return values;
}

// q: [1, heads, head_dim]; k, v: [length, kv_heads, head_dim], all contiguous f32. Queries with more
// coordinates than k are those of latent attention: v is then the rotary part of K, and k both.
inline std::vector<double> attention_in_double(const Tensor& q, const Tensor& k, const Tensor& v) {
  const uint64_t heads = q.shape(1), n = q.shape(2), length = k.shape(0), kv_heads = k.shape(1);
  const uint64_t k_dim = k.shape(2), rotary_dim = n - k_dim;
  const std::vector<float> queries = floats_of(q), keys = floats_of(k), values = floats_of(v);
  const float *qs = queries.data(), *ks = keys.data(), *rotary = values.data();
  const float* const vs = rotary_dim != 0 ? ks : values.data();
  std::vector<double> logits(length), sum(k_dim), out;
  out.reserve(heads * k_dim);
  for (uint64_t h = 0; h < heads; ++h) {
    const uint64_t kv_head = h / (heads / kv_heads);
    for (uint64_t j = 0; j < length; ++j) {
      const float* const row = ks + (j * kv_heads + kv_head) * k_dim;
      double dot = 0;
      for (uint64_t c = 0; c < k_dim; ++c) dot += double{qs[h * n + c]} * double{row[c]};
      for (uint64_t c = 0; c < rotary_dim; ++c)
        dot += double{qs[h * n + k_dim + c]} * double{rotary[j * rotary_dim + c]};
      logits[j] = dot / std::sqrt(static_cast<double>(n));
    }
    const double max = *std::max_element(logits.begin(), logits.end());
    double total = 0;
    std::fill(sum.begin(), sum.end(), 0.0);
    for (uint64_t j = 0; j < length; ++j) {
      const float* const row = vs + (j * kv_heads + kv_head) * k_dim;
      const double p = std::exp(logits[j] - max);
      total += p;
      for (uint64_t c = 0; c < k_dim; ++c) sum[c] += p * double{row[c]};
    }
    for (const double value : sum) out.push_back(value / total);
  }
  return out;
}

inline double nmse(const Tensor& out, const std::vector<double>& wanted) {
  const std::vector<float> outs = floats_of(out);
  double error = 0, energy = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double off = double{outs[i]} - wanted[i];
    error += off * off;
    energy += wanted[i] * wanted[i];
  }
  return error / energy;
}

inline double attention_nmse(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v) {
  return nmse(out, attention_in_double(q, k, v));
}

}  // namespace gyre::bench
