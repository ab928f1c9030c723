#pragma once
// Attention over one head with numbers that a test writes down itself.

#include "gyre_test.h"
#include "kv_codec/kv_codec_fixture.h"
#include "test_device.h"

namespace gyre::test {

inline Device cpu_device(uint32_t threads = 2) { return Device::open("cpu", {.threads = threads}); }

// One of each kind.
inline constexpr KvFormat kSomeFormats[] = {KvFormat::f32,        KvFormat::f16, KvFormat::bf16,
                                            KvFormat::tq8,        KvFormat::tq4, KvFormat::tq3,
                                            KvFormat::mlx_native4};

struct Heads {
  uint64_t count, dim;
};

// Rows [tokens, kv_heads, head_dim] into a cache of exactly that many slots.
inline KvBuffer cache_of(const Device& device, KvFormat format, KvRole role,
                         const std::vector<float>& rows, const Heads& heads) {
  const auto [kv_heads, head_dim] = heads;
  const uint64_t tokens = rows.size() / kv_heads / head_dim;
  const KvBuffer cache = KvBuffer::allocate(device, {format, role, kv_heads, tokens, head_dim});
  const Tensor source = tensor_of(device, rows, {tokens, kv_heads, head_dim});
  if (role == KvRole::k || !describe(format).compressed) {
    store(device, source, cache);
  } else {  // kernels of V alone are not emulated for every format
    const KvBuffer k = KvBuffer::allocate(device, {format, KvRole::k, kv_heads, tokens, head_dim});
    kv_quantize(RunNow(device), {.k = source, .k_cache = k, .v = source, .v_cache = cache});
  }
  return cache;
}

// One KV head and one query head per token; K and V of one format.
struct Small {
  KvFormat format = KvFormat::f32;
  uint64_t dim = 64;
  std::vector<float> q, k, v;  // [tokens, dim], [keys, dim], [keys, dim]
  AttentionOptions options{.scale = 1.0f};
  std::vector<uint8_t> tree_mask;
  std::vector<float> sink_logits;
  uint64_t splits = 0;  // 0: attention(); else in two steps

  struct Answer {
    std::vector<float> out, lse;
    bool finite(uint64_t token, uint64_t head_dim) const {
      const auto row = std::span(out).subspan(token * head_dim, head_dim);
      return std::isfinite(lse[token]) &&
             std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); });
    }
  };

  Answer run() const {
    const Device d = test_device();
    const uint64_t tokens = q.size() / dim;
    AttentionInputs in;
    in.q = tensor_of(d, q, {tokens, 1, dim});
    in.k_cache = cache_of(d, format, KvRole::k, k, {1, dim});
    in.v_cache = cache_of(d, format, KvRole::v, v, {1, dim});
    in.out = d.tensor(DType::f32, {tokens, 1, dim});
    in.lse = d.tensor(DType::f32, {tokens, 1});
    AttentionOptions o = options;
    const Tensor sinks = sink_logits.empty() ? Tensor() : tensor_of(d, sink_logits, {1});
    if (!tree_mask.empty()) o.mask.tree_mask = tensor_of(d, tree_mask, {tokens, tokens});
    if (o.length == 0) o.length = k.size() / dim;
    Encoder encoder(d);
    if (splits == 0) {
      o.mask.sink_logits = sinks;
      attention(encoder, in, o);
    } else {
      const Tensor partial =
          d.tensor(DType::f32, attention_partial_shape(splits, in.q.shape(), dim));
      attention_partial(encoder, {in.q, in.k_cache, in.v_cache, partial}, o);
      attention_merge(encoder, {partial, in.out, in.lse, sinks});
    }
    encoder.submit().wait();
    return {floats_of(in.out), floats_of(in.lse)};
  }
};

inline Small random_small(KvFormat format, uint64_t tokens, uint64_t keys, uint32_t seed = 1) {
  Small s{.format = format};
  s.q = gaussian_rows(tokens, s.dim, seed);
  s.k = gaussian_rows(keys, s.dim, seed + 1);
  s.v = gaussian_rows(keys, s.dim, seed + 2);
  s.options.scale = 1 / 8.0f;
  return s;
}

}  // namespace gyre::test
