#pragma once
// Sequences whose keys, values and queries follow from their tokens alone, as a model's would: the
// same tokens must give the same bits, whoever computes them and with whom.

#include <bit>

#include "expect_error.h"
#include "gyre_test.h"
#include "numbers.h"

namespace gyre::test {

inline KvPoolOptions small_pool(uint64_t pages = 32, uint64_t page_tokens = 8) {
  return {.kv_heads = 1,
          .head_dim = 16,
          .layers = {{.k = KvFormat::tq8, .v = KvFormat::tq4},
                     {.k = KvFormat::f16, .v = KvFormat::f16}},
          .pages = pages,
          .page_tokens = page_tokens};
}

// Everything a page may be for: all keys, a window, a tail, sink tokens.
inline KvPoolOptions mixed_pool(uint64_t pages = 32, uint64_t page_tokens = 8) {
  return {.kv_heads = 2,
          .head_dim = 32,
          .layers = {{.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 12, .sink_tokens = 4},
                     {.k = KvFormat::f16, .v = KvFormat::f16, .window = 20},
                     {.k = KvFormat::tq4, .v = KvFormat::tq4}},
          .pages = pages,
          .page_tokens = page_tokens,
          .sequences = 16,
          .step_tokens = 64};
}

// Layers whose heads and dims differ, and layers that share a cache: one between the others, two of
// other query heads than the owner's.
inline KvPoolOptions layered_pool(uint64_t pages = 32, uint64_t page_tokens = 8) {
  KvPoolOptions options = mixed_pool(pages, page_tokens);
  options.layers[1].kv_heads = 1;
  options.layers[1].head_dim = 72;
  options.layers[1].v_head_dim = 16;
  options.layers[2].kv_heads = 3;
  options.layers[2].head_dim = 64;
  options.layers.insert(options.layers.begin() + 2, KvLayer{.kv_shared_layer_index = 0});
  options.layers.insert(options.layers.begin() + 3, KvLayer{.kv_shared_layer_index = 1});
  return options;
}

inline std::vector<int32_t> some_tokens(uint64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 50000);
  return tokens;
}

// A sequence and the tokens that are in it.
struct Talk {
  KvSequence sequence;
  std::vector<int32_t> tokens{};

  uint64_t length() const { return sequence.length(); }
  Talk fork() const { return {sequence.fork(), tokens}; }
  void rollback(uint64_t count) {
    sequence.rollback(count);
    tokens.resize(tokens.size() - count);
  }
};

struct TalkStep {
  Talk& talk;
  std::span<const int32_t> tokens;
  bool prompt = false;
};

// Outputs of one step as bits: layer by layer, row by row.
using Bits = std::vector<uint32_t>;

// A row of [rows, heads, dim].
inline void add_row(const Tensor& of, uint64_t row, Bits& bits) {
  for (const float value : floats_of(of.slice(0, row, 1)))
    bits.push_back(std::bit_cast<uint32_t>(value));
}

class Server {
 public:
  Server(const Device& device, const KvPoolOptions& options, const KvBatchOptions& bounds = {},
         uint64_t heads_per_kv = 2)
      : pool(device, options), batch(pool, bounds), encoder(device), heads_per_kv_(heads_per_kv) {}

  // A layer that shares a cache has query heads of its own.
  uint64_t heads(uint64_t layer) const {
    const KvLayer& l = pool.layers()[layer];
    return l.kv_heads * (heads_per_kv_ + (l.kv_shared_layer_index ? 1 : 0));
  }

  Talk talk() const { return {pool.sequence()}; }
  Talk match(std::span<const int32_t> tokens) const {
    Talk made{pool.match(tokens)};
    made.tokens.assign(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(made.length()));
    return made;
  }

  void begin_step(std::span<const TalkStep> steps) {
    std::vector<KvStep> list;
    for (const TalkStep& step : steps)
      list.push_back({step.talk.sequence, step.tokens.size(), step.prompt});
    batch.begin_step(encoder, list);
  }

  void append(std::span<const TalkStep> steps, uint64_t layer) {
    const KvLayer& l = pool.layers()[layer];
    if (l.kv_shared_layer_index) return;
    batch.append(encoder, layer, rows(steps, {layer, 0}, l.kv_heads, l.head_dim),
                 rows(steps, {layer, 1}, l.kv_heads, l.v_head_dim));
  }

  // Keys and values alone.
  void fill(std::span<const TalkStep> steps) {
    begin_step(steps);
    for (uint64_t layer = 0; layer < pool.options().layers.size(); ++layer) append(steps, layer);
    encoder.submit().wait();
    note(steps);
  }
  void fill(Talk& talk, std::span<const int32_t> tokens) {
    const TalkStep step{talk, tokens, true};
    fill(std::span(&step, 1));
  }

  // A whole step: each sequence's outputs, row after row, of all layers.
  std::vector<Bits> run(std::span<const TalkStep> steps) {
    begin_step(steps);
    std::vector<Tensor> outs;
    for (uint64_t layer = 0; layer < pool.layers().size(); ++layer) {
      const KvLayer& l = pool.layers()[layer];
      append(steps, layer);
      const Tensor q = rows(steps, {layer, 2}, heads(layer), l.head_dim);
      outs.push_back(encoder.device().tensor(DType::f32, {q.shape(0), heads(layer), l.v_head_dim}));
      batch.attend(encoder, layer, {.q = q, .out = outs.back()}, {.scale = 0.125f});
    }
    encoder.submit().wait();
    note(steps);
    std::vector<Bits> all;
    uint64_t first = 0;
    for (const TalkStep& step : steps) {
      Bits bits;
      for (uint64_t row = first; row < first + step.tokens.size(); ++row) {
        for (const Tensor& out : outs) add_row(out, row, bits);
      }
      first += step.tokens.size();
      all.push_back(std::move(bits));
    }
    return all;
  }
  Bits run(Talk& talk, std::span<const int32_t> tokens, bool prompt = false) {
    const TalkStep step{talk, tokens, prompt};
    return run(std::span(&step, 1)).front();
  }
  // A prompt in steps of at most so many tokens.
  Bits prompt(Talk& talk, std::span<const int32_t> tokens, uint64_t chunk) {
    Bits bits;
    while (!tokens.empty()) {
      const size_t count = std::min<size_t>(chunk, tokens.size());
      const Bits part = run(talk, tokens.first(count), true);
      bits.insert(bits.end(), part.begin(), part.end());
      tokens = tokens.subspan(count);
    }
    return bits;
  }

  static void note(std::span<const TalkStep> steps) {
    for (const TalkStep& step : steps)
      step.talk.tokens.insert(step.talk.tokens.end(), step.tokens.begin(), step.tokens.end());
  }

  // Layer, and 0, 1 or 2 for K, V or Q.
  struct What {
    uint64_t layer, role;
  };
  Tensor rows(std::span<const TalkStep> steps, const What& what, uint64_t row_heads,
              uint64_t dim) const {
    uint64_t count = 0;
    for (const TalkStep& step : steps) count += step.tokens.size();
    std::vector<float> values;
    values.reserve(count * row_heads * dim);
    for (const TalkStep& step : steps) {
      for (uint64_t i = 0; i < step.tokens.size(); ++i) {
        put_row(values,
                {static_cast<uint64_t>(step.tokens[i]), step.talk.tokens.size() + i, what.layer,
                 what.role},
                row_heads * dim);
      }
    }
    return tensor_of(encoder.device(), values, {count, row_heads, dim});
  }

  KvPool pool;
  KvBatch batch;
  Encoder encoder;

 private:
  uint64_t heads_per_kv_;

  static void put_row(std::vector<float>& values, std::initializer_list<uint64_t> seed,
                      uint64_t count) {
    uint64_t state = 0x9E3779B97F4A7C15u;
    for (const uint64_t part : seed) state = (state ^ part) * 0xBF58476D1CE4E5B9u + 1;
    for (uint64_t i = 0; i < count; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      values.push_back(static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-30f);
    }
  }
};

inline void expect_no_page_used(const KvPool& pool) {
  for (const KvGroupInfo& group : pool.describe().groups) {
    EXPECT_EQ(group.used, 0u) << group.name;
    EXPECT_EQ(group.free + group.cached, group.pages) << group.name;
  }
}

}  // namespace gyre::test
