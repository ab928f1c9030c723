#pragma once
// Attention in double precision, one row at a time, over keys and values in the clear.

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace gyre::reference {

struct AttentionShape {
  uint64_t tokens = 1;
  uint64_t heads = 1;
  uint64_t kv_heads = 1;
  uint64_t k_dim = 0;
  uint64_t v_dim = 0;
  uint64_t length = 0;
  uint64_t capacity = 0;
  uint64_t ring_start = 0;
  double scale = 1;
  bool causal = true;
  uint64_t window = 0;
  double soft_cap = 0;
};

struct AttentionData {
  std::vector<double> q;       // [tokens, heads, k_dim]
  std::vector<double> k;       // [capacity, kv_heads, k_dim]
  std::vector<double> v;       // [capacity, kv_heads, v_dim]
  std::vector<double> sinks;   // [heads] or empty
  std::vector<double> slopes;  // [heads] or empty
  std::vector<uint8_t> tree;   // [tokens, tokens] or empty
};

struct AttentionResult {
  std::vector<double> out;  // [tokens, heads, v_dim]
  std::vector<double> lse;  // [tokens, heads]
};

inline bool attention_sees(const AttentionShape& s, const AttentionData& data, uint64_t token,
                           uint64_t key) {
  const auto own =
      static_cast<int64_t>(s.length) - static_cast<int64_t>(s.tokens) + static_cast<int64_t>(token);
  const auto j = static_cast<int64_t>(key);
  if (s.window != 0 && j <= own && static_cast<uint64_t>(own - j) >= s.window) return false;
  if (data.tree.empty()) return !s.causal || j <= own;
  const int64_t fresh = j - static_cast<int64_t>(s.length - s.tokens);
  return fresh < 0 || data.tree[token * s.tokens + static_cast<uint64_t>(fresh)] != 0;
}

inline void attention_row(const AttentionShape& s, const AttentionData& data, uint64_t token,
                          uint64_t head, AttentionResult& result) {
  const uint64_t kv_head = head / (s.heads / s.kv_heads);
  const double* const q = &data.q[(token * s.heads + head) * s.k_dim];
  const auto own =
      static_cast<double>(s.length) - static_cast<double>(s.tokens) + static_cast<double>(token);
  std::vector<double> logits;
  std::vector<uint64_t> slots;
  for (uint64_t key = 0; key < s.length; ++key) {
    if (!attention_sees(s, data, token, key)) continue;
    const uint64_t slot = (s.ring_start + key) % s.capacity;
    const double* const k = &data.k[(slot * s.kv_heads + kv_head) * s.k_dim];
    double dot = 0;
    for (uint64_t c = 0; c < s.k_dim; ++c) dot += q[c] * k[c];
    double logit = s.scale * dot;
    if (s.soft_cap != 0) logit = s.soft_cap * std::tanh(logit / s.soft_cap);
    if (!data.slopes.empty()) logit += data.slopes[head] * (static_cast<double>(key) - own);
    logits.push_back(logit);
    slots.push_back(slot);
  }
  double max = -std::numeric_limits<double>::infinity();
  for (const double logit : logits) max = std::max(max, logit);
  if (!data.sinks.empty()) max = std::max(max, data.sinks[head]);
  double sum = data.sinks.empty() ? 0 : std::exp(data.sinks[head] - max);
  std::vector<double> out(s.v_dim, 0.0);
  for (size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp(logits[i] - max);
    sum += p;
    const double* const v = &data.v[(slots[i] * s.kv_heads + kv_head) * s.v_dim];
    for (uint64_t c = 0; c < s.v_dim; ++c) out[c] += p * v[c];
  }
  const uint64_t row = token * s.heads + head;
  for (uint64_t c = 0; c < s.v_dim; ++c)
    result.out[row * s.v_dim + c] = sum == 0 ? 0 : out[c] / sum;
  result.lse[row] = sum == 0 ? -std::numeric_limits<double>::infinity() : max + std::log(sum);
}

inline AttentionResult attention(const AttentionShape& s, const AttentionData& data) {
  AttentionResult result{std::vector<double>(s.tokens * s.heads * s.v_dim),
                         std::vector<double>(s.tokens * s.heads)};
  for (uint64_t token = 0; token < s.tokens; ++token) {
    for (uint64_t head = 0; head < s.heads; ++head) attention_row(s, data, token, head, result);
  }
  return result;
}

}  // namespace gyre::reference
