// Decode and prefill attention. All formats of one shape run in turns with each other and with the
// machine's own limit: reading as many bytes (decode), multiplying and adding (prefill).
#include <array>
#include <cmath>

#include "attention_double.h"
#include "bench.h"
#include "gyre/gyre.h"
#include "machine_kernels.h"
#include "noise.h"
#include "read_limit.h"
#include "timing.h"

namespace gyre::bench {
namespace {

struct Shape {
  uint64_t heads, kv_heads, head_dim, context;
  uint64_t tokens = 1;
};

struct Pair {
  KvFormat k, v;
};

struct Source {
  Tensor q, k, v;  // f32, N(0,1)
};

Source make_source(const Device& device, const Shape& s) {
  const Dims kv{s.context, s.kv_heads, s.head_dim};
  return {noise(device, {s.tokens, s.heads, s.head_dim}, 1), noise(device, kv, 2),
          noise(device, kv, 3)};
}

bool compressed(KvFormat format) { return describe(format).compressed; }

// One of K and V, whatever its format; kv_quantize wants a K with every V.
void fill(const Device& device, const Tensor& source, const KvBuffer& cache) {
  Encoder encoder(device);
  if (!compressed(cache.shape.format)) {
    kv_copy(encoder, {.k = source, .k_cache = cache.codes.permute({1, 0, 2})});
  } else if (cache.shape.role == KvRole::k) {
    kv_quantize(encoder, {.k = source, .k_cache = cache});
  } else {
    KvShape partner = cache.shape;
    partner.role = KvRole::k;
    kv_quantize(encoder, {.k = source,
                          .k_cache = KvBuffer::allocate(device, partner),
                          .v = source,
                          .v_cache = cache});
  }
  encoder.submit().wait();
}

AttentionInputs make_inputs(const Device& device, const Shape& s, const Pair& pair,
                            const Source& source) {
  AttentionInputs in;
  in.q = source.q;
  in.k_cache = KvBuffer::allocate(device, {pair.k, KvRole::k, s.kv_heads, s.context, s.head_dim});
  in.v_cache = KvBuffer::allocate(device, {pair.v, KvRole::v, s.kv_heads, s.context, s.head_dim});
  in.out = device.tensor(DType::f32, source.q.shape());
  fill(device, source.k, in.k_cache);
  fill(device, source.v, in.v_cache);
  return in;
}

Graph record(const Device& device, const Shape& s, const AttentionInputs& in) {
  Encoder encoder(device);
  attention(encoder, in,
            {.length = s.context, .scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim))});
  return encoder.instantiate();
}

Tensor decoded(const Device& device, const KvBuffer& cache) {
  Tensor out =
      device.tensor(DType::f32, {cache.shape.capacity, cache.shape.kv_heads, cache.shape.head_dim});
  Encoder encoder(device);
  if (compressed(cache.shape.format)) {
    kv_dequantize(encoder, {cache, out});
  } else {
    kv_copy(encoder, {.k = cache.codes.permute({1, 0, 2}), .k_cache = out});
  }
  encoder.submit().wait();
  return out;
}

// Everything one format pair needs: some caches to rotate over, and how far it is from the truth.
struct Contender {
  Pair pair;
  std::vector<Graph> graphs;
  uint64_t bytes = 0;
  double nmse = 0, nmse_codec = 0;
};

Contender make_contender(const Device& device, const Shape& s, const Pair& pair,
                         const Source& source) {
  Contender contender{pair, {}, 0, 0, 0};
  AttentionInputs in = make_inputs(device, s, pair, source);
  contender.bytes = in.k_cache.bytes() + in.v_cache.bytes();
  contender.graphs.push_back(record(device, s, in));
  contender.graphs.back().replay().wait();
  if (s.tokens == 1) {
    contender.nmse = attention_nmse(in.out, source.q, source.k, source.v);
    contender.nmse_codec =
        attention_nmse(in.out, source.q, decoded(device, in.k_cache), decoded(device, in.v_cache));
  }
  for (uint64_t i = 1; i < rotation(contender.bytes); ++i)
    contender.graphs.push_back(record(device, s, make_inputs(device, s, pair, source)));
  return contender;
}

std::vector<Contestant> contestants(const std::vector<Contender>& contenders) {
  std::vector<Contestant> list;
  list.reserve(contenders.size() + 1);
  for (const Contender& c : contenders) {
    list.emplace_back([&c](uint64_t round) { c.graphs[round % c.graphs.size()].replay().wait(); });
  }
  return list;
}

Row make_row(const Device& device, const Options& options, const Shape& s, const Contender& c) {
  Row row;
  row.op = s.tokens == 1 ? "attention" : "attention prefill";
  row.device = options.device;
  row.threads = device.info().compute_units;
  row.shape = {{"heads", s.heads},
               {"kv_heads", s.kv_heads},
               {"head_dim", s.head_dim},
               {"context", s.context},
               {"k", std::string(name(c.pair.k))},
               {"v", std::string(name(c.pair.v))}};
  if (s.tokens != 1) row.shape.emplace_back("tokens", s.tokens);
  return row;
}

std::vector<Row> measure_decode(const Device& device, const Shape& s,
                                const std::vector<Pair>& pairs, const Options& options) {
  const Source source = make_source(device, s);
  std::vector<Contender> contenders;
  contenders.reserve(pairs.size());
  for (const Pair& pair : pairs) contenders.push_back(make_contender(device, s, pair, source));
  const ReadLimit reads(device);
  auto list = contestants(contenders);
  list.emplace_back([&](uint64_t round) { reads.run(round); });
  const auto times =
      medians_us(list, options.seconds_per_row * static_cast<double>(contenders.size()));
  const double limit = reads.gbps(times.back());
  std::vector<Row> rows;
  for (size_t i = 0; i < contenders.size(); ++i) {
    const Contender& c = contenders[i];
    Row row = make_row(device, options, s, c);
    row.shape.emplace_back("nmse", c.nmse);
    row.shape.emplace_back("nmse_codec", c.nmse_codec);
    row.median_us = times[i];
    row.bytes = c.bytes;
    row.gbps = static_cast<double>(c.bytes) / times[i] / 1e3;
    row.limit_gbps = limit;
    row.fraction = row.gbps / limit;
    row.against = std::string(name(pairs[0].k)) + "/" + std::string(name(pairs[0].v));
    row.against_us = times[0];
    row.speedup = times[0] / times[i];
    rows.push_back(std::move(row));
  }
  return rows;
}

std::vector<Row> measure_prefill(const Device& device, const Shape& s,
                                 const std::vector<Pair>& pairs, const Options& options) {
  const Source source = make_source(device, s);
  std::vector<Contender> contenders;
  contenders.reserve(pairs.size());
  for (const Pair& pair : pairs) contenders.push_back(make_contender(device, s, pair, source));
  const uint32_t threads = device.info().compute_units;
  Encoder encoder(device);
  const uint64_t fma_flops = record_fma(encoder, device.tensor(DType::f32, {threads, 64}));
  const Graph fma = encoder.instantiate();
  auto list = contestants(contenders);
  list.emplace_back([&](uint64_t) { fma.replay().wait(); });
  const auto times =
      medians_us(list, options.seconds_per_row * static_cast<double>(contenders.size()));
  // Two products over the keys each query sees.
  const auto t = static_cast<double>(s.tokens), l = static_cast<double>(s.context);
  const double pairs_seen = t * (l - t) + t * (t + 1) / 2;
  const double flops = 4 * pairs_seen * static_cast<double>(s.heads * s.head_dim);
  std::vector<Row> rows;
  for (size_t i = 0; i < contenders.size(); ++i) {
    Row row = make_row(device, options, s, contenders[i]);
    row.shape.emplace_back("gflops", flops / times[i] / 1e3);
    row.median_us = times[i];
    row.against = "the f32 multiply-add rate";
    row.against_us = flops / (static_cast<double>(fma_flops) / times.back());
    row.speedup = row.against_us / times[i];
    rows.push_back(std::move(row));
  }
  return rows;
}

std::vector<Pair> pairs_of(const AttentionChoice& choice) {
  if (choice.k.size() != choice.v.size()) {
    throw Error(ErrorCode::invalid_argument, "bench: --k and --v pair up, got " +
                                                 std::to_string(choice.k.size()) + " and " +
                                                 std::to_string(choice.v.size()) + " formats");
  }
  std::vector<Pair> pairs;
  for (size_t i = 0; i < choice.k.size(); ++i)
    pairs.push_back({kv_format(choice.k[i]), kv_format(choice.v[i])});
  return pairs;
}

std::string text(const Shape& s) {
  return "attention " + std::to_string(s.heads) + "/" + std::to_string(s.kv_heads) + "/" +
         std::to_string(s.head_dim) + ", " + std::to_string(s.context) + " tokens" +
         (s.tokens == 1 ? "" : ", " + std::to_string(s.tokens) + " queries");
}

}  // namespace

std::vector<Row> run_attention(const Options& options, const Progress& progress) {
  const AttentionChoice& choice = options.attention;
  const std::vector<Pair> pairs = pairs_of(choice);
  std::vector<Shape> shapes;
  if (choice.heads != 0) {
    for (const uint64_t context : choice.contexts)
      shapes.push_back({choice.heads, choice.kv_heads, choice.head_dim, context, choice.tokens});
  } else {
    shapes = {{8, 8, 128, 16384, 1},
              {32, 8, 128, 16384, 1},
              {16, 8, 256, 16384, 1},
              {32, 8, 128, 1024, 1},
              {32, 8, 128, 4096, 512}};
  }
  const Device device = open_cpu(options.threads);
  std::vector<Row> rows;
  for (const Shape& s : shapes) {
    progress.begin(text(s));
    for (Row& row : s.tokens == 1 ? measure_decode(device, s, pairs, options)
                                  : measure_prefill(device, s, pairs, options)) {
      progress.done(row);
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace gyre::bench
