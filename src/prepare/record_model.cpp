#include "prepare/record_model.h"

#include <algorithm>

#include "cache/layers.h"
#include "gyre/attention.h"
#include "gyre/kv_batch.h"
#include "gyre/kv_cache.h"
#include "gyre/rope.h"
#include "gyre/write.h"
#include "ops/attention_latent.h"
#include "ops/rope_layout.h"
#include "runtime/require.h"

namespace gyre {
namespace {

constexpr const char* kOp = "prepare";

uint64_t largest_step(const ModelShape& m) { return std::min(m.step_tokens, m.context); }

// Layers that are alike have the same kernels, and a layer that shares a cache has its owner's.
std::vector<KvLayer> distinct(const std::vector<KvLayer>& layers) {
  std::vector<KvLayer> some;
  for (const KvLayer& layer : layers) {
    if (!shares_kv(layer) && std::ranges::find(some, layer) == some.end()) some.push_back(layer);
  }
  return some;
}

// Few tokens have kernels by their number; from some number on all are alike.
std::vector<uint64_t> token_counts(const ModelShape& m) {
  constexpr uint64_t kOneByOne = 64;
  std::vector<uint64_t> counts;
  const uint64_t largest = largest_step(m);
  for (uint64_t tokens = 1; tokens < largest; tokens += tokens < kOneByOne ? 1 : tokens)
    counts.push_back(tokens);
  counts.push_back(largest);
  return counts;
}

// Keys that a sequence in pages may have: of few, and of more than there is memory for, levels are
// not unpacked ahead.
std::vector<uint64_t> key_counts(const ModelShape& m) {
  std::vector<uint64_t> counts;
  for (const uint64_t keys : {m.context, uint64_t{2048}, uint64_t{128}})
    if (counts.empty() || keys < m.context) counts.push_back(keys);
  return counts;
}

// The tensors of a layer in a step, for as many tokens as one may have.
struct Rows {
  Rows(const Device& device, const ModelShape& m, const KvLayer& layer, uint64_t tokens)
      : Rows(device, m, layer, tokens, row_dims(layer.latent, layer.head_dim, layer.v_head_dim)) {}
  Rows(const Rows& all, uint64_t tokens)
      : q(all.q.slice(0, 0, tokens)),
        k(all.k.slice(0, 0, tokens)),
        v(all.v.slice(0, 0, tokens)),
        out(all.out.slice(0, 0, tokens)),
        latent(all.latent) {}

  Tensor q, k, v, out;
  bool latent = false;

  // rope() rotates these: in a latent layer the rotary coordinates of q, and v.
  Tensor rotated_q() const { return latent ? q.slice(2, k.shape(2), v.shape(2)) : q; }
  const Tensor& rotated_k() const { return latent ? v : k; }
  // Latent attention has no default.
  std::optional<float> scale() const { return latent ? std::optional(1.0f) : std::nullopt; }

 private:
  Rows(const Device& device, const ModelShape& m, const KvLayer& layer, uint64_t tokens,
       const RowDims& dims)
      : q(device.tensor(m.dtype, {tokens, m.heads, dims.query})),
        k(device.tensor(m.dtype, {tokens, layer.kv_heads, layer.head_dim})),
        v(device.tensor(m.dtype, {tokens, layer.kv_heads, layer.v_head_dim})),
        out(device.tensor(m.out_dtype.value_or(m.dtype), {tokens, m.heads, dims.out})),
        latent(layer.latent) {}
};

// The model's layers that differ, and the rows of each.
struct Layers {
  std::vector<KvLayer> layers;
  std::vector<Rows> rows;

  Layers with(uint64_t tokens) const {
    Layers made{layers, {}};
    for (const Rows& all : rows) made.rows.emplace_back(all, tokens);
    return made;
  }
};

bool rotates(const ModelShape& m) { return m.rope || m.norm; }

Tensor positions_of(const Device& device, const ModelShape& m, const Rows& rows) {
  const uint64_t tokens = rows.q.shape(0), head_dim = rows.rotated_k().shape(2);
  const uint64_t axes = m.rope ? checked_rope_layout(kOp, head_dim, *m.rope).axes : 1;
  return device.tensor(DType::i32, axes == 1 ? Dims{tokens} : Dims{axes, tokens});
}

void record_rope(Encoder& encoder, const ModelShape& m, const Rows& rows) {
  if (!rotates(m)) return;
  const Tensor positions = positions_of(encoder.device(), m, rows);
  const Tensor q = rows.rotated_q(), &k = rows.rotated_k();
  if (m.norm) {
    norm_rope(encoder, {.x = q, .positions = positions, .out = q, .k = k, .k_out = k},
              {.rope = m.rope});
  } else {
    rope(encoder, {.x = q, .positions = positions, .out = q, .k = k, .k_out = k}, *m.rope);
  }
}

// rope and append in one: Target is a KvCache or a KvBatch.
template <class Target>
void record_rope_append(Encoder& encoder, const ModelShape& m, const Layers& step, Target& target) {
  RopeAppendOptions options{.rope = m.rope};
  if (m.norm) options.norm = RopeNorm{};
  for (uint64_t i = 0; i < step.rows.size(); ++i) {
    const Rows& rows = step.rows[i];
    if (rows.latent) continue;
    const Tensor positions = positions_of(encoder.device(), m, rows);
    target.rope_append(
        encoder, i,
        {.q = rows.q, .q_out = rows.q, .k = rows.k, .v = rows.v, .positions = positions}, options);
  }
}

void record_cache(const Device& device, const ModelShape& m, const Layers& all) {
  KvCache cache(device,
                {.capacity = m.context, .layers = all.layers, .step_tokens = m.step_tokens});
  Encoder encoder(device);
  const auto record_layers = [&](const Layers& step, const Tensor& tree_mask) {
    for (uint64_t i = 0; i < step.rows.size(); ++i) {
      const Rows& rows = step.rows[i];
      cache.append(encoder, i, rows.k, rows.v);
      cache.attend(encoder, i, {.q = rows.q, .out = rows.out},
                   {.scale = rows.scale(), .mask = {.tree_mask = tree_mask}});
    }
  };
  for (const uint64_t tokens : token_counts(m)) {
    const Layers step = all.with(tokens);
    for (const Rows& rows : step.rows) record_rope(encoder, m, rows);
    if (rotates(m)) record_rope_append(encoder, m, step, cache);
    record_layers(step, {});
    constexpr uint64_t kTreeTokens = 64;  // AttentionInputs'
    if (m.tree_mask && tokens <= kTreeTokens)
      record_layers(step, device.tensor(DType::u8, {tokens, tokens}));
    encoder.clear();
  }
  cache.begin_step(encoder, 1);
  record_layers(all.with(1), {});
  encoder.submit();
  const KvCache copy = cache.fork(encoder);
  encoder.submit();
}

// Two sequences that share a page, which the first step of one of them copies.
void record_fork(const KvPool& pool, Encoder& encoder, const Layers& one) {
  KvBatch batch(pool, {.max_sequences = 1, .max_tokens = 1});
  KvSequence first = pool.sequence();
  const auto step = [&](KvSequence& sequence) {
    batch.begin_step(encoder, {{sequence, 1}});
    encoder.submit();
    for (uint64_t i = 0; i < one.rows.size(); ++i) {
      batch.append(encoder, i, one.rows[i].k, one.rows[i].v);
      batch.attend(encoder, i, {.q = one.rows[i].q, .out = one.rows[i].out},
                   {.scale = one.rows[i].scale()});
    }
    encoder.submit();
  };
  step(first);
  KvSequence second = first.fork();
  step(second);
}

void record_batch_step(Encoder& encoder, const ModelShape& m, const KvPool& pool,
                       const Layers& step, uint64_t sequences, uint64_t tokens, uint64_t keys) {
  KvBatch batch(pool, {.max_sequences = sequences,
                       .max_tokens = tokens,
                       .max_query_length = tokens,
                       .max_kv_length = keys});
  const bool any_rotated =
      std::ranges::any_of(step.rows, [](const Rows& rows) { return !rows.latent; });
  if (rotates(m) && any_rotated) {
    batch.record();
    record_rope_append(encoder, m, step, batch);
    batch.end_step();
    encoder.clear();
  }
  batch.record();
  for (uint64_t i = 0; i < step.rows.size(); ++i) {
    const Rows& rows = step.rows[i];
    record_rope(encoder, m, rows);
    batch.append(encoder, i, rows.k, rows.v);
    batch.attend(encoder, i, {.q = rows.q, .out = rows.out}, {.scale = rows.scale()});
  }
  batch.end_step();
  encoder.clear();
}

void record_batch(const Device& device, const ModelShape& m, const Layers& all) {
  constexpr uint64_t kMorePages = 2;  // for record_fork()
  require(m.page_tokens != 0, kOp, ": page_tokens must not be 0");
  const uint64_t pages = (m.context - 1) / m.page_tokens + 1 + kMorePages;
  const KvPool pool(device, {.layers = all.layers,
                             .pages = pages,
                             .page_tokens = m.page_tokens,
                             .sequences = m.max_sequences,
                             .step_tokens = m.step_tokens});
  Encoder encoder(device);
  for (const uint64_t tokens : token_counts(m)) {
    const Layers step = all.with(tokens);
    for (const uint64_t sequences : {uint64_t{1}, m.max_sequences}) {
      for (const uint64_t keys : key_counts(m))
        record_batch_step(encoder, m, pool, step, sequences, tokens, keys);
    }
  }
  record_fork(pool, encoder, all.with(1));
}

// A step of an engine that owns the pages: `sequences` of them have up to `tokens` queries each.
void record_page_step(Encoder& encoder, const ModelShape& m, const KvPages& pages,
                      const KvLayer& layer, const Rows& rows, uint64_t sequences, uint64_t tokens) {
  const Device& device = encoder.device();
  Tensor scratch;
  kv_write(encoder, {.k = rows.k,
                     .v = rows.v,
                     .pages = pages,
                     .slots = device.tensor(DType::i64, {rows.k.shape(0)})});
  PagedAttentionInputs inputs{.q = rows.q, .pages = pages, .out = rows.out, .scratch = &scratch};
  inputs.page_table = device.tensor(DType::i32, {sequences, (m.context - 1) / m.page_tokens + 1});
  inputs.kv_lengths = device.tensor(DType::i32, {sequences});
  inputs.cu_seqlens_q = device.tensor(DType::i32, {sequences + 1});
  const Tensor is_prefill = device.tensor(DType::u8, {sequences});
  for (const uint64_t fewest : {uint64_t{1}, tokens}) {
    for (const Tensor& prompts : {Tensor(), is_prefill}) {
      inputs.is_prefill = prompts;
      for (const uint64_t keys : key_counts(m)) {
        attention(encoder, inputs,
                  {.max_query_length = tokens,
                   .min_query_length = fewest,
                   .max_kv_length = keys,
                   .scale = rows.scale(),
                   .mask = {.window = layer.window}});
      }
    }
  }
}

void record_pages(const Device& device, const ModelShape& m, const Layers& all) {
  Encoder encoder(device);
  for (uint64_t i = 0; i < all.layers.size(); ++i) {
    const KvLayer& layer = all.layers[i];
    const KvPageShape shape{.k = layer.k,
                            .v = layer.v,
                            .kv_heads = layer.kv_heads,
                            .head_dim = layer.head_dim,
                            .v_head_dim = layer.v_head_dim,
                            .page_tokens = m.page_tokens,
                            .latent = layer.latent};
    const KvPages pages = KvPages::allocate(device, shape, 1);
    for (const uint64_t tokens : token_counts(m)) {
      for (const uint64_t sequences : {uint64_t{1}, m.max_sequences}) {
        const uint64_t step = std::min(m.step_tokens, sequences * tokens);
        record_page_step(encoder, m, pages, layer, Rows(device, m, layer, step), sequences, tokens);
        encoder.clear();
      }
    }
  }
}

void check_shape(const ModelShape& m, const std::vector<KvLayer>& layers) {
  for (const KvLayer& layer : layers) {
    require(m.heads != 0 && m.heads % layer.kv_heads == 0, kOp,
            ": heads must be a multiple of kv_heads, got ", m.heads, " and ", layer.kv_heads);
  }
  require(m.context != 0, kOp, ": context must be given");
  require(m.step_tokens != 0, kOp, ": step_tokens must not be 0");
  require(m.use_cache || m.use_batch || m.use_pages, kOp,
          ": use_cache, use_batch or use_pages must be set");
  for (const KvLayer& layer : layers) {
    require(!m.use_pages || (layer.tail == 0 && layer.sink_tokens == 0), kOp,
            ": layers in an engine's pages have no tail and no sink tokens, got ", layer.tail,
            " and ", layer.sink_tokens);
  }
}

}  // namespace

void record_model(const Device& device, const ModelShape& shape) {
  Layers all{distinct(resolve_layers(kOp, shape)), {}};
  check_shape(shape, all.layers);
  for (const KvLayer& layer : all.layers)
    all.rows.emplace_back(device, shape, layer, largest_step(shape));
  if (shape.use_cache) record_cache(device, shape, all);
  if (shape.use_batch) record_batch(device, shape, all);
  if (shape.use_pages) record_pages(device, shape, all);
}

}  // namespace gyre
