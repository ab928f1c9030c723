#include "kv_fill.h"

#include <algorithm>
#include <cmath>

#include "gyre/gyre.h"
#include "runtime/require.h"

namespace gyre::bench {
namespace {

bool compressed(const KvBuffer& cache) { return describe(cache.shape.format).compressed; }

void write(Encoder& encoder, const Tensor& tokens, const KvBuffer& cache, uint64_t at) {
  if (!compressed(cache)) {
    kv_copy(encoder, {.k = tokens, .k_cache = cache.codes.permute({1, 0, 2})}, {.position = at});
  } else if (cache.shape.role == KvRole::k) {
    kv_quantize(encoder, {.k = tokens, .k_cache = cache}, {.position = at});
  } else {
    kv_quantize(encoder, {.v = tokens, .v_cache = cache}, {.position = at});
  }
}

}  // namespace

KvPair allocate(const Device& device, const AttentionShape& s, const FormatPair& formats) {
  return {KvBuffer::allocate(device, {formats.k, KvRole::k, s.kv_heads, s.context, s.head_dim}),
          KvBuffer::allocate(device, {formats.v, KvRole::v, s.kv_heads, s.context, s.v_dim()})};
}

void fill(const Device& device, const KvPair& cache, const Tensor& k, const Tensor& v) {
  const uint64_t capacity = cache.k.shape.capacity, part = k.shape(0);
  for (uint64_t at = 0; at < capacity; at += part) {
    const uint64_t count = std::min(part, capacity - at);
    Encoder encoder(device);
    write(encoder, k.slice(0, 0, count), cache.k, at);
    write(encoder, v.slice(0, 0, count), cache.v, at);
    encoder.submit().wait();
  }
}

Tensor decoded(const Device& device, const KvBuffer& cache) {
  Tensor out =
      device.tensor(DType::f32, {cache.shape.capacity, cache.shape.kv_heads, cache.shape.head_dim});
  Encoder encoder(device);
  if (compressed(cache)) {
    kv_dequantize(encoder, {cache, out});
  } else {
    kv_copy(encoder, {.k = cache.codes.permute({1, 0, 2}), .k_cache = out});
  }
  encoder.submit().wait();
  return out;
}

double token_bytes(const Device& device, const FormatPair& formats, AttentionShape shape) {
  shape.context = 8;  // V comes in tiles of 8 tokens
  return static_cast<double>(allocate(device, shape, formats).bytes()) / 8;
}

void check_fits(std::string_view who, const Device& device, double bytes, uint64_t context) {
  const uint64_t memory = device.info().memory_bytes;
  if (bytes < static_cast<double>(memory)) return;
  fail(ErrorCode::out_of_memory, who, ": a context of ", context, " needs about ",
       std::ceil(bytes / (1 << 30)), " GiB for the caches of one layer, ", device.info().name,
       " has ", memory >> 30, " GiB");
}

}  // namespace gyre::bench
