// What a calibration costs: writing with a basis and error feedback, and attending in a basis, each
// against the same without.
#include <cmath>
#include <random>

#include "bench.h"
#include "gyre/gyre.h"
#include "machine_kernels.h"
#include "noise.h"
#include "timing.h"

namespace gyre::bench {
namespace {

constexpr uint64_t kLayers = 4, kHeads = 32, kKvHeads = 8, kDim = 128, kPart = 512;

Tensor floats(const Device& device, const Dims& shape, const std::vector<float>& values) {
  Tensor made = device.tensor(DType::f32, shape);
  made.write_from(std::span<const float>(values));
  return made;
}

// Numbers of the right size: 1 plus a rank-one matrix, and its inverse.
KvCalibration some_calibration(const Device& device, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.1f);
  std::vector<float> matrix, inverse, factor, mean, diagonal(kKvHeads * kDim, 1.1f);
  for (uint64_t head = 0; head < kKvHeads; ++head) {
    std::vector<float> e(kDim);
    float square = 0;
    for (float& value : e) value = normal(random), square += value * value, mean.push_back(value);
    for (uint64_t i = 0; i < kDim * kDim; ++i) {
      const float one = i / kDim == i % kDim ? 1.0f : 0.0f, product = e[i / kDim] * e[i % kDim];
      matrix.push_back(one + product);
      inverse.push_back(one - product / (1.0f + square));
      factor.push_back(i % kDim > i / kDim ? normal(random) : 0.0f);
    }
  }
  const Dims matrices = {kKvHeads, kDim, kDim}, vectors = {kKvHeads, kDim};
  return {
      {floats(device, matrices, matrix), floats(device, matrices, inverse),
       floats(device, vectors, mean)},
      {floats(device, matrices, factor), floats(device, vectors, diagonal), {0.9f, 1.0f, 1.1f}}};
}

class CalibrationBench {
 public:
  CalibrationBench(const Device& device, const Options& options, const Progress& progress)
      : device_(device),
        options_(options),
        progress_(progress),
        gpu_(options.device != "cpu"),
        dtype_(gpu_ ? DType::f16 : DType::f32),
        context_(gpu_ ? 32768 : 16384),
        encoder_(device) {}

  std::vector<Row> run() {
    KvCache plain = make(false), calibrated = make(true);
    measure("kv_calibration write of one token", plain, calibrated, 1, true);
    measure("kv_calibration write of 512 tokens", plain, calibrated, kPart, true);
    for (KvCache* cache : {&plain, &calibrated}) fill(*cache);
    measure("kv_calibration attend", plain, calibrated, 1, false);
    return std::move(rows_);
  }

 private:
  Tensor rows(uint64_t tokens, uint64_t heads, uint32_t seed) const {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const Tensor made = device_.tensor(dtype_, {tokens, heads, kDim});
    if (dtype_ == DType::f16) {
      std::vector<Half> values(made.elements());
      for (Half& value : values) value = Half(normal(random));
      made.write_from(std::span<const Half>(values));
    } else {
      std::vector<float> values(made.elements());
      for (float& value : values) value = normal(random);
      made.write_from(std::span<const float>(values));
    }
    return made;
  }

  KvCache make(bool calibrated) const {
    KvCacheOptions wanted{
        .kv_heads = kKvHeads,
        .head_dim = kDim,
        .capacity = context_ + 2 * kPart,
        .layers = std::vector<KvLayer>(kLayers, {.k = KvFormat::tq4, .v = KvFormat::tq4}),
        .step_tokens = kPart};
    for (uint32_t layer = 0; calibrated && layer < kLayers; ++layer)
      wanted.calibration.push_back(
          {some_calibration(device_, 2 * layer), some_calibration(device_, 2 * layer + 1)});
    return {device_, wanted};
  }

  void fill(KvCache& cache) {
    const Tensor k = rows(kPart, kKvHeads, 2), v = rows(kPart, kKvHeads, 3);
    cache.clear(encoder_);
    while (cache.length() < context_) {
      cache.begin_step(encoder_, kPart);
      for (uint64_t layer = 0; layer < kLayers; ++layer) cache.append(encoder_, layer, k, v);
      encoder_.submit().wait();
    }
    cache.begin_step(encoder_, 1);
    for (uint64_t layer = 0; layer < kLayers; ++layer)
      cache.append(encoder_, layer, k.slice(0, 0, 1), v.slice(0, 0, 1));
    encoder_.submit().wait();
  }

  // The layers one after the other, `repeats_` times.
  Graph record(KvCache& cache, uint64_t tokens, bool write) {
    if (write) {
      cache.clear(encoder_);
      cache.begin_step(encoder_, tokens);
      encoder_.submit().wait();
    }
    const Tensor k = rows(tokens, kKvHeads, 2), v = rows(tokens, kKvHeads, 3),
                 q = rows(tokens, kHeads, 4), out = device_.tensor(dtype_, q.shape());
    for (uint64_t i = 0; i < repeats_; ++i) {
      for (uint64_t layer = 0; layer < kLayers; ++layer) {
        if (write) {
          cache.append(encoder_, layer, k, v);
        } else {
          cache.attend(encoder_, layer, {.q = q, .out = out});
        }
      }
    }
    return encoder_.instantiate();
  }

  void measure(const char* name, KvCache& plain, KvCache& calibrated, uint64_t tokens, bool write) {
    progress_.begin(name);
    repeats_ = gpu_ ? 16 : 1;
    const Graph graphs[] = {record(plain, tokens, write), record(calibrated, tokens, write)};
    const auto times = medians_us({[&](uint64_t) { graphs[0].replay().wait(); },
                                   [&](uint64_t) { graphs[1].replay().wait(); }},
                                  2 * options_.seconds_per_row());
    const auto commands = static_cast<double>(repeats_ * kLayers);
    Row row;
    row.op = name;
    row.device = options_.device;
    row.threads = gpu_ ? 0 : device_.info().compute_units;
    row.shape = {{"tokens", tokens},
                 {"heads", kHeads},
                 {"kv_heads", kKvHeads},
                 {"head_dim", kDim},
                 {"context", write ? tokens : context_},
                 {"k", std::string("tq4")},
                 {"v", std::string("tq4")}};
    row.median_us = times[1] / commands;
    row.against = "without a calibration";
    row.against_us = times[0] / commands;
    row.speedup = times[0] / times[1];
    rows_.push_back(row);
    progress_.done(rows_.back());
  }

  const Device& device_;
  const Options& options_;
  const Progress& progress_;
  bool gpu_;
  DType dtype_;
  uint64_t context_;
  Encoder encoder_;
  uint64_t repeats_ = 1;
  std::vector<Row> rows_;
};

}  // namespace

std::vector<Row> run_kv_calibration(const Device& device, const Options& options,
                                    const Progress& progress) {
  return CalibrationBench(device, options, progress).run();
}

std::vector<Row> run_cpu_kv_calibration(const Options& options, const Progress& progress) {
  return run_kv_calibration(open_cpu(options.cpu_threads()), options, progress);
}

}  // namespace gyre::bench
