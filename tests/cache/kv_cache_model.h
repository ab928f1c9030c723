#pragma once
// A KvCache beside a plain vector of the tokens it was given; questions are answered by both.

#include <unistd.h>

#include <cstdio>

#include "attention/attention_fixture.h"
#include "cache/held_values.h"
#include "folder.h"
#include "gyre/kv_cache.h"
#include "ops/cache_ops.h"
#include "test_device.h"

namespace gyre::test {

constexpr uint64_t kHeads = 4, kKvHeads = 2, kDim = 64, kValueDim = 32;

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
  if (format == KvFormat::f32) return 1e-10;
  if (format == KvFormat::f16) return prompt_bound(1e-6);
  if (format == KvFormat::bf16) return 1e-4;
  switch (name(format).back()) {  // the bits of a code
    case '8':
      return 4e-4;
    case '6':
      return 4e-3;
    case '5':
      return 1.5e-2;
    case '4':
      return 5e-2;
    case '3':
      return 0.15;
    default:
      return 0.4;
  }
}

// The bound of one row. mlx-native formats do not choose a scale by what they lose.
inline double row_bound(KvFormat format) {
  return describe(format).scale == KvScaleKind::f32_norm ? 4 * bound(format) : bound(format);
}

// How to ask: whatever attention offers.
struct Question {
  uint64_t tokens = 1, window = 0;
  float soft_cap = 0;
  bool sink_logits = false, alibi_slopes = false, tree_mask = false, causal = true;
};

class CacheModel {
 public:
  explicit CacheModel(const KvCacheOptions& options, uint32_t seed = 7)
      : random(seed), device(test_device()), encoder(device), cache(device, options) {}

  std::vector<float> fresh(uint64_t count) { return normal_floats(count, random); }
  Tensor tensor(const std::vector<float>& values, const Dims& shape) const {
    return tensor_of(device, values, shape);
  }

  void append(uint64_t tokens) {
    cache.begin_step(encoder, tokens);
    const std::vector<float> new_k = fresh(tokens * kKvHeads * k_dim()),
                             new_v = fresh(tokens * kKvHeads * v_dim());
    for (uint64_t layer = 0; layer < cache.options().layers.size(); ++layer) {
      cache.append(encoder, layer, tensor(new_k, {tokens, kKvHeads, k_dim()}),
                   tensor(new_v, {tokens, kKvHeads, v_dim()}));
    }
    encoder.submit().wait();
    step = tokens;
    k.insert(k.end(), new_k.begin(), new_k.end());
    v.insert(v.end(), new_v.begin(), new_v.end());
  }
  void rollback(uint64_t tokens) {
    cache.rollback(encoder, tokens);
    encoder.submit().wait();
    step = 0;
    forget(tokens);
  }
  // A step whose append is recorded and dropped, or refused; then it is taken back, and `more`.
  void begin_and_take_back(uint64_t tokens, bool refused, uint64_t more = 0) {
    cache.begin_step(encoder, tokens);
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
    cache.rollback(encoder, tokens + more);
    encoder.submit().wait();
    step = 0;
    forget(more);
  }
  void end_step() {
    if (step == 0) return;
    cache.rollback(encoder, 0);
    encoder.submit().wait();
    step = 0;
  }
  void clear() {
    cache.clear(encoder);
    encoder.submit().wait();
    step = 0;
    k.clear();
    v.clear();
  }

  // A question, what the cache answered, and the double-precision problem it is.
  struct Asked {
    std::vector<double> got;
    std::vector<RecordedCommand> commands;
    reference::AttentionShape shape;
    reference::AttentionData data;  // over all tokens as they were given
  };

  Asked asked(uint64_t layer, const Question& ask) {
    if (ask.tokens > step) end_step();  // older tokens are asked about again
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
    AttentionMask mask{.causal = ask.causal, .window = ask.window, .soft_cap = ask.soft_cap};
    if (ask.sink_logits) mask.sink_logits = per_head(data.sink_logits);
    if (ask.alibi_slopes) mask.alibi_slopes = per_head(data.alibi_slopes);
    if (ask.tree_mask) mask.tree_mask = tree_mask(ask.tokens, data.tree_mask);
    cache.attend(encoder, layer, in, {.scale = scale, .mask = mask});
    const std::vector<RecordedCommand> commands = recorded_commands(encoder);
    encoder.submit().wait();
    const std::vector<float> got = floats_of(in.out);
    return {{got.begin(), got.end()}, commands, shape, data};
  }

  // NMSE of the cache's answer against double precision over all tokens.
  double error(uint64_t layer, const Question& ask) {
    const Asked a = asked(layer, ask);
    return nmse(a.got, reference::attention(a.shape, a.data).out);
  }
  double error(uint64_t layer, uint64_t tokens, uint64_t window = 0) {
    return error(layer, Question{.tokens = tokens, .window = window});
  }

  // That each key lies where it should, within its format's error, and that attention over what is
  // held is within the bounds of its arithmetic.
  testing::AssertionResult holds(uint64_t layer, const Question& ask) {
    Asked a = asked(layer, ask);
    const KvLayer& formats = cache.options().layers[layer];
    const std::string path = scratch_path();
    cache.save(path);
    const HeldValues held = HeldReader(path).read(layer);
    std::remove(path.c_str());
    const KvFormat near = KvFormat::f16;
    for (const auto& result : {rows_hold(a.data.k, held.k.body, k_dim(), formats.k),
                               rows_hold(a.data.v, held.v.body, v_dim(), formats.v),
                               rows_hold(a.data.k, held.k.tail, k_dim(), near),
                               rows_hold(a.data.v, held.v.tail, v_dim(), near)}) {
      if (!result) return result;
    }
    const double error = nmse(a.got, answer(a, held, formats)), bound = tolerance(a, formats, ask);
    if (error <= bound) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << "NMSE " << error << " over what is held, at most " << bound;
  }

  std::mt19937 random;
  Device device;
  Encoder encoder;
  KvCache cache;
  std::vector<float> k, v;
  uint64_t step = 0;  // tokens that were appended last, unless the step was ended

 private:
  // In memory where there is such a folder: a snapshot is synced.
  static std::string scratch_path() {
    const bool memory = access("/dev/shm", W_OK) == 0;
    return (memory ? "/dev/shm/gyre_held_" : testing::TempDir() + "gyre_held_") +
           std::to_string(getpid());
  }

  // The definition: a query sees the first keys and the `tail` newest up to its own, as far as the
  // ring holds them, in 16 bits, those between as the body stores them.
  std::vector<double> answer(Asked& a, const HeldValues& held, const KvLayer& layer) const {
    const reference::AttentionShape& s = a.shape;
    reference::AttentionResult result{std::vector<double>(s.tokens * s.heads * s.v_dim),
                                      std::vector<double>(s.tokens * s.heads)};
    for (uint64_t token = 0; token < s.tokens; ++token) {
      const uint64_t own = s.length + token - s.tokens;  // its key
      for (uint64_t key = 0; key < s.length; ++key) {
        const bool near =
            key >= layer.sink_tokens && key >= held.tail_begin && key + layer.tail > own;
        put_row(near && layer.tail != 0 ? held.k.tail : held.k.body, key, k_dim(), a.data.k);
        put_row(near && layer.tail != 0 ? held.v.tail : held.v.body, key, v_dim(), a.data.v);
      }
      for (uint64_t head = 0; head < s.heads; ++head)
        reference::attention_row(s, a.data, token, head, result);
    }
    return result.out;
  }
  static void put_row(const std::vector<double>& from, uint64_t key, uint64_t dim,
                      std::vector<double>& to) {
    const auto row = static_cast<std::ptrdiff_t>(kKvHeads * dim);
    const auto at = static_cast<std::ptrdiff_t>(key) * row;
    std::copy_n(from.begin() + at, row, to.begin() + at);
  }

  // Another token's row would have an error of about 2.
  static testing::AssertionResult rows_hold(const std::vector<double>& given,
                                            const std::vector<double>& kept, uint64_t dim,
                                            KvFormat format) {
    if (given.size() != kept.size())
      return testing::AssertionFailure() << kept.size() << " numbers of " << given.size();
    for (size_t row = 0; row < given.size(); row += dim) {
      if (std::isnan(kept[row])) continue;  // a ring has lost it, or never had
      const auto begin = static_cast<std::ptrdiff_t>(row);
      const auto end = begin + static_cast<std::ptrdiff_t>(dim);
      const double error = nmse({kept.begin() + begin, kept.begin() + end},
                                {given.begin() + begin, given.begin() + end});
      if (!(error <= row_bound(format)))
        return testing::AssertionFailure()
               << "key " << row / dim / kKvHeads << ", head " << row / dim % kKvHeads << " in "
               << name(format) << " has NMSE " << error << ", at most " << row_bound(format);
    }
    return testing::AssertionSuccess();
  }

  // Sink tokens and tails are f16, whatever the body is.
  double tolerance(const Asked& a, const KvLayer& layer, const Question& ask) const {
    const AttentionInputsKind kind{.softened = ask.soft_cap != 0 || ask.alibi_slopes};
    const std::string how = impl_of(device)->describe(*a.commands[0].kernel, a.commands[0].spec);
    const double body = attention_tolerance(how, layer.k, layer.v, kind).nmse;
    if (a.commands.size() == 1) return body;
    const std::string half =
        describe_attention(device, {.format = KvFormat::f16}, {.format = KvFormat::f16}, false);
    return std::max(body, attention_tolerance(half, KvFormat::f16, KvFormat::f16, kind).nmse);
  }

  uint64_t k_dim() const { return cache.options().head_dim; }
  uint64_t v_dim() const { return cache.options().v_head_dim; }
  void forget(uint64_t tokens) {
    k.resize(k.size() - tokens * kKvHeads * k_dim());
    v.resize(v.size() - tokens * kKvHeads * v_dim());
  }
  Tensor per_head(std::vector<double>& numbers) {
    const std::vector<float> values = normal_floats(kHeads, random, 0.1f);
    numbers.assign(values.begin(), values.end());
    return tensor(values, {kHeads});
  }
  // Every token sees itself and, by chance, those before it.
  Tensor tree_mask(uint64_t tokens, std::vector<uint8_t>& sees) {
    sees.assign(tokens * tokens, 0);
    for (uint64_t i = 0; i < tokens; ++i) {
      for (uint64_t j = 0; j <= i; ++j) sees[i * tokens + j] = j == i || random() % 2 == 0 ? 1 : 0;
    }
    return tensor_of(device, sees, {tokens, tokens});
  }
};

}  // namespace gyre::test
