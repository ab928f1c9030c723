// What runs on a GPU: every op against the device's own copy bandwidth, attention against its first
// format, a decode step of 32 layers against its kernels alone.
#include <array>

#include "bench.h"
#include "gpu_attention.h"
#include "gpu_timing.h"
#include "gyre/gyre.h"
#include "ops/cache_ops.h"
#include "serving.h"

namespace gyre::bench {
namespace {

constexpr uint64_t kTokens = 4096, kHeads = 8, kHeadDim = 128;

class GpuBench {
 public:
  GpuBench(const Options& options, const Progress& progress)
      : options_(options),
        progress_(progress),
        gpu_{Device::open(options.device), options.device},
        device_(gpu_.device) {}

  std::vector<Row> run() {
    std::vector<AttentionRun> runs;
    if (wanted("attention")) runs = gpu_attention_runs(options_.attention);
    for (const AttentionRun& each : runs) check_gpu_memory(device_, each);
    std::vector<ServingRun> batches;
    if (wanted("serving")) batches = serving_runs(options_.attention, options_.serving, true);
    measure_copy();
    if (wanted("kv_copy") || wanted("rope") || wanted("kv_quantize")) measure_ops();
    for (const AttentionRun& each : runs) {
      for (Row& row : measure_gpu_attention(gpu_, each, progress_)) rows_.push_back(std::move(row));
    }
    if (wanted("kv_cache step")) measure_step();
    if (wanted("kv_calibration")) {
      for (Row& row : run_kv_calibration(device_, options_, progress_))
        rows_.push_back(std::move(row));
    }
    for (const ServingRun& each : batches) {
      for (Row& row : measure_gpu_serving(gpu_, each, progress_)) rows_.push_back(std::move(row));
    }
    return std::move(rows_);
  }

 private:
  bool wanted(const char* name) const { return selects(options_, name); }

  Row& add(const std::string& op, Shape shape, double us, uint64_t bytes) {
    rows_.push_back(gpu_row(gpu_, op, std::move(shape), us, bytes));
    return rows_.back();
  }

  void measure_copy() {
    progress_.begin("copy");
    constexpr uint64_t kBytes = 1u << 30;
    const Tensor from = device_.tensor(DType::u8, {kBytes}),
                 to = device_.tensor(DType::u8, {kBytes});
    const auto copy = [&](Encoder& encoder, uint64_t) { copy_bytes(encoder, from, to); };
    const double us = time_commands(device_, 1, copy).replayed;
    gpu_.limit_gbps = 2.0 * static_cast<double>(kBytes) / us / 1e3;
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
      const auto rotate = [&](Encoder& encoder, uint64_t i) {
        const Tensor& x = i % 2 == 0 ? k[i / 2] : v[i / 2];
        rope(encoder, {.x = x, .positions = positions, .out = x});
      };
      add_op("rope", "f16", time_commands(device_, 2 * sets, rotate), 2 * source.bytes());
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
      cache.begin_step(encoder, kPart);
      for (uint64_t layer = 0; layer < kLayers; ++layer) cache.append(encoder, layer, part, part);
      encoder.submit().wait();
    }
    cache.begin_step(encoder, 1);
    encoder.submit().wait();
    const Tensor q = noise_tokens(device_, 1, kQueryHeads, kHeadDim),
                 k = noise_tokens(device_, 1, kHeads, kHeadDim),
                 v = noise_tokens(device_, 1, kHeads, kHeadDim),
                 out = device_.tensor(DType::f16, {1, kQueryHeads, kHeadDim});
    // Kernels alone still run one after another: appends of different layers would all run at once.
    const auto record = [&](bool fused, bool rotate, bool store, bool attend) {
      for (uint64_t layer = 0; layer < kLayers; ++layer) {
        if (fused)
          cache.rope_append(encoder, attend ? layer : 0, {.q = q, .q_out = q, .k = k, .v = v});
        if (rotate)
          rope(encoder, {.x = q, .positions = cache.positions(1), .out = q, .k = k, .k_out = k});
        if (store) cache.append(encoder, attend ? layer : 0, k, v);
        if (attend) cache.attend(encoder, layer, {.q = q, .out = out}, {.scale = 0.088f});
      }
      return encoder.instantiate();
    };
    const Graph all = record(true, false, false, true), apart = record(false, true, true, true);
    const std::array alone = {record(false, true, false, false), record(false, false, true, false),
                              record(false, false, false, true), record(true, false, false, false)};
    const double us = replay_us(all, 1), apart_us = replay_us(apart, 1);
    const std::array parts = {replay_us(alone[0], 1), replay_us(alone[1], 1),
                              replay_us(alone[2], 1), replay_us(alone[3], 1)};
    Row& row = add("kv_cache step",
                   {{"layers", kLayers},
                    {"context", kContext},
                    {"k", std::string("tq4")},
                    {"v", std::string("tq4")},
                    {"rope_us", parts[0]},
                    {"append_us", parts[1]},
                    {"attend_us", parts[2]},
                    {"rope_append_us", parts[3]}},
                   us, 0);
    row.set_against("rope, append, attend in one graph", apart_us);
    progress_.done(row);
  }

  const Options& options_;
  const Progress& progress_;
  GpuContext gpu_;
  const Device& device_;
  std::vector<Row> rows_;
};

}  // namespace

std::vector<Row> run_gpu(const Options& options, const Progress& progress) {
  return GpuBench(options, progress).run();
}

}  // namespace gyre::bench
