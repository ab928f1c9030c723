#pragma once
// A KvCache beside a plain vector of the tokens it was given; questions are answered by both.

#include <cstdlib>

#include "attention/attention_fixture.h"
#include "gyre/kv_cache.h"

namespace gyre::test {

constexpr uint64_t kHeads = 4, kKvHeads = 2, kDim = 64, kValueDim = 32;

// The CPU, unless GYRE_TEST_DEVICE names another.
inline Device test_device() {
  const char* const name = std::getenv("GYRE_TEST_DEVICE");
  return Device::open(name != nullptr ? name : "cpu", {.threads = 2});
}

inline KvCacheOptions small(const KvLayer& layer, uint64_t capacity = 300) {
  return {.kv_heads = kKvHeads,
          .head_dim = kDim,
          .v_head_dim = kValueDim,
          .capacity = capacity,
          .layers = {layer},
          .step_tokens = 100};
}

// NMSE that attention over N(0,1) tokens in this format stays under.
inline double bound(KvFormat format) {
  switch (format) {
    case KvFormat::f32:
      return 1e-10;
    case KvFormat::f16:
      return 1e-6;
    case KvFormat::bf16:
      return 1e-4;
    case KvFormat::tq8:
      return 4e-4;
    case KvFormat::tq6:
      return 4e-3;
    case KvFormat::tq5:
      return 1.5e-2;
    case KvFormat::tq4:
      return 5e-2;
    case KvFormat::tq3:
      return 0.15;
    default:
      return 0.4;
  }
}

// How to ask: whatever attention offers.
struct Question {
  uint64_t tokens = 1;
  uint64_t window = 0;
  float soft_cap = 0;
  bool sinks = false, slopes = false, tree = false, causal = true;
};

class CacheModel {
 public:
  explicit CacheModel(const KvCacheOptions& options, uint32_t seed = 7)
      : random(seed), device(test_device()), encoder(device), cache(device, options) {}

  std::vector<float> fresh(uint64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(random);
    return values;
  }
  Tensor tensor(const std::vector<float>& values, const Dims& shape) const {
    Tensor made = device.tensor(DType::f32, shape);
    made.write_from(std::span<const float>(values));
    return made;
  }

  void append(uint64_t tokens) {
    cache.extend(encoder, tokens);
    const std::vector<float> new_k = fresh(tokens * kKvHeads * k_dim()),
                             new_v = fresh(tokens * kKvHeads * v_dim());
    for (uint64_t layer = 0; layer < cache.options().layers.size(); ++layer) {
      cache.append(encoder, layer, tensor(new_k, {tokens, kKvHeads, k_dim()}),
                   tensor(new_v, {tokens, kKvHeads, v_dim()}));
    }
    encoder.submit().wait();
    k.insert(k.end(), new_k.begin(), new_k.end());
    v.insert(v.end(), new_v.begin(), new_v.end());
  }
  void truncate(uint64_t tokens) {
    cache.truncate(encoder, tokens);
    encoder.submit().wait();
    forget(tokens);
  }
  // A step whose append is recorded and dropped, or refused; then it is taken back, and `more`.
  void begin_and_take_back(uint64_t tokens, bool refused, uint64_t more = 0) {
    cache.extend(encoder, tokens);
    encoder.submit().wait();
    const uint64_t given = refused ? tokens + 1 : tokens;
    const Tensor new_k = device.tensor(DType::f32, {given, kKvHeads, k_dim()}),
                 new_v = device.tensor(DType::f32, {given, kKvHeads, v_dim()});
    for (uint64_t layer = 0; layer < cache.options().layers.size(); ++layer) {
      if (refused) {
        EXPECT_THROW(cache.append(encoder, layer, new_k, new_v), Error);
      } else {
        cache.append(encoder, layer, new_k, new_v);
      }
    }
    encoder.clear();
    cache.truncate(encoder, tokens + more);
    encoder.submit().wait();
    forget(more);
  }
  void clear() {
    cache.clear(encoder);
    encoder.submit().wait();
    k.clear();
    v.clear();
  }

  // NMSE of the cache's answer against double precision over all tokens.
  double error(uint64_t layer, const Question& ask) {
    const std::vector<float> q = fresh(ask.tokens * kHeads * k_dim());
    reference::AttentionShape shape;
    shape.tokens = ask.tokens;
    shape.heads = kHeads;
    shape.kv_heads = kKvHeads;
    shape.k_dim = k_dim();
    shape.v_dim = v_dim();
    shape.causal = ask.causal;
    shape.length = shape.capacity = cache.length();
    shape.window = ask.window != 0 ? ask.window : cache.options().layers[layer].window;
    shape.soft_cap = ask.soft_cap;
    const float scale = 1.0f / std::sqrt(static_cast<float>(k_dim()));
    shape.scale = scale;
    reference::AttentionData data{
        {q.begin(), q.end()}, {k.begin(), k.end()}, {v.begin(), v.end()}, {}, {}, {}};
    AttendInputs in{.q = tensor(q, {ask.tokens, kHeads, k_dim()}),
                    .out = device.tensor(DType::f32, {ask.tokens, kHeads, v_dim()})};
    if (ask.sinks) in.sinks = per_head(data.sinks);
    if (ask.slopes) in.slopes = per_head(data.slopes);
    if (ask.tree) in.tree = tree(ask.tokens, data.tree);
    cache.attend(
        encoder, layer, in,
        {.scale = scale, .causal = ask.causal, .window = ask.window, .soft_cap = ask.soft_cap});
    encoder.submit().wait();
    const std::vector<float> got = floats_of(in.out);
    return nmse({got.begin(), got.end()}, reference::attention(shape, data).out);
  }
  double error(uint64_t layer, uint64_t tokens, uint64_t window = 0) {
    return error(layer, Question{.tokens = tokens, .window = window});
  }

  std::mt19937 random;
  Device device;
  Encoder encoder;
  KvCache cache;
  std::vector<float> k, v;

 private:
  uint64_t k_dim() const { return cache.options().head_dim; }
  uint64_t v_dim() const { return cache.options().v_head_dim; }
  void forget(uint64_t tokens) {
    k.resize(k.size() - tokens * kKvHeads * k_dim());
    v.resize(v.size() - tokens * kKvHeads * v_dim());
  }
  Tensor per_head(std::vector<double>& numbers) {
    std::vector<float> values = fresh(kHeads);
    for (float& value : values) value *= 0.1f;
    numbers.assign(values.begin(), values.end());
    return tensor(values, {kHeads});
  }
  // Every token sees itself and, by chance, those before it.
  Tensor tree(uint64_t tokens, std::vector<uint8_t>& sees) {
    sees.assign(tokens * tokens, 0);
    for (uint64_t i = 0; i < tokens; ++i) {
      for (uint64_t j = 0; j <= i; ++j) sees[i * tokens + j] = j == i || random() % 2 == 0 ? 1 : 0;
    }
    Tensor made = device.tensor(DType::u8, {tokens, tokens});
    made.write_from(std::span<const uint8_t>(sees));
    return made;
  }
};

}  // namespace gyre::test
