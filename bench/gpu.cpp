// What runs on a GPU: every op against the device's own copy bandwidth, decode attention against
// f16, a decode step of 32 layers against its kernels alone. Times are of graphs of many commands,
// divided: a launch alone takes longer than some kernels.
#include <algorithm>
#include <array>
#include <cmath>

#include "attention_double.h"
#include "bench.h"
#include "gyre/gyre.h"
#include "noise.h"
#include "ops/cache_ops.h"
#include "timing.h"

namespace gyre::bench {
namespace {

constexpr uint64_t kTokens = 4096, kHeads = 8, kHeadDim = 128;
constexpr uint64_t kBeyondCache = 256u << 20;  // bytes that leave any GPU's cache behind

uint64_t sets_for(uint64_t bytes) {
  return std::clamp<uint64_t>(kBeyondCache / std::max<uint64_t>(bytes, 1) + 1, 2, 64);
}

Tensor noise_tokens(const Device& device, uint64_t tokens, uint64_t heads, uint64_t head_dim) {
  const Tensor wide = noise(device, {tokens, heads, head_dim}, 1);
  Tensor half = device.tensor(DType::f16, {tokens, heads, head_dim});
  Encoder encoder(device);
  kv_copy(encoder, {.k = wide, .k_cache = half});
  encoder.submit().wait();
  return half;
}

// Commands of a graph, each of at least so many microseconds, that go over all sets alike: up to 2
// ms, so that launching it and waiting for it no longer count.
uint64_t commands_for(double least_us, uint64_t sets) {
  constexpr double kGraph = 2000;
  const auto count = static_cast<uint64_t>(std::clamp(kGraph / least_us, 16.0, 128.0));
  return (count + sets - 1) / sets * sets;
}

double replay_us(const Graph& graph, uint64_t count) {
  constexpr int kRounds = 25;
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    graph.replay().wait();
    if (round > 3) times.push_back(us_since(begin) / static_cast<double>(count));
  }
  return median(std::move(times));
}

// Median microseconds of one command: of a graph, where commands that do not depend on each other
// may overlap, and submitted, where each runs when the one before has ended.
struct CommandTimes {
  double replayed = 0, submitted = 0;
};

// record(encoder, i) records a command on set i < sets; it goes round the sets.
template <class Record>
CommandTimes time_commands(const Device& device, uint64_t sets, const Record& record) {
  constexpr int kRounds = 9;
  const uint64_t count = commands_for(1, sets);
  Encoder encoder(device);
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    for (uint64_t i = 0; i < count; ++i) record(encoder, i % sets);
    const auto begin = std::chrono::steady_clock::now();
    encoder.submit().wait();
    if (round > 1) times.push_back(us_since(begin) / static_cast<double>(count));
  }
  for (uint64_t i = 0; i < count; ++i) record(encoder, i % sets);
  return {replay_us(encoder.instantiate(), count), median(std::move(times))};
}

class GpuBench {
 public:
  GpuBench(const Options& options, const Progress& progress)
      : options_(options), progress_(progress), device_(Device::open(options.device)) {}

  std::vector<Row> run() {
    constexpr std::array kOps = {"kv_copy", "rope", "kv_quantize", "attention", "kv_cache step"};
    if (std::none_of(kOps.begin(), kOps.end(), [this](const char* op) { return wanted(op); }))
      throw Error(ErrorCode::invalid_argument,
                  "bench: nothing matches \"" + options_.filter + "\" on " + options_.device +
                      "; there are kv_copy, rope, kv_quantize, attention, kv_cache step");
    measure_copy();
    if (wanted("kv_copy") || wanted("rope") || wanted("kv_quantize")) measure_ops();
    if (wanted("attention")) measure_attention();
    if (wanted("kv_cache step")) measure_step();
    return rows_;
  }

 private:
  bool wanted(const std::string& op) const { return op.find(options_.filter) != std::string::npos; }

  Row& add(const std::string& op, std::vector<std::pair<std::string, Field>> shape, double us,
           uint64_t bytes) {
    Row row;
    row.op = op;
    row.device = options_.device;
    row.threads = device_.info().compute_units;
    row.shape = std::move(shape);
    row.median_us = us;
    row.bytes = bytes;
    row.gbps = static_cast<double>(bytes) / us / 1e3;
    row.limit_gbps = limit_gbps_;
    row.fraction = limit_gbps_ > 0 ? row.gbps / limit_gbps_ : 0;
    rows_.push_back(std::move(row));
    return rows_.back();
  }

  void measure_copy() {
    progress_.begin("copy");
    constexpr uint64_t kBytes = 1u << 30;
    const Tensor from = device_.tensor(DType::u8, {kBytes}),
                 to = device_.tensor(DType::u8, {kBytes});
    const auto copy = [&](Encoder& encoder, uint64_t) { copy_bytes(encoder, from, to); };
    const double us = time_commands(device_, 1, copy).replayed;
    limit_gbps_ = 2.0 * static_cast<double>(kBytes) / us / 1e3;
    add("copy", {{"case", std::string("1 GiB")}}, us, 2 * kBytes);
    progress_.done(rows_.back());
  }

  void measure_ops() {
    const Tensor source = noise_tokens(device_, kTokens, kHeads, kHeadDim);
    const uint64_t sets = sets_for(4 * source.bytes());
    std::vector<Tensor> k, v;
    for (uint64_t i = 0; i < sets; ++i) {
      Encoder encoder(device_);
      for (auto* list : {&k, &v}) {
        list->push_back(device_.tensor(DType::f16, source.shape()));
        kv_copy(encoder, {.k = source, .k_cache = list->back()});
      }
      encoder.submit().wait();
    }
    std::vector<Tensor> caches;
    for (uint64_t i = 0; i < 2 * sets; ++i)
      caches.push_back(device_.tensor(DType::f16, {kHeads, kTokens, kHeadDim}));
    progress_.begin("kv_copy, rope, kv_quantize");
    const size_t told = rows_.size();
    if (wanted("kv_copy")) {
      const auto copy = [&](Encoder& encoder, uint64_t i) {
        kv_copy(encoder, {.k = k[i],
                          .k_cache = caches[2 * i].permute({1, 0, 2}),
                          .v = v[i],
                          .v_cache = caches[2 * i + 1].permute({1, 0, 2})});
      };
      add_op("kv_copy", "f16", time_commands(device_, sets, copy), 4 * source.bytes());
    }
    if (wanted("rope")) {
      std::vector<int32_t> numbers(kTokens);
      for (uint64_t i = 0; i < kTokens; ++i) numbers[i] = static_cast<int32_t>(i);
      const Tensor positions = device_.tensor(DType::i32, {kTokens});
      positions.write_from(std::span<const int32_t>(numbers));
      const auto turn = [&](Encoder& encoder, uint64_t i) {
        const Tensor& x = i % 2 == 0 ? k[i / 2] : v[i / 2];
        rope(encoder, {.x = x, .positions = positions, .out = x});
      };
      add_op("rope", "f16", time_commands(device_, 2 * sets, turn), 2 * source.bytes());
    }
    if (wanted("kv_quantize")) {
      for (const KvFormat format : {KvFormat::tq8, KvFormat::tq4}) measure_quantize(format, k, v);
    }
    for (size_t i = told; i < rows_.size(); ++i) progress_.done(rows_[i]);
  }

  void add_op(const std::string& op, std::string_view format, const CommandTimes& times,
              uint64_t bytes) {
    add(op,
        {{"tokens", kTokens},
         {"kv_heads", kHeads},
         {"head_dim", kHeadDim},
         {"format", std::string(format)},
         {"submitted_us", times.submitted}},
        times.replayed, bytes);
  }

  void measure_quantize(KvFormat format, const std::vector<Tensor>& k,
                        const std::vector<Tensor>& v) {
    std::vector<KvBuffer> keys, values;
    for (size_t i = 0; i < k.size(); ++i) {
      keys.push_back(KvBuffer::allocate(device_, {format, KvRole::k, kHeads, kTokens, kHeadDim}));
      values.push_back(KvBuffer::allocate(device_, {format, KvRole::v, kHeads, kTokens, kHeadDim}));
    }
    const auto quantize = [&](Encoder& encoder, uint64_t i) {
      kv_quantize(encoder, {.k = k[i], .k_cache = keys[i], .v = v[i], .v_cache = values[i]});
    };
    add_op("kv_quantize", name(format), time_commands(device_, k.size(), quantize),
           2 * k[0].bytes() + keys[0].bytes() + values[0].bytes());
  }

  void fill(const KvBuffer& k, const KvBuffer& v, const Tensor& tokens) {
    const uint64_t capacity = k.shape.capacity, part = tokens.shape(0);
    for (uint64_t at = 0; at < capacity; at += part) {
      const Tensor next = tokens.slice(0, 0, std::min(part, capacity - at));
      Encoder encoder(device_);
      if (describe(k.shape.format).compressed) {
        kv_quantize(encoder, {.k = next, .k_cache = k, .v = next, .v_cache = v}, {.position = at});
      } else {
        kv_copy(encoder,
                {.k = next,
                 .k_cache = k.codes.permute({1, 0, 2}),
                 .v = next,
                 .v_cache = v.codes.permute({1, 0, 2})},
                {.position = at});
      }
      encoder.submit().wait();
    }
  }

  struct Pair {
    KvFormat k, v;
  };
  struct Shape {
    uint64_t heads, kv_heads, head_dim, context;
  };

  void measure_attention() {
    const auto same = [](KvFormat format) { return Pair{format, format}; };
    const std::vector<Pair> every = {same(KvFormat::f16), same(KvFormat::bf16),
                                     same(KvFormat::tq8), {KvFormat::tq8, KvFormat::tq4},
                                     same(KvFormat::tq6), same(KvFormat::tq5),
                                     same(KvFormat::tq4), same(KvFormat::tq3),
                                     same(KvFormat::tq2)};
    const std::vector<Pair> few = {same(KvFormat::f16), same(KvFormat::tq8), same(KvFormat::tq4)};
    for (const uint64_t context : {4096, 32768, 131072})
      measure_attention({32, 8, 128, context}, every);
    for (const uint64_t context : {4096, 32768, 131072})
      measure_attention({16, 8, 256, context}, few);
    // 32 sequences of one length: to the kernel, 32 times as many heads.
    measure_attention({1024, 256, 128, 4096}, few);
    // The same bytes in other shapes: GQA ratios, head dims, a context that fits nothing.
    for (const uint64_t ratio : {1, 2, 6, 7, 8, 12, 16})
      measure_attention({8 * ratio, 8, 128, 32768}, few);
    measure_attention({32, 8, 64, 65536}, few);
    measure_attention({32, 8, 512, 8192}, few);
    measure_attention({32, 8, 128, 32749}, few);
  }

  // Over what the cache holds, in double precision; `gain` scales the query.
  double error_of(const Pair& pair, float gain) {
    constexpr uint64_t kHeadsOfQ = 32, kKeys = 4096;
    const Tensor tokens = noise(device_, {kKeys, kHeads, kHeadDim}, 1);
    const KvBuffer k = KvBuffer::allocate(device_, {pair.k, KvRole::k, kHeads, kKeys, kHeadDim});
    const KvBuffer v = KvBuffer::allocate(device_, {pair.v, KvRole::v, kHeads, kKeys, kHeadDim});
    fill(k, v, tokens);
    std::vector<float> values = floats_of(noise(device_, {1, kHeadsOfQ, kHeadDim}, 2));
    for (float& value : values) value *= gain;
    const Tensor q = device_.tensor(DType::f32, {1, kHeadsOfQ, kHeadDim});
    q.write_from(std::span<const float>(values));
    const Tensor out = device_.tensor(DType::f32, {1, kHeadsOfQ, kHeadDim});
    Encoder encoder(device_);
    attention(encoder, {.q = q, .k_cache = k, .v_cache = v, .out = out},
              {.length = kKeys, .scale = 1 / std::sqrt(static_cast<float>(kHeadDim))});
    encoder.submit().wait();
    return attention_nmse(out, q, decoded(k), decoded(v));
  }

  Tensor decoded(const KvBuffer& cache) {
    const KvShape& s = cache.shape;
    Tensor wide = device_.tensor(DType::f32, {s.capacity, s.kv_heads, s.head_dim});
    Encoder encoder(device_);
    if (describe(s.format).compressed) {
      kv_dequantize(encoder, {.cache = cache, .out = wide});
    } else {
      kv_copy(encoder, {.k = cache.codes.permute({1, 0, 2}), .k_cache = wide});
    }
    encoder.submit().wait();
    return wide;
  }

  void measure_attention(const Shape& shape, const std::vector<Pair>& pairs) {
    const auto& [heads, kv_heads, head_dim, context] = shape;
    progress_.begin("attention " + std::to_string(heads) + "/" + std::to_string(kv_heads) + "/" +
                    std::to_string(head_dim) + " at " + std::to_string(context));
    const Tensor tokens = noise_tokens(device_, 4096, kv_heads, head_dim);
    const Tensor q = noise_tokens(device_, 1, heads, head_dim);
    const Tensor out = device_.tensor(DType::f16, {1, heads, head_dim});
    double f16_us = 0;
    for (const Pair& pair : pairs) {
      std::vector<KvBuffer> k, v;
      do {
        k.push_back(KvBuffer::allocate(device_, {pair.k, KvRole::k, kv_heads, context, head_dim}));
        v.push_back(KvBuffer::allocate(device_, {pair.v, KvRole::v, kv_heads, context, head_dim}));
        fill(k.back(), v.back(), tokens);
      } while (k.size() < sets_for(k[0].bytes() + v[0].bytes()));
      const uint64_t bytes = k[0].bytes() + v[0].bytes();
      const double limit_us = static_cast<double>(bytes) / limit_gbps_ / 1e3;
      const uint64_t count = commands_for(limit_us, k.size());
      Encoder encoder(device_);
      for (uint64_t i = 0; i < count; ++i) {
        attention(encoder,
                  {.q = q, .k_cache = k[i % k.size()], .v_cache = v[i % k.size()], .out = out},
                  {.length = context, .scale = 1 / std::sqrt(static_cast<float>(head_dim))});
      }
      const double us = replay_us(encoder.instantiate(), count);
      if (pair.k == KvFormat::f16) f16_us = us;
      std::vector<std::pair<std::string, Field>> fields = {
          {"heads", heads},      {"kv_heads", kv_heads},           {"head_dim", head_dim},
          {"context", context},  {"k", std::string(name(pair.k))}, {"v", std::string(name(pair.v))},
          {"limit_us", limit_us}};
      if (heads == 32 && head_dim == 128 && context == 4096) {
        fields.emplace_back("nmse", error_of(pair, 1));
        fields.emplace_back("nmse_sharp", error_of(pair, 8));
      }
      Row& row = add("attention", std::move(fields), us, bytes);
      row.against = "f16/f16";
      row.against_us = f16_us;
      row.speedup = f16_us / us;
      progress_.done(row);
    }
  }

  void measure_step() {
    constexpr uint64_t kLayers = 32, kQueryHeads = 32, kContext = 4096, kPart = 512;
    progress_.begin("kv_cache step");
    KvCache cache(
        device_, {.kv_heads = kHeads,
                  .head_dim = kHeadDim,
                  .capacity = kContext + 8,
                  .layers = std::vector<KvLayer>(kLayers, {.k = KvFormat::tq4, .v = KvFormat::tq4}),
                  .step_tokens = kPart});
    const Tensor part = noise_tokens(device_, kPart, kHeads, kHeadDim);
    Encoder encoder(device_);
    for (uint64_t at = 0; at < kContext; at += kPart) {
      cache.extend(encoder, kPart);
      for (uint64_t layer = 0; layer < kLayers; ++layer) cache.append(encoder, layer, part, part);
      encoder.submit().wait();
    }
    cache.extend(encoder, 1);
    encoder.submit().wait();
    const Tensor q = noise_tokens(device_, 1, kQueryHeads, kHeadDim),
                 k = noise_tokens(device_, 1, kHeads, kHeadDim),
                 out = device_.tensor(DType::f16, {1, kQueryHeads, kHeadDim});
    // Kernels alone still run one after another: appends of different layers would all run at once.
    const auto record = [&](bool turn, bool store, bool attend) {
      for (uint64_t layer = 0; layer < kLayers; ++layer) {
        if (turn)
          rope(encoder, {.x = q, .positions = cache.positions(1), .out = q, .k = k, .k_out = k});
        if (store) cache.append(encoder, attend ? layer : 0, k, k);
        if (attend) cache.attend(encoder, layer, {.q = q, .out = out}, {.scale = 0.088f});
      }
      return encoder.instantiate();
    };
    const Graph all = record(true, true, true);
    const std::array alone = {record(true, false, false), record(false, true, false),
                              record(false, false, true)};
    const double us = replay_us(all, 1);
    const std::array parts = {replay_us(alone[0], 1), replay_us(alone[1], 1),
                              replay_us(alone[2], 1)};
    Row& row = add("kv_cache step",
                   {{"layers", kLayers},
                    {"context", kContext},
                    {"k", std::string("tq4")},
                    {"v", std::string("tq4")},
                    {"rope_us", parts[0]},
                    {"append_us", parts[1]},
                    {"attend_us", parts[2]}},
                   us, 0);
    row.against = "rope, append, attend alone";
    row.against_us = parts[0] + parts[1] + parts[2];
    row.speedup = row.against_us / us;
    progress_.done(row);
  }

  const Options& options_;
  const Progress& progress_;
  Device device_;
  double limit_gbps_ = 0;
  std::vector<Row> rows_;
};

}  // namespace

std::vector<Row> run_gpu(const Options& options, const Progress& progress) {
  return GpuBench(options, progress).run();
}

}  // namespace gyre::bench
