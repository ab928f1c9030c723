// A decode step of a whole model through one replayed graph against its kernels alone, and what a
// 16-bit tail costs and buys.
#include <array>
#include <cmath>
#include <random>

#include "attention_double.h"
#include "bench.h"
#include "gyre/gyre.h"
#include "machine_kernels.h"
#include "noise.h"
#include "timing.h"

namespace gyre::bench {
namespace {

constexpr uint64_t kLayers = 32, kHeads = 32, kKvHeads = 8, kDim = 128, kContext = 4096;
constexpr uint64_t kTail = 128, kPart = 512;
constexpr KvLayer kPlain{.k = KvFormat::tq4, .v = KvFormat::tq4},
    kTailed{.k = KvFormat::tq4, .v = KvFormat::tq4, .tail = kTail};

const float kScale = 1.0f / std::sqrt(static_cast<float>(kDim));

KvCache make_cache(const Device& device, uint64_t layers, const KvLayer& layer) {
  return {device,
          {.kv_heads = kKvHeads,
           .head_dim = kDim,
           .capacity = 2 * kContext,
           .layers = std::vector<KvLayer>(layers, layer),
           .step_tokens = kPart}};
}

// Appends the same kContext tokens to every layer.
void fill(Encoder& encoder, KvCache& cache, const Tensor& k, const Tensor& v) {
  for (uint64_t at = 0; at < kContext; at += kPart) {
    cache.begin_step(encoder, kPart);
    for (uint64_t layer = 0; layer < cache.options().layers.size(); ++layer)
      cache.append(encoder, layer, k.slice(0, at, kPart), v.slice(0, at, kPart));
    encoder.submit().wait();
  }
}

struct Token {
  Tensor q, k, v, out;
  explicit Token(const Device& device)
      : q(noise(device, {1, kHeads, kDim}, 4)),
        k(noise(device, {1, kKvHeads, kDim}, 5)),
        v(noise(device, {1, kKvHeads, kDim}, 6)),
        out(device.tensor(DType::f32, {1, kHeads, kDim})) {}
};

enum class Part : uint8_t { rope, append, attend, rope_append };

void record(Encoder& encoder, const KvCache& cache, const Token& t, uint64_t layer, Part part) {
  switch (part) {
    case Part::rope:
      return rope(encoder,
                  {.x = t.q, .positions = cache.positions(1), .out = t.q, .k = t.k, .k_out = t.k});
    case Part::rope_append:
      return cache.rope_append(encoder, layer, {.q = t.q, .q_out = t.q, .k = t.k, .v = t.v});
    case Part::append:
      return cache.append(encoder, layer, t.k, t.v);
    case Part::attend:
      return cache.attend(encoder, layer, {.q = t.q, .out = t.out}, {.scale = kScale});
  }
}

Graph record_layers(Encoder& encoder, const KvCache& cache, const Token& token,
                    std::span<const Part> parts) {
  for (uint64_t layer = 0; layer < cache.options().layers.size(); ++layer) {
    for (const Part part : parts) record(encoder, cache, token, layer, part);
  }
  return encoder.instantiate();
}

Row make_row(const Device& device, const Options& options, const char* op, const char* against,
             double us, double against_us) {
  Row row = make_row(options, device, op, {}, us);
  row.set_against(against, against_us);
  return row;
}

// Every step extends the cache by a token and drops one again, so that all see the same length.
Row measure_step(const Device& device, const Options& options) {
  KvCache cache = make_cache(device, kLayers, kPlain);
  Encoder encoder(device);
  fill(encoder, cache, noise(device, {kContext, kKvHeads, kDim}, 2),
       noise(device, {kContext, kKvHeads, kDim}, 3));
  const Token token(device);
  cache.begin_step(encoder, 1);
  encoder.submit().wait();
  constexpr std::array kFused = {Part::rope_append, Part::attend};
  constexpr std::array kAlone = {Part::rope, Part::append, Part::attend, Part::rope_append};
  const Graph step = record_layers(encoder, cache, token, kFused);
  std::vector<Graph> alone;
  for (const Part& part : kAlone) alone.push_back(record_layers(encoder, cache, token, {&part, 1}));
  const auto with_extend = [&](uint64_t) {
    cache.rollback(encoder, 1);
    cache.begin_step(encoder, 1);
    encoder.submit().wait();
    step.replay().wait();
  };
  const auto replay = [&](size_t i) { return [&alone, i](uint64_t) { alone[i].replay().wait(); }; };
  const auto times = medians_us({with_extend, replay(0), replay(1), replay(2), replay(3)},
                                5 * options.seconds_per_row());
  Row row = make_row(device, options, "kv_cache step", "rope, append, attend alone", times[0],
                     times[1] + times[2] + times[3]);
  row.shape = {{"layers", kLayers},       {"heads", kHeads},           {"kv_heads", kKvHeads},
               {"head_dim", kDim},        {"context", kContext},       {"k", std::string("tq4")},
               {"v", std::string("tq4")}, {"rope_us", times[1]},       {"append_us", times[2]},
               {"attend_us", times[3]},   {"rope_append_us", times[4]}};
  return row;
}

// One layer: everything beside attention in one command, and in two.
Row measure_rope_append(const Device& device, const Options& options) {
  KvCache cache = make_cache(device, 1, kPlain);
  Encoder encoder(device);
  const Token token(device);
  cache.begin_step(encoder, 1);
  encoder.submit().wait();
  constexpr std::array kApart = {Part::rope, Part::append};
  const Part fused = Part::rope_append;
  const std::array graphs = {record_layers(encoder, cache, token, kApart),
                             record_layers(encoder, cache, token, {&fused, 1})};
  const auto times = in_turns({&graphs[0], 1}, {&graphs[1], 1}, options);
  Row row = make_row(device, options, "rope_append", "rope, then append", times[1], times[0]);
  row.shape = {{"tokens", uint64_t{1}}, {"heads", kHeads},         {"kv_heads", kKvHeads},
               {"head_dim", kDim},      {"k", std::string("tq4")}, {"v", std::string("tq4")}};
  return row;
}

Row measure_tail_append(const Device& device, const Options& options) {
  Encoder encoder(device);
  const Token token(device);
  std::vector<KvCache> caches;
  std::vector<Graph> graphs;
  for (const KvLayer& layer : {kPlain, kTailed}) {
    caches.push_back(make_cache(device, 1, layer));
    fill(encoder, caches.back(), noise(device, {kContext, kKvHeads, kDim}, 2),
         noise(device, {kContext, kKvHeads, kDim}, 3));
    caches.back().begin_step(encoder, 1);
    encoder.submit().wait();
    const Part part = Part::append;
    graphs.push_back(record_layers(encoder, caches.back(), token, {&part, 1}));
  }
  const auto times = in_turns({&graphs[0], 1}, {&graphs[1], 1}, options);
  Row row = make_row(device, options, "kv_cache append", "without a tail", times[1], times[0]);
  row.shape = {{"tokens", uint64_t{1}}, {"kv_heads", kKvHeads},    {"head_dim", kDim},
               {"tail", kTail},         {"k", std::string("tq4")}, {"v", std::string("tq4")}};
  return row;
}

// Queries that look for one of the newest tokens, 32 back on average.
Tensor recent_queries(const Device& device, const Tensor& k) {
  Tensor q = noise(device, {1, kHeads, kDim}, 8);
  std::mt19937 random(9);
  std::geometric_distribution<uint64_t> back(1.0 / 32);
  const auto keys = k.data<const float>();
  const auto queries = q.data<float>();
  for (uint64_t head = 0; head < kHeads; ++head) {
    const uint64_t key = kContext - 1 - std::min(back(random), kContext - 1);
    const uint64_t row = key * kKvHeads + head / (kHeads / kKvHeads);
    for (uint64_t c = 0; c < kDim; ++c) queries[head * kDim + c] += keys[row * kDim + c];
  }
  return q;
}

Row measure_tail_attend(const Device& device, const Options& options) {
  Encoder encoder(device);
  const Tensor k = noise(device, {kContext, kKvHeads, kDim}, 2),
               v = noise(device, {kContext, kKvHeads, kDim}, 3), q = recent_queries(device, k);
  std::vector<Graph> graphs;
  std::vector<double> errors;
  for (const KvLayer& layer : {kPlain, kTailed}) {
    KvCache cache = make_cache(device, 1, layer);
    fill(encoder, cache, k, v);
    const Tensor out = device.tensor(DType::f32, q.shape());
    cache.attend(encoder, 0, {.q = q, .out = out}, {.scale = kScale});
    graphs.push_back(encoder.instantiate());
    graphs.back().replay().wait();
    errors.push_back(attention_nmse(out, q, k, v));
  }
  const auto times = in_turns({&graphs[0], 1}, {&graphs[1], 1}, options);
  Row row = make_row(device, options, "kv_cache attend", "without a tail", times[1], times[0]);
  row.shape = {{"heads", kHeads},         {"kv_heads", kKvHeads}, {"head_dim", kDim},
               {"context", kContext},     {"tail", kTail},        {"k", std::string("tq4")},
               {"v", std::string("tq4")}, {"nmse", errors[1]},    {"nmse_without", errors[0]}};
  return row;
}

}  // namespace

std::vector<Row> run_kv_cache(const Options& options, const Progress& progress) {
  std::vector<Row> rows;
  const Device device = open_cpu(options.cpu_threads());
  const auto take = [&](const char* name, Row (*measure)(const Device&, const Options&)) {
    progress.begin(name);
    rows.push_back(measure(device, options));
    progress.done(rows.back());
  };
  take("kv_cache step", measure_step);
  take("rope_append of one token", measure_rope_append);
  take("kv_cache append with a tail", measure_tail_append);
  take("kv_cache attend with a tail", measure_tail_attend);
  return rows;
}

}  // namespace gyre::bench
