#include "serving_batch.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "gpu_timing.h"
#include "gyre/gyre.h"

namespace gyre::bench {
namespace {

constexpr uint64_t kSourceTokens = 4096;  // repeated to fill longer sequences

Tensor upload(const Device& device, const std::vector<int32_t>& values, const Dims& shape) {
  Tensor tensor = device.tensor(DType::i32, shape);
  tensor.write_from(std::span<const int32_t>(values));
  return tensor;
}

// Pages lie anywhere, as in a pool that has been in use. Sequences share the first ones.
std::vector<int32_t> make_table(const ServingShape& s, uint64_t width) {
  std::vector<int32_t> pages(s.pages());
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(7));  // NOLINT(cert-msc51-cpp): the same
  const uint64_t shared = s.shared / s.page_tokens;
  uint64_t next = shared;
  std::vector<int32_t> table(s.lengths.size() * width, 0);
  for (uint64_t i = 0; i < s.lengths.size(); ++i) {
    const uint64_t count = (s.lengths[i] + s.page_tokens - 1) / s.page_tokens;
    for (uint64_t page = 0; page < count; ++page)
      table[i * width + page] = page < shared ? pages[page] : pages[next++];
  }
  return table;
}

// Every slot of every page, so that no page holds zeros.
void fill_pages(const Device& device, const KvPages& pages) {
  const KvPageShape& shape = pages.shape;
  const uint64_t slots = pages.bytes.shape(0) * shape.page_tokens;
  const uint64_t part = std::min(slots, kSourceTokens);
  const Tensor tokens = noise_tokens(device, part, shape.kv_heads, shape.head_dim);
  for (uint64_t at = 0; at < slots; at += part) {
    const uint64_t count = std::min(part, slots - at);
    std::vector<int32_t> list(count);
    std::iota(list.begin(), list.end(), static_cast<int32_t>(at));
    const Tensor source = tokens.slice(0, 0, count);
    Encoder encoder(device);
    kv_write(encoder, {.k = source,
                       .v = shape.latent ? source.slice(2, 0, shape.v_head_dim) : source,
                       .pages = pages,
                       .slots = upload(device, list, {count})});
    encoder.submit().wait();
  }
}

}  // namespace

void ServingBatch::record(Encoder& encoder) const {
  PagedAttentionInputs in = inputs;
  in.scratch = scratch.get();
  attention(encoder, in, options);
}

void ServingBatch::record_write(Encoder& encoder) const {
  KvWriteInputs write = newest;
  write.k = write.v = inputs.out.slice(1, 0, shape.kv_heads);
  if (shape.rotary_dim != 0) write.v = write.k.slice(2, 0, shape.rotary_dim);
  kv_write(encoder, write);
}

ServingBatch make_serving_batch(const Device& device, const ServingShape& s,
                                const FormatPair& formats) {
  const uint64_t count = s.lengths.size();
  const uint64_t width = (s.longest() + s.page_tokens - 1) / s.page_tokens;
  const KvPageShape shape{.k = formats.k,
                          .v = formats.v,
                          .kv_heads = s.kv_heads,
                          .head_dim = s.head_dim,
                          .v_head_dim = s.rotary_dim,
                          .page_tokens = s.page_tokens,
                          .latent = s.rotary_dim != 0};
  ServingBatch batch;
  batch.shape = s;
  PagedAttentionInputs& in = batch.inputs;
  in.pages = KvPages::allocate(device, shape, s.pages());
  fill_pages(device, in.pages);
  const std::vector<int32_t> table = make_table(s, width);
  in.page_table = upload(device, table, {count, width});
  std::vector<int32_t> lengths(s.lengths.begin(), s.lengths.end()), begin(count + 1);
  for (uint64_t i = 0; i <= count; ++i) begin[i] = static_cast<int32_t>(i * s.tokens);
  in.kv_lengths = upload(device, lengths, {count});
  in.cu_seqlens_q = upload(device, begin, {count + 1});
  const uint64_t queries = count * s.tokens;
  const DType dtype = query_dtype(formats.k);
  in.q = noise_tokens(device, queries, s.heads, s.head_dim + s.rotary_dim, dtype);
  in.out = device.tensor(dtype, {queries, s.heads, s.head_dim});
  batch.options = {.max_query_length = s.tokens,
                   .min_query_length = s.tokens,
                   .max_kv_length = s.longest(),
                   .scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim + s.rotary_dim)),
                   .settled_keys = true};
  // As an engine does once per step, for all layers.
  Encoder encoder(device);
  in.schedule = attention_schedule(encoder,
                                   {.pages = in.pages,
                                    .tokens = queries,
                                    .heads = s.heads,
                                    .kv_lengths = in.kv_lengths,
                                    .cu_seqlens_q = in.cu_seqlens_q},
                                   batch.options);
  encoder.submit().wait();
  std::vector<int32_t> slots;
  for (uint64_t i = 0; i < queries; ++i) {
    const uint64_t row = i / s.tokens, key = s.lengths[row] - s.tokens + i % s.tokens,
                   page = static_cast<uint64_t>(table[row * width + key / s.page_tokens]);
    slots.push_back(static_cast<int32_t>(page * s.page_tokens + key % s.page_tokens));
  }
  batch.newest = {.pages = in.pages, .slots = upload(device, slots, {queries})};
  const uint64_t tokens = std::accumulate(s.lengths.begin(), s.lengths.end(), uint64_t{0});
  batch.bytes = tokens * (in.pages.bytes.shape(1) / s.page_tokens);
  return batch;
}

}  // namespace gyre::bench
