#pragma once
// Attention in double precision, one row at a time, over keys and values in the clear.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace gyre::reference {

struct AttentionShape {
  uint64_t tokens = 1, heads = 1, kv_heads = 1, k_dim = 0, v_dim = 0, length = 0, capacity = 0;
  uint64_t ring_start = 0;
  double scale = 1;
  bool causal = true;
  uint64_t window = 0;
  double soft_cap = 0;
};

struct AttentionData {
  std::vector<double> q;             // [tokens, heads, k_dim]
  std::vector<double> k;             // [capacity, kv_heads, k_dim]
  std::vector<double> v;             // [capacity, kv_heads, v_dim]
  std::vector<double> sink_logits;   // [heads] or empty
  std::vector<double> alibi_slopes;  // [heads] or empty
  std::vector<uint8_t> tree_mask;    // [tokens, tokens] or empty
};

// Latent attention is attention over one KV head: K is the latent with the rotary part behind it, V
// the latent. `data` has the latent in k and the rotary part in v.
inline void join_latent(uint64_t latent_dim, uint64_t rotary_dim, AttentionData& data) {
  const std::vector<double> rotary = std::move(data.v);
  data.v = std::move(data.k);
  data.k.clear();
  for (uint64_t row = 0; row < data.v.size() / latent_dim; ++row) {
    const auto part = [&](const std::vector<double>& from, uint64_t dim) {
      const auto begin = from.begin() + static_cast<ptrdiff_t>(row * dim);
      data.k.insert(data.k.end(), begin, begin + static_cast<ptrdiff_t>(dim));
    };
    part(data.v, latent_dim);
    part(rotary, rotary_dim);
  }
}

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
  if (data.tree_mask.empty()) return !s.causal || j <= own;
  const int64_t fresh = j - static_cast<int64_t>(s.length - s.tokens);
  return fresh < 0 || data.tree_mask[token * s.tokens + static_cast<uint64_t>(fresh)] != 0;
}

// The softmax's state over some of the keys: values are not divided by the sum.
struct AttentionState {
  std::vector<double> values;  // [v_dim]
  double max = -std::numeric_limits<double>::infinity(), sum = 0;
};

// One more logit, whose value is 0.
inline void add_sink(AttentionState& state, double logit) {
  if (std::isinf(logit)) return;
  const double max = std::max(state.max, logit);
  const double keep = std::isinf(state.max) ? 0 : std::exp(state.max - max);
  for (double& x : state.values) x *= keep;
  state.sum = state.sum * keep + std::exp(logit - max);
  state.max = max;
}

// Keys [first, last), as far as there are any.
inline AttentionState attention_state(const AttentionShape& s, const AttentionData& data,
                                      uint64_t token, uint64_t head, uint64_t first,
                                      uint64_t last) {
  const uint64_t kv_head = head / (s.heads / s.kv_heads);
  const double* const q = &data.q[(token * s.heads + head) * s.k_dim];
  const auto own =
      static_cast<double>(s.length) - static_cast<double>(s.tokens) + static_cast<double>(token);
  std::vector<double> logits;
  std::vector<uint64_t> slots;
  for (uint64_t key = first; key < std::min(last, s.length); ++key) {
    if (!attention_sees(s, data, token, key)) continue;
    const uint64_t slot = (s.ring_start + key) % s.capacity;
    const double* const k = &data.k[(slot * s.kv_heads + kv_head) * s.k_dim];
    double dot = 0;
    for (uint64_t c = 0; c < s.k_dim; ++c) dot += q[c] * k[c];
    double logit = s.scale * dot;
    if (s.soft_cap != 0) logit = s.soft_cap * std::tanh(logit / s.soft_cap);
    if (!data.alibi_slopes.empty())
      logit += data.alibi_slopes[head] * (static_cast<double>(key) - own);
    logits.push_back(logit);
    slots.push_back(slot);
  }
  AttentionState state;
  state.values.resize(s.v_dim);
  for (const double logit : logits) state.max = std::max(state.max, logit);
  for (size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp(logits[i] - state.max);
    state.sum += p;
    const double* const v = &data.v[(slots[i] * s.kv_heads + kv_head) * s.v_dim];
    for (uint64_t c = 0; c < s.v_dim; ++c) state.values[c] += p * v[c];
  }
  return state;
}

inline void attention_row(const AttentionShape& s, const AttentionData& data, uint64_t token,
                          uint64_t head, AttentionResult& result) {
  AttentionState state = attention_state(s, data, token, head, 0, s.length);
  if (!data.sink_logits.empty()) add_sink(state, data.sink_logits[head]);
  const uint64_t row = token * s.heads + head;
  for (uint64_t c = 0; c < s.v_dim; ++c)
    result.out[row * s.v_dim + c] = state.sum == 0 ? 0 : state.values[c] / state.sum;
  result.lse[row] =
      state.sum == 0 ? -std::numeric_limits<double>::infinity() : state.max + std::log(state.sum);
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
