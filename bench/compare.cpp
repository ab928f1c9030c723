// Fills a KvCache per format and decodes with it as a user would: begin_step, then one replayed
// graph that appends a token and attends. One full layer is timed, and one window layer where the
// model has them; what a model adds up to follows.
#include "compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention_double.h"
#include "gyre/gyre.h"
#include "kv_fill.h"
#include "machine_kernels.h"
#include "noise.h"
#include "read_limit.h"
#include "runtime/require.h"
#include "timing.h"

namespace gyre::bench {
namespace {

struct Source {
  Tensor q, k, v;  // f32, N(0,1); k and v reach to the longest context
};

KvCacheOptions one_layer(const ModelShape& shape, uint64_t capacity, const KvLayer& layer) {
  return {.kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .v_head_dim = shape.v_dim(),
          .capacity = capacity,
          .layers = {layer}};
}

// Caches of one layer, enough of them that each has left the processor's when its turn comes
// again.
class Contender {
 public:
  Contender(const Device& device, const ModelShape& shape, const KvLayer& layer, uint64_t context,
            const Source& source)
      : encoder_(device),
        out_(device.tensor(DType::f32, {1, shape.heads, shape.head_dim})),
        source_(source) {
    KvCache cache(device, one_layer(shape, context, layer));
    bytes_ = cache.describe()[0].bytes;
    fill(cache, context - 1);
    for (uint64_t i = 1; i < rotation(bytes_); ++i) caches_.push_back(cache.fork(encoder_));
    encoder_.submit().wait();
    caches_.push_back(std::move(cache));
    for (KvCache& each : caches_) graphs_.push_back(record(each, context - 1));
  }

  uint64_t bytes() const { return bytes_; }
  const Tensor& out() const { return out_; }

  // The step that brings a cache to the full context. Taken back outside of the timed part, so
  // that every step reads as many keys, writes the same slot and finds room.
  void step(uint64_t round) {
    const size_t i = round % caches_.size();
    caches_[i].begin_step(encoder_, 1);
    encoder_.submit();
    graphs_[i].replay().wait();
  }
  void take_back(uint64_t round) {
    caches_[round % caches_.size()].rollback(encoder_, 1);
    encoder_.submit().wait();
  }

 private:
  void fill(KvCache& cache, uint64_t tokens) {
    for (uint64_t begin = 0; begin < tokens;) {
      const uint64_t count = std::min(cache.options().step_tokens, tokens - begin);
      cache.begin_step(encoder_, count);
      cache.append(encoder_, 0, source_.k.slice(0, begin, count), source_.v.slice(0, begin, count));
      encoder_.submit().wait();
      begin += count;
    }
  }

  Graph record(KvCache& cache, uint64_t token) {
    cache.append(encoder_, 0, source_.k.slice(0, token, 1), source_.v.slice(0, token, 1));
    cache.attend(encoder_, 0, {.q = source_.q, .out = out_},
                 {.scale = 1.0f / std::sqrt(static_cast<float>(source_.q.shape(2)))});
    return encoder_.instantiate();
  }

  Encoder encoder_;
  Tensor out_;
  Source source_;
  uint64_t bytes_ = 0;
  std::vector<KvCache> caches_;
  std::vector<Graph> graphs_;
};

// Counts the parts that are done; filling a format is one, measuring it is one.
class Meter {
 public:
  Meter(const CompareProgress& progress, size_t parts)
      : progress_(progress), parts_(static_cast<double>(parts)) {}

  void show(const std::string& what, double begun = 0) const {
    if (progress_) progress_(what, std::min(1.0, (done_ + begun) / parts_));
  }
  void advance(size_t parts) { done_ += static_cast<double>(parts); }

 private:
  const CompareProgress& progress_;
  double parts_, done_ = 0;
};

std::optional<KvLayer> find_window_layer(const ModelShape& s) {
  for (const KvLayer& layer :
       kv_layers(s.layers, {.window = s.window, .full_every = s.full_every})) {
    if (layer.window != 0) return layer;
  }
  return std::nullopt;
}

class Comparison {
 public:
  Comparison(const CompareOptions& options, const CompareProgress& progress)
      : options_(options),
        device_(options.device == "cpu" ? open_cpu(options.threads.value_or(0))
                                        : Device::open(options.device)),
        window_layer_(find_window_layer(options.shape)),
        meter_(progress,
               2 * (options.formats.size() + (window_layer_ ? 1 : 0)) * options.contexts.size()) {
    for (const FormatPair& pair : options_.formats)
      token_bytes_.push_back(token_bytes(device_, pair,
                                         {.kv_heads = options_.shape.kv_heads,
                                          .head_dim = options_.shape.head_dim,
                                          .rotary_dim = options_.shape.rotary_dim}));
    check_memory();
  }

  CompareReport run() {
    CompareReport report{options_.shape,
                         options_.device,
                         device_.info().description,
                         device_.info().compute_units,
                         options_.tail,
                         {}};
    meter_.show("random keys and values");
    const ModelShape& s = options_.shape;
    source_ = {noise(device_, {1, s.heads, s.head_dim + s.rotary_dim}, 1),
               noise(device_, {longest(), s.kv_heads, s.head_dim}, 2),
               noise(device_, {longest(), s.kv_heads, s.v_dim()}, 3)};
    for (const uint64_t context : options_.contexts) {
      const std::vector<CompareEntry> entries = at(context);
      report.entries.insert(report.entries.end(), entries.begin(), entries.end());
    }
    meter_.show("done");
    return report;
  }

 private:
  uint64_t longest() const {
    return *std::max_element(options_.contexts.begin(), options_.contexts.end());
  }

  // Coordinates of one token, K and V of one layer.
  double coordinates() const {
    const ModelShape& s = options_.shape;
    return static_cast<double>(s.kv_heads * (s.head_dim + s.v_dim()));
  }
  // A token in f16, K and V of one layer.
  double f16_bytes() const { return sizeof(uint16_t) * coordinates(); }

  uint64_t tail_of(const FormatPair& pair) const { return pair.compressed() ? options_.tail : 0; }

  KvLayer layer_of(const FormatPair& pair) const {
    return {.k = pair.k, .v = pair.v, .tail = tail_of(pair), .latent = options_.shape.latent()};
  }

  // Every cache as often as it takes to leave the processor's cache behind.
  void check_memory() const {
    const auto tokens = static_cast<double>(longest());
    double bytes = sizeof(float) * tokens * coordinates();
    const auto add = [&bytes](double cache) {
      bytes += cache * static_cast<double>(rotation(static_cast<uint64_t>(cache)));
    };
    for (size_t i = 0; i < token_bytes_.size(); ++i) {
      const uint64_t tail = tail_of(options_.formats[i]);
      const uint64_t ring =
          tail != 0 ? std::min(longest(), tail + KvCacheOptions{}.step_tokens) : 0;
      add(token_bytes_[i] * tokens + f16_bytes() * static_cast<double>(ring));
    }
    if (window_layer_) {
      const uint64_t slots = window_layer_->window + KvCacheOptions{}.step_tokens;
      add(f16_bytes() * static_cast<double>(std::min(longest(), slots)));
    }
    check_fits("compare", device_, bytes, longest());
  }

  // One for each format, and the last for the window layers of a model that has them.
  std::vector<Contender> contenders(uint64_t context) {
    std::vector<Contender> made;
    made.reserve(options_.formats.size() + 1);
    const auto make = [&](const std::string& label, const KvLayer& layer) {
      meter_.show(label + ": filling " + std::to_string(context) + " tokens");
      made.emplace_back(device_, options_.shape, layer, context, source_);
      meter_.advance(1);
    };
    for (const FormatPair& pair : options_.formats) make(pair.label(), layer_of(pair));
    if (window_layer_) make("window layer", *window_layer_);
    return made;
  }

  // Median of each contender's step, then what reading memory gives, in GB/s.
  std::vector<double> times(std::vector<Contender>& all, uint64_t context) {
    const ReadLimit reads(device_);
    std::vector<Contestant> list;
    list.reserve(all.size() + 1);
    for (Contender& each : all) list.emplace_back([&each](uint64_t round) { each.step(round); });
    list.emplace_back([&](uint64_t round) { reads.run(round); });
    const auto parts = static_cast<double>(all.size());
    const std::string what = "decoding at " + std::to_string(context) + " tokens";
    const auto start = std::chrono::steady_clock::now();
    meter_.show(what);
    auto medians = medians_us(list, options_.seconds * parts, [&](uint64_t round) {
      for (Contender& each : all) each.take_back(round);
      meter_.show(what, std::min(parts, us_since(start) / options_.seconds / 1e6));
    });
    meter_.advance(all.size());
    medians.back() = reads.gbps(medians.back());
    return medians;
  }

  CompareEntry entry(size_t format, uint64_t context, const Contender& contender,
                     const std::vector<double>& us) const {
    const ModelShape& s = options_.shape;
    const auto full = static_cast<double>(full_layers(s));
    CompareEntry entry;
    entry.formats = options_.formats[format];
    entry.context = context;
    entry.bits = 8 * token_bytes_[format] / coordinates();
    entry.bytes_per_token = token_bytes_[format] * full;
    entry.step_us = us[format];
    entry.window_us = window_layer_ ? us[options_.formats.size()] : 0;
    entry.model_us =
        full * entry.step_us + (static_cast<double>(s.layers) - full) * entry.window_us;
    entry.tokens_per_second = 1e6 / entry.model_us;
    entry.speedup = us[0] / us[format];
    const auto tail = static_cast<double>(tail_of(entry.formats));
    const double read =
        token_bytes_[format] * (static_cast<double>(context) - tail) + f16_bytes() * tail;
    entry.read_gbps = read / us[format] / 1e3;
    entry.limit_gbps = us.back();
    entry.fraction = entry.read_gbps / entry.limit_gbps;
    entry.cache_bytes = full_layers(s) * contender.bytes();
    return entry;
  }

  std::vector<CompareEntry> at(uint64_t context) {
    std::vector<Contender> all = contenders(context);
    const std::vector<double> us = times(all, context);
    const std::vector<double> truth = attention_in_double(source_.q, source_.k.slice(0, 0, context),
                                                          source_.v.slice(0, 0, context));
    const ModelShape& s = options_.shape;
    const uint64_t windows =
        window_layer_ ? (s.layers - full_layers(s)) * all.back().bytes() : uint64_t{0};
    std::vector<CompareEntry> entries;
    for (size_t i = 0; i < options_.formats.size(); ++i) {
      entries.push_back(entry(i, context, all[i], us));
      entries.back().cache_bytes += windows;
      entries.back().nmse = nmse(all[i].out(), truth);
    }
    return entries;
  }

  const CompareOptions& options_;
  Device device_;
  std::optional<KvLayer> window_layer_;  // as KvPolicy stores them: f16 rings
  Meter meter_;
  std::vector<double> token_bytes_;  // of one layer, by format
  Source source_;
};

}  // namespace

std::vector<FormatPair> usual_formats() {
  std::vector<FormatPair> formats;
  for (const KvFormat format :
       {KvFormat::f16, KvFormat::tq8, KvFormat::tq6, KvFormat::tq4, KvFormat::tq3}) {
    formats.push_back({format, format});
  }
  formats.push_back({KvFormat::tq8, KvFormat::tq4});
  return formats;
}

void check(const CompareOptions& options) {
  check(options.shape);
  require(!options.contexts.empty(), "compare: at least one context");
  for (const uint64_t context : options.contexts) {
    require(context != 0 && context <= std::numeric_limits<int32_t>::max(),
            "compare: a context must be from 1 to 2^31 - 1 tokens, got ", context);
  }
  require(options.device == "cpu" || !options.threads, "compare: ", options.device,
          " does not use --threads");
  check_formats("compare", options.formats, options.shape.head_dim, options.shape.v_dim());
  const uint64_t shortest = *std::min_element(options.contexts.begin(), options.contexts.end());
  require(options.tail <= shortest, "compare: a tail must be at most the shortest context ",
          shortest, ", got ", options.tail);
  require(options.tail == 0 || options.formats.empty() ||
              std::any_of(options.formats.begin(), options.formats.end(),
                          [](const FormatPair& pair) { return pair.compressed(); }),
          "compare: a tail of ", options.tail, " tokens has no effect: no format is compressed");
  require(options.seconds > 0 && options.seconds <= 60,
          "compare: seconds must be above 0 and at most 60, got ", options.seconds);
}

CompareReport compare(const CompareOptions& options, const CompareProgress& progress) {
  CompareOptions checked = options;
  if (checked.formats.empty())
    checked.formats = checked.shape.latent() ? latent_formats() : usual_formats();
  check(checked);
  return Comparison(checked, progress).run();
}

}  // namespace gyre::bench
