#include "prepare/record_model.h"

#include <algorithm>
#include <initializer_list>

#include "gyre/kv_batch.h"
#include "gyre/kv_cache.h"
#include "gyre/rope.h"
#include "ops/rope_layout.h"
#include "runtime/require.h"

namespace gyre {
namespace {

constexpr const char* kOp = "prepare";

uint64_t value_dim(const ModelShape& m) { return m.v_head_dim != 0 ? m.v_head_dim : m.head_dim; }

uint64_t most_tokens(const ModelShape& m) { return std::min(m.step_tokens, m.context); }

// Layers that are alike have the same kernels.
std::vector<KvLayer> distinct(const std::vector<KvLayer>& layers) {
  std::vector<KvLayer> some;
  for (const KvLayer& layer : layers) {
    if (std::ranges::find(some, layer) == some.end()) some.push_back(layer);
  }
  return some;
}

// Few tokens have kernels by their number; from some number on all are alike.
std::vector<uint64_t> token_counts(const ModelShape& m) {
  constexpr uint64_t kEach = 64;
  std::vector<uint64_t> counts;
  const uint64_t most = most_tokens(m);
  for (uint64_t tokens = 1; tokens < most; tokens += tokens < kEach ? 1 : tokens)
    counts.push_back(tokens);
  counts.push_back(most);
  return counts;
}

// The tensors of a step, for as many tokens as one may have.
struct Rows {
  Rows(const Device& device, const ModelShape& m, uint64_t tokens)
      : q(device.tensor(m.dtype, {tokens, m.heads, m.head_dim})),
        k(device.tensor(m.dtype, {tokens, m.kv_heads, m.head_dim})),
        v(device.tensor(m.dtype, {tokens, m.kv_heads, value_dim(m)})),
        out(device.tensor(m.out_dtype.value_or(m.dtype), {tokens, m.heads, value_dim(m)})) {}
  Rows(const Rows& all, uint64_t tokens)
      : q(all.q.slice(0, 0, tokens)),
        k(all.k.slice(0, 0, tokens)),
        v(all.v.slice(0, 0, tokens)),
        out(all.out.slice(0, 0, tokens)) {}

  Tensor q, k, v, out;
};

uint64_t rope_axes(const ModelShape& m) {
  return m.rope ? checked_rope_layout(kOp, m.head_dim, *m.rope).axes : 1;
}

bool rotates(const ModelShape& m) { return m.rope || m.norm; }

Tensor positions_of(const Device& device, const ModelShape& m, uint64_t tokens) {
  const uint64_t axes = rope_axes(m);
  return device.tensor(DType::i32, axes == 1 ? Dims{tokens} : Dims{axes, tokens});
}

void record_rope(Encoder& encoder, const ModelShape& m, const Rows& rows) {
  if (!rotates(m)) return;
  const Tensor positions = positions_of(encoder.device(), m, rows.q.shape(0));
  if (m.norm) {
    norm_rope(encoder,
              {.x = rows.q, .positions = positions, .out = rows.q, .k = rows.k, .k_out = rows.k},
              {.rope = m.rope});
  } else {
    rope(encoder,
         {.x = rows.q, .positions = positions, .out = rows.q, .k = rows.k, .k_out = rows.k},
         *m.rope);
  }
}

// rope and append in one: Target is a KvCache or a KvBatch.
template <class Target>
void record_rope_append(Encoder& encoder, const ModelShape& m, const Rows& rows, uint64_t layer,
                        Target& target) {
  RopeAppendOptions options{.rope = m.rope};
  if (m.norm) options.norm = RopeNorm{};
  const Tensor positions = positions_of(encoder.device(), m, rows.q.shape(0));
  target.rope_append(
      encoder, layer,
      {.q = rows.q, .q_out = rows.q, .k = rows.k, .v = rows.v, .positions = positions}, options);
}

void record_cache(const Device& device, const ModelShape& m, const Rows& all,
                  const std::vector<KvLayer>& layers) {
  KvCache cache(device, {.kv_heads = m.kv_heads,
                         .head_dim = m.head_dim,
                         .v_head_dim = m.v_head_dim,
                         .capacity = m.context,
                         .layers = layers,
                         .step_tokens = m.step_tokens});
  Encoder encoder(device);
  const auto record_layers = [&](const Rows& rows, const Tensor& tree_mask) {
    for (uint64_t i = 0; i < layers.size(); ++i) {
      cache.append(encoder, i, rows.k, rows.v);
      cache.attend(encoder, i, {.q = rows.q, .out = rows.out}, {.mask = {.tree_mask = tree_mask}});
    }
  };
  for (const uint64_t tokens : token_counts(m)) {
    const Rows rows(all, tokens);
    record_rope(encoder, m, rows);
    for (uint64_t i = 0; i < layers.size() && rotates(m); ++i)
      record_rope_append(encoder, m, rows, i, cache);
    record_layers(rows, {});
    constexpr uint64_t kTreeTokens = 64;  // AttentionInputs'
    if (m.tree_mask && tokens <= kTreeTokens)
      record_layers(rows, device.tensor(DType::u8, {tokens, tokens}));
    encoder.clear();
  }
  cache.begin_step(encoder, 1);
  record_layers(Rows(all, 1), {});
  encoder.submit();
  const KvCache copy = cache.fork(encoder);
  encoder.submit();
}

// Two sequences that share a page, which the first step of one of them copies.
void record_fork(const KvPool& pool, Encoder& encoder, const Rows& all, uint64_t layers) {
  KvBatch batch(pool, {.max_sequences = 1, .max_tokens = 1});
  KvSequence first = pool.sequence();
  const auto step = [&](KvSequence& sequence) {
    batch.begin_step(encoder, {{sequence, 1}});
    encoder.submit();
    for (uint64_t i = 0; i < layers; ++i) {
      batch.append(encoder, i, all.k.slice(0, 0, 1), all.v.slice(0, 0, 1));
      batch.attend(encoder, i, {.q = all.q.slice(0, 0, 1), .out = all.out.slice(0, 0, 1)});
    }
    encoder.submit();
  };
  step(first);
  KvSequence second = first.fork();
  step(second);
}

void record_batch(const Device& device, const ModelShape& m, const Rows& all,
                  const std::vector<KvLayer>& layers) {
  constexpr uint64_t kMorePages = 2;  // for record_fork()
  require(m.page_tokens != 0, kOp, ": page_tokens must not be 0");
  const uint64_t pages = (m.context - 1) / m.page_tokens + 1 + kMorePages;
  const KvPool pool(device, {.kv_heads = m.kv_heads,
                             .head_dim = m.head_dim,
                             .v_head_dim = m.v_head_dim,
                             .layers = layers,
                             .pages = pages,
                             .page_tokens = m.page_tokens,
                             .sequences = m.max_sequences,
                             .step_tokens = m.step_tokens});
  Encoder encoder(device);
  for (const uint64_t tokens : token_counts(m)) {
    KvBatch batch(pool, {.max_sequences = m.max_sequences,
                         .max_tokens = tokens,
                         .max_query_length = tokens,
                         .max_kv_length = m.context});
    const Rows rows(all, tokens);
    if (rotates(m)) {
      batch.record();
      for (uint64_t i = 0; i < layers.size(); ++i) record_rope_append(encoder, m, rows, i, batch);
      batch.end_step();
      encoder.clear();
    }
    batch.record();
    record_rope(encoder, m, rows);
    for (uint64_t i = 0; i < layers.size(); ++i) {
      batch.append(encoder, i, rows.k, rows.v);
      batch.attend(encoder, i, {.q = rows.q, .out = rows.out});
    }
    batch.end_step();
    encoder.clear();
  }
  record_fork(pool, encoder, all, layers.size());
}

void check_shape(const ModelShape& m) {
  require(m.heads != 0 && m.kv_heads != 0 && m.heads % m.kv_heads == 0, kOp,
          ": heads must be a multiple of kv_heads, got ", m.heads, " and ", m.kv_heads);
  require(m.context != 0, kOp, ": context must be given");
  require(m.step_tokens != 0, kOp, ": step_tokens must not be 0");
  require(m.use_cache || m.use_batch, kOp, ": use_cache or use_batch must be set");
}

}  // namespace

void record_model(const Device& device, const ModelShape& shape) {
  check_shape(shape);
  const std::vector<KvLayer> layers = distinct(shape.layers);
  const Rows all(device, shape, most_tokens(shape));
  if (shape.use_cache) record_cache(device, shape, all, layers);
  if (shape.use_batch) record_batch(device, shape, all, layers);
}

}  // namespace gyre
