// A decode step of many sequences over pages. Batches go round sets of pages that together leave
// the caches of the machine behind.
#include "serving.h"

#include <cmath>
#include <numeric>

#include "gyre/gyre.h"
#include "kv_fill.h"
#include "read_limit.h"
#include "serving_batch.h"
#include "timing.h"

namespace gyre::bench {
namespace {

// Timed work: graphs, each of `commands` steps, and the bytes that a step reads.
struct Timed {
  std::vector<Graph> graphs;
  uint64_t commands = 1, bytes = 0;
};

uint64_t sum(const std::vector<uint64_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
}

// Records step i of some sets, in one graph on a GPU, in a graph of its own on the CPU.
template <class Record>
Timed instantiate(const GpuContext* gpu, const Device& device, uint64_t sets, uint64_t bytes,
                  const Record& record) {
  Timed timed;
  timed.bytes = bytes;
  Encoder encoder(device);
  if (gpu == nullptr) {
    for (uint64_t i = 0; i < sets; ++i) {
      record(encoder, i);
      timed.graphs.push_back(encoder.instantiate());
    }
    return timed;
  }
  timed.commands = commands_for(static_cast<double>(bytes) / gpu->limit_gbps / 1e3, sets);
  for (uint64_t i = 0; i < timed.commands; ++i) record(encoder, i % sets);
  timed.graphs.push_back(encoder.instantiate());
  return timed;
}

uint64_t sets_of(const GpuContext* gpu, uint64_t bytes) {
  return gpu != nullptr ? sets_for(bytes) : rotation(bytes);
}

Timed paged(const GpuContext* gpu, const Device& device, const ServingShape& shape,
            const FormatPair& formats, bool writes = false) {
  std::vector<ServingBatch> sets;
  do {
    sets.push_back(make_serving_batch(device, shape, formats));
    // One output for all: steps that write the same memory run one after the other.
    sets.back().inputs.out = sets[0].inputs.out;
    sets.back().scratch = sets[0].scratch;
  } while (sets.size() < sets_of(gpu, sets[0].inputs.pages.bytes.bytes()));
  return instantiate(gpu, device, sets.size(), sets[0].bytes, [&](Encoder& encoder, uint64_t i) {
    if (writes) sets[i].record_write(encoder);
    sets[i].record(encoder);
  });
}

// A call for each sequence.
Timed one_by_one(const GpuContext* gpu, const Device& device, const ServingShape& s,
                 const FormatPair& formats) {
  struct Cache {
    uint64_t length;
    KvPair pair;
  };
  const AttentionShape one = s.linear(1);
  const uint64_t heads = s.heads, dim = s.head_dim, longest = s.longest();
  const Tensor tokens = noise_tokens(device, std::min<uint64_t>(longest, 4096), s.kv_heads, dim);
  const Tensor q = noise_tokens(device, s.tokens, heads, one.q_dim()),
               out = device.tensor(DType::f16, {s.tokens, heads, dim});
  std::vector<std::vector<Cache>> sets;
  uint64_t bytes = 0;
  do {
    std::vector<Cache> caches;
    bytes = 0;
    for (const uint64_t length : s.lengths) {
      caches.push_back({length, allocate(device, s.linear(length), formats)});
      const Tensor source = tokens.slice(0, 0, std::min(length, tokens.shape(0)));
      fill(device, caches.back().pair, source, source.slice(2, 0, one.v_dim()));
      bytes += caches.back().pair.bytes();
    }
    sets.push_back(std::move(caches));
  } while (sets.size() < sets_of(gpu, bytes));
  Tensor scratch;
  return instantiate(gpu, device, sets.size(), bytes, [&](Encoder& encoder, uint64_t i) {
    for (const Cache& cache : sets[i]) {
      attention(
          encoder,
          {.q = q,
           .k_cache = cache.pair.k,
           .v_cache = cache.pair.v,
           .out = out,
           .latent = one.latent(),
           .scratch = q.shape(0) > 1 ? &scratch : nullptr},
          {.length = cache.length, .scale = 1.0f / std::sqrt(static_cast<float>(one.q_dim()))});
    }
  });
}

Timed other(const GpuContext* gpu, const Device& device, const ServingRun& run,
            const FormatPair& formats) {
  ServingShape s = run.shape;
  switch (run.against) {
    case ServingAgainst::pages_of_64:
      s.page_tokens = 64;
      return paged(gpu, device, s, formats);
    case ServingAgainst::equal_lengths:
      s.lengths.assign(s.lengths.size(), sum(s.lengths) / s.lengths.size());
      return paged(gpu, device, s, formats);
    default:
      return one_by_one(gpu, device, s, formats);
  }
}

std::string against_text(const ServingRun& run) {
  switch (run.against) {
    case ServingAgainst::linear:
      return "a linear cache";
    case ServingAgainst::pages_of_64:
      return "pages of 64";
    case ServingAgainst::equal_lengths:
      return "equal lengths";
    case ServingAgainst::one_by_one:
      return "one by one";
    default:
      return run.formats.front().label();
  }
}

Shape fields_of(const ServingRun& run, const FormatPair& formats) {
  const ServingShape& s = run.shape;
  Shape fields = {{"case", s.text()},
                  {"heads", s.heads},
                  {"kv_heads", s.kv_heads},
                  {"head_dim", s.head_dim},
                  {"page", s.page_tokens}};
  if (s.rotary_dim != 0) fields.emplace_back("rotary_dim", s.rotary_dim);
  if (s.shared != 0) fields.emplace_back("shared", s.shared);
  if (s.tokens != 1) fields.emplace_back("tokens", s.tokens);
  fields.emplace_back("k", std::string(name(formats.k)));
  fields.emplace_back("v", std::string(name(formats.v)));
  return fields;
}

void compare(Row& row, const ServingRun& run, double against_us) {
  row.set_against(against_text(run), against_us);
}

void check_memory(const Device& device, const ServingRun& run, uint64_t max_formats) {
  double cache_bytes = 0;
  for (const FormatPair& pair : run.formats) {
    cache_bytes = std::max(cache_bytes, static_cast<double>(sum(run.shape.lengths)) *
                                            token_bytes(device, pair, run.shape.linear(1)));
  }
  check_fits("bench", device, 2 * cache_bytes * static_cast<double>(max_formats),
             run.shape.longest());
}

}  // namespace

std::vector<Row> measure_gpu_serving(const GpuContext& gpu, const ServingRun& run,
                                     const Progress& progress) {
  check_memory(gpu.device, run, 1);
  progress.begin("serving " + run.shape.text());
  std::vector<Row> rows;
  for (const FormatPair& formats : run.formats) {
    const auto time = [](const Timed& timed) { return replay_us(timed.graphs[0], timed.commands); };
    uint64_t bytes = 0;
    double us = 0;
    {
      const Timed timed = paged(&gpu, gpu.device, run.shape, formats);
      us = time(timed);
      bytes = timed.bytes;
    }
    auto fields = fields_of(run, formats);
    fields.emplace_back("limit_us", static_cast<double>(bytes) / gpu.limit_gbps / 1e3);
    // A layer's step: its newest tokens are written before it attends.
    fields.emplace_back("with_write_us", time(paged(&gpu, gpu.device, run.shape, formats, true)));
    Row row = gpu_row(gpu, "serving", std::move(fields), us, bytes);
    const bool by_format = run.against == ServingAgainst::first_format;
    compare(row, run,
            !by_format ? time(other(&gpu, gpu.device, run, formats))
                       : (rows.empty() ? us : rows.front().median_us));
    progress.done(row);
    rows.push_back(std::move(row));
  }
  return rows;
}

std::vector<Row> run_serving(const Options& options, const Progress& progress) {
  const std::vector<ServingRun> runs = serving_runs(options.attention, options.serving, false);
  const Device device = open_cpu(options.cpu_threads());
  for (const ServingRun& run : runs) check_memory(device, run, run.formats.size());
  const ReadLimit reads(device);
  std::vector<Row> rows;
  for (const ServingRun& run : runs) {
    progress.begin("serving " + run.shape.text());
    const bool by_format = run.against == ServingAgainst::first_format;
    std::vector<Timed> timed;
    for (const FormatPair& formats : run.formats) {
      timed.push_back(paged(nullptr, device, run.shape, formats));
      if (!by_format) timed.push_back(other(nullptr, device, run, formats));
    }
    std::vector<Contestant> list;
    for (const Timed& each : timed) {
      list.emplace_back(
          [&each](uint64_t round) { each.graphs[round % each.graphs.size()].replay().wait(); });
    }
    list.emplace_back([&](uint64_t round) { reads.run(round); });
    const auto times =
        medians_us(list, options.seconds_per_row() * static_cast<double>(timed.size()));
    const double limit = reads.gbps(times.back());
    const size_t step = by_format ? 1 : 2;
    for (size_t i = 0; i < run.formats.size(); ++i) {
      Row row =
          make_row(options, device, "serving", fields_of(run, run.formats[i]), times[step * i]);
      row.set_limit(timed[step * i].bytes, limit);
      compare(row, run, by_format ? times[0] : times[step * i + 1]);
      progress.done(row);
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace gyre::bench
