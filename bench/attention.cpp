// Decode and prefill attention. All formats of one shape run in turns with each other and with the
// machine's own limit: reading as many bytes (decode), multiplying and adding (prefill).
#include <cmath>

#include "attention_double.h"
#include "attention_runs.h"
#include "bench.h"
#include "gyre/gyre.h"
#include "kv_fill.h"
#include "machine_kernels.h"
#include "noise.h"
#include "read_limit.h"
#include "timing.h"

namespace gyre::bench {
namespace {

struct Source {
  Tensor q, k, v;  // f32, N(0,1)
};

Source make_source(const Device& device, const AttentionShape& s) {
  return {noise(device, {s.tokens, s.heads, s.q_dim()}, 1),
          noise(device, {s.context, s.kv_heads, s.head_dim}, 2),
          noise(device, {s.context, s.kv_heads, s.v_dim()}, 3)};
}

AttentionInputs make_inputs(const Device& device, const AttentionShape& s, const FormatPair& pair,
                            const Source& source) {
  const KvPair cache = allocate(device, s, pair);
  fill(device, cache, source.k, source.v);
  return {.q = source.q,
          .k_cache = cache.k,
          .v_cache = cache.v,
          .out = device.tensor(DType::f32, {s.tokens, s.heads, s.head_dim}),
          .latent = s.latent()};
}

Graph record(const Device& device, const AttentionShape& s, const AttentionInputs& in) {
  Encoder encoder(device);
  attention(encoder, in,
            {.length = s.context, .scale = 1.0f / std::sqrt(static_cast<float>(s.q_dim()))});
  return encoder.instantiate();
}

// Everything one format pair needs: some caches to rotate over, and how far it is from the truth.
struct Contender {
  FormatPair pair;
  std::vector<Graph> graphs;
  uint64_t bytes = 0;
  double nmse = 0, nmse_codec = 0;
};

Contender make_contender(const Device& device, const AttentionShape& s, const FormatPair& pair,
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
  for (const Contender& c : contenders)
    list.emplace_back([&c](uint64_t round) { c.graphs[round % c.graphs.size()].replay().wait(); });
  return list;
}

Row make_row(const Device& device, const Options& options, const AttentionShape& s,
             const Contender& c, double us) {
  Row row = bench::make_row(options, device, s.tokens == 1 ? "attention" : "attention prefill",
                            {{"heads", s.heads},
                             {"kv_heads", s.kv_heads},
                             {"head_dim", s.head_dim},
                             {"context", s.context},
                             {"k", std::string(name(c.pair.k))},
                             {"v", std::string(name(c.pair.v))}},
                            us);
  if (s.latent()) row.shape.emplace_back("rotary_dim", s.rotary_dim);
  if (s.tokens != 1) row.shape.emplace_back("tokens", s.tokens);
  return row;
}

std::vector<Contender> make_contenders(const Device& device, const AttentionRun& run) {
  const Source source = make_source(device, run.shape);
  std::vector<Contender> contenders;
  contenders.reserve(run.formats.size());
  for (const FormatPair& pair : run.formats)
    contenders.push_back(make_contender(device, run.shape, pair, source));
  return contenders;
}

std::vector<Row> measure_decode(const Device& device, const AttentionRun& run,
                                const Options& options) {
  const std::vector<Contender> contenders = make_contenders(device, run);
  const FormatPair& first = run.formats.front();
  const ReadLimit reads(device);
  auto list = contestants(contenders);
  list.emplace_back([&](uint64_t round) { reads.run(round); });
  const auto times =
      medians_us(list, options.seconds_per_row() * static_cast<double>(contenders.size()));
  const double limit = reads.gbps(times.back());
  std::vector<Row> rows;
  for (size_t i = 0; i < contenders.size(); ++i) {
    const Contender& c = contenders[i];
    Row row = make_row(device, options, run.shape, c, times[i]);
    row.shape.emplace_back("nmse", c.nmse);
    row.shape.emplace_back("nmse_codec", c.nmse_codec);
    row.set_limit(c.bytes, limit);
    row.set_against(std::string(name(first.k)) + "/" + std::string(name(first.v)), times[0]);
    rows.push_back(std::move(row));
  }
  return rows;
}

std::vector<Row> measure_prefill(const Device& device, const AttentionRun& run,
                                 const Options& options) {
  const std::vector<Contender> contenders = make_contenders(device, run);
  const uint32_t threads = device.info().compute_units;
  Encoder encoder(device);
  const uint64_t fma_flops = record_fma(encoder, device.tensor(DType::f32, {threads, 64}));
  const Graph fma = encoder.instantiate();
  auto list = contestants(contenders);
  list.emplace_back([&](uint64_t) { fma.replay().wait(); });
  const auto times =
      medians_us(list, options.seconds_per_row() * static_cast<double>(contenders.size()));
  const double flops = attention_flops(run.shape);
  std::vector<Row> rows;
  for (size_t i = 0; i < contenders.size(); ++i) {
    Row row = make_row(device, options, run.shape, contenders[i], times[i]);
    row.shape.emplace_back("gflops", flops / times[i] / 1e3);
    row.set_against("the f32 multiply-add rate",
                    flops / (static_cast<double>(fma_flops) / times.back()));
    rows.push_back(std::move(row));
  }
  return rows;
}

// All formats of a run are there at once, in so many caches each that none stays in the
// processor's.
void check_memory(const Device& device, const AttentionRun& run) {
  const AttentionShape& s = run.shape;
  const auto tokens = static_cast<double>(s.context);
  const auto queries = static_cast<double>(s.tokens * s.heads * s.q_dim());
  double bytes = 2 * sizeof(float) * tokens * static_cast<double>(s.kv_heads * s.head_dim);
  for (const FormatPair& pair : run.formats) {
    const double cache = tokens * token_bytes(device, pair, s);
    const auto sets = static_cast<double>(rotation(static_cast<uint64_t>(cache)));
    bytes += sets * (cache + sizeof(float) * queries);
  }
  check_fits("bench", device, bytes, s.context);
}

std::string text(const AttentionShape& s) {
  return "attention " + std::to_string(s.heads) + "/" + std::to_string(s.kv_heads) + "/" +
         std::to_string(s.head_dim) + ", " + std::to_string(s.context) + " tokens" +
         (s.tokens == 1 ? "" : ", " + std::to_string(s.tokens) + " queries");
}

}  // namespace

std::vector<Row> run_attention(const Options& options, const Progress& progress) {
  const std::vector<AttentionRun> runs = cpu_attention_runs(options.attention);
  const Device device = open_cpu(options.cpu_threads());
  for (const AttentionRun& run : runs) check_memory(device, run);
  std::vector<Row> rows;
  for (const AttentionRun& run : runs) {
    progress.begin(text(run.shape));
    for (Row& row : run.shape.tokens == 1 ? measure_decode(device, run, options)
                                          : measure_prefill(device, run, options)) {
      progress.done(row);
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace gyre::bench
