// Attention on a GPU, one format after the other: the time of its bytes at the speed of a copy is
// the limit, the first format what the others are compared with.
#include "gpu_attention.h"

#include <algorithm>
#include <cmath>

#include "attention_double.h"
#include "gyre/gyre.h"
#include "kv_fill.h"
#include "noise.h"

namespace gyre::bench {
namespace {

constexpr uint64_t kSourceTokens = 4096;  // repeated to fill a longer context

float scale_of(const AttentionShape& s) { return 1 / std::sqrt(static_cast<float>(s.q_dim())); }

struct Queries {
  Tensor q, out;
  Tensor scratch{};  // of prompts, as a cache's layers share it
};

void record(Encoder& encoder, const AttentionShape& s, const KvPair& cache, Queries& queries) {
  attention(encoder,
            {.q = queries.q,
             .k_cache = cache.k,
             .v_cache = cache.v,
             .out = queries.out,
             .latent = s.latent(),
             .scratch = s.tokens > 1 ? &queries.scratch : nullptr},
            {.length = s.context, .scale = scale_of(s)});
}

// Over what the cache holds, in double precision; `gain` scales the query.
double error_of(const Device& device, const AttentionShape& s, const FormatPair& pair, float gain) {
  const Tensor tokens = noise(device, {s.context, s.kv_heads, s.head_dim}, 1);
  const KvPair cache = allocate(device, s, pair);
  fill(device, cache, tokens, tokens.slice(2, 0, s.v_dim()));
  std::vector<float> values = floats_of(noise(device, {1, s.heads, s.q_dim()}, 2));
  for (float& value : values) value *= gain;
  const Tensor q = device.tensor(DType::f32, {1, s.heads, s.q_dim()});
  q.write_from(std::span<const float>(values));
  const Tensor out = device.tensor(DType::f32, {1, s.heads, s.head_dim});
  Encoder encoder(device);
  Queries queries{q, out};
  record(encoder, s, cache, queries);
  encoder.submit().wait();
  return attention_nmse(out, q, decoded(device, cache.k), decoded(device, cache.v));
}

// Time of one command, roughly: prefill takes far longer than reading its bytes.
double least_us(const Device& device, const AttentionShape& s, const KvPair& cache,
                Queries& queries, double limit_us) {
  if (s.tokens == 1) return limit_us;
  double us = 0;
  for (int round = 0; round < 2; ++round) {  // the first one may compile
    Encoder encoder(device);
    record(encoder, s, cache, queries);
    const auto begin = std::chrono::steady_clock::now();
    encoder.submit().wait();
    us = us_since(begin);
  }
  return std::max(us, limit_us);
}

struct Measured {
  double us = 0, limit_us = 0;
  uint64_t bytes = 0;
};

Measured measure(const GpuContext& gpu, const AttentionShape& s, const FormatPair& pair,
                 const Tensor& tokens, Queries& queries) {
  std::vector<KvPair> caches;
  do {
    caches.push_back(allocate(gpu.device, s, pair));
    fill(gpu.device, caches.back(), tokens, tokens.slice(2, 0, s.v_dim()));
  } while (caches.size() < sets_for(caches[0].bytes()));
  const uint64_t bytes = caches[0].bytes();
  const double limit_us = static_cast<double>(bytes) / gpu.limit_gbps / 1e3;
  const uint64_t count =
      commands_for(least_us(gpu.device, s, caches[0], queries, limit_us), caches.size());
  Encoder encoder(gpu.device);
  for (uint64_t i = 0; i < count; ++i) {
    const KvPair& cache = caches[i % caches.size()];
    record(encoder, s, cache, queries);
  }
  return {replay_us(encoder.instantiate(), count), limit_us, bytes};
}

Row make_row(const GpuContext& gpu, const AttentionRun& run, const FormatPair& pair,
             const Measured& m) {
  const AttentionShape& s = run.shape;
  Shape fields = {
      {"heads", s.heads},      {"kv_heads", s.kv_heads},         {"head_dim", s.head_dim},
      {"context", s.context},  {"k", std::string(name(pair.k))}, {"v", std::string(name(pair.v))},
      {"limit_us", m.limit_us}};
  if (s.latent()) fields.emplace_back("rotary_dim", s.rotary_dim);
  if (s.tokens != 1) {
    fields.emplace_back("tokens", s.tokens);
    fields.emplace_back("gflops", attention_flops(s) / m.us / 1e3);
  } else if (run.errors) {
    fields.emplace_back("nmse", error_of(gpu.device, s, pair, 1));
    fields.emplace_back("nmse_sharp", error_of(gpu.device, s, pair, 8));
  }
  return gpu_row(gpu, s.tokens == 1 ? "attention" : "attention prefill", std::move(fields), m.us,
                 m.bytes);
}

}  // namespace

void check_gpu_memory(const Device& device, const AttentionRun& run) {
  const AttentionShape& s = run.shape;
  double cache_bytes = 0;
  for (const FormatPair& pair : run.formats) {
    const double cache = static_cast<double>(s.context) * token_bytes(device, pair, s);
    cache_bytes =
        std::max(cache_bytes, cache * static_cast<double>(sets_for(static_cast<uint64_t>(cache))));
  }
  const auto queries = static_cast<double>(s.tokens * s.heads * s.q_dim());
  const auto source = static_cast<double>(kSourceTokens * s.kv_heads * s.head_dim);
  // Both are f32 first; the output is as large as the queries.
  const double inputs = (sizeof(float) + 2 * sizeof(uint16_t)) * (queries + source);
  check_fits("bench", device, cache_bytes + inputs, s.context);
}

std::vector<Row> measure_gpu_attention(const GpuContext& gpu, const AttentionRun& run,
                                       const Progress& progress) {
  const AttentionShape& s = run.shape;
  progress.begin("attention " + std::to_string(s.heads) + "/" + std::to_string(s.kv_heads) + "/" +
                 std::to_string(s.head_dim) + " at " + std::to_string(s.context) +
                 (s.tokens == 1 ? "" : ", " + std::to_string(s.tokens) + " queries"));
  const Tensor tokens = noise_tokens(gpu.device, kSourceTokens, s.kv_heads, s.head_dim);
  const FormatPair& first = run.formats.front();
  double first_us = 0;
  std::vector<Row> rows;
  for (const FormatPair& pair : run.formats) {
    const DType dtype = query_dtype(pair.k);
    Queries queries = {noise_tokens(gpu.device, s.tokens, s.heads, s.q_dim(), dtype),
                       gpu.device.tensor(dtype, {s.tokens, s.heads, s.head_dim})};
    const Measured m = measure(gpu, s, pair, tokens, queries);
    if (rows.empty()) first_us = m.us;
    Row row = make_row(gpu, run, pair, m);
    row.set_against(std::string(name(first.k)) + "/" + std::string(name(first.v)), first_us);
    progress.done(row);
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace gyre::bench
