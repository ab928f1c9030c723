// What a calibration costs: writing with a basis and error feedback, and attending in a basis, each
// against the same without.
#include <random>

#include "bench.h"
#include "gyre/gyre.h"
#include "machine_kernels.h"
#include "noise.h"
#include "timing.h"

namespace gyre::bench {
namespace {

constexpr uint64_t kLayers = 4, kPart = 512;

// What is written: K and V of heads, or a latent and its rotary part with gyre.calibrate's gains.
struct CachedRows {
  const char* name;
  uint64_t heads, kv_heads, dim, v_dim;
  bool latent;
  KvFormat v;
  std::vector<float> gains;

  KvLayer layer() const {
    return {.k = KvFormat::tq4,
            .v = v,
            .kv_heads = kv_heads,
            .head_dim = dim,
            .v_head_dim = v_dim,
            .latent = latent};
  }
  uint64_t q_dim() const { return latent ? dim + v_dim : dim; }
  uint64_t out_dim() const { return latent ? dim : v_dim; }
};

std::vector<CachedRows> shapes() {
  return {{"kv_calibration", 32, 8, 128, 128, false, KvFormat::tq4, {0.9f, 1.0f, 1.1f}},
          {"kv_calibration latent",
           16,
           1,
           512,
           64,
           true,
           KvFormat::tq8,
           {0.85f, 0.9f, 0.95f, 1.0f, 1.05f, 1.1f, 1.15f}}};
}

Tensor floats(const Device& device, const Dims& shape, const std::vector<float>& values) {
  Tensor made = device.tensor(DType::f32, shape);
  made.write_from(std::span<const float>(values));
  return made;
}

// Numbers of the right size: 1 plus a rank-one matrix, and its inverse.
KvCalibration some_calibration(const Device& device, uint32_t seed, const CachedRows& shape,
                               uint64_t dim) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.1f);
  std::vector<float> matrix, inverse, factor, mean, diagonal(shape.kv_heads * dim, 1.1f);
  for (uint64_t head = 0; head < shape.kv_heads; ++head) {
    std::vector<float> e(dim);
    float square = 0;
    for (float& value : e) value = normal(random), square += value * value, mean.push_back(value);
    for (uint64_t i = 0; i < dim * dim; ++i) {
      const float one = i / dim == i % dim ? 1.0f : 0.0f, product = e[i / dim] * e[i % dim];
      matrix.push_back(one + product);
      inverse.push_back(one - product / (1.0f + square));
      factor.push_back(i % dim > i / dim ? normal(random) : 0.0f);
    }
  }
  const Dims matrices = {shape.kv_heads, dim, dim}, vectors = {shape.kv_heads, dim};
  return {{floats(device, matrices, matrix), floats(device, matrices, inverse),
           floats(device, vectors, mean)},
          {floats(device, matrices, factor), floats(device, vectors, diagonal), shape.gains}};
}

class CalibrationBench {
 public:
  CalibrationBench(const Device& device, const Options& options, const Progress& progress,
                   CachedRows shape)
      : device_(device),
        options_(options),
        progress_(progress),
        shape_(std::move(shape)),
        gpu_(options.device != "cpu"),
        dtype_(gpu_ ? DType::f16 : DType::f32),
        context_(gpu_ ? 32768 : 16384),
        encoder_(device) {}

  std::vector<Row> run() {
    KvCache plain = make(false), calibrated = make(true);
    measure(" write of one token", plain, calibrated, 1, true);
    measure(" write of 512 tokens", plain, calibrated, kPart, true);
    for (KvCache* cache : {&plain, &calibrated}) fill(*cache);
    measure(" attend", plain, calibrated, 1, false);
    return std::move(rows_);
  }

 private:
  Tensor rows(uint64_t tokens, uint64_t heads, uint64_t dim, uint32_t seed) const {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const Tensor made = device_.tensor(dtype_, {tokens, heads, dim});
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
    KvCacheOptions wanted{.capacity = context_ + 2 * kPart,
                          .layers = std::vector<KvLayer>(kLayers, shape_.layer()),
                          .step_tokens = kPart};
    for (uint32_t layer = 0; calibrated && layer < kLayers; ++layer)
      wanted.calibration.push_back(
          {some_calibration(device_, 2 * layer, shape_, shape_.dim),
           some_calibration(device_, 2 * layer + 1, shape_, shape_.v_dim)});
    return {device_, wanted};
  }

  void fill(KvCache& cache) {
    const Tensor k = rows(kPart, shape_.kv_heads, shape_.dim, 2),
                 v = rows(kPart, shape_.kv_heads, shape_.v_dim, 3);
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
    const Tensor k = rows(tokens, shape_.kv_heads, shape_.dim, 2),
                 v = rows(tokens, shape_.kv_heads, shape_.v_dim, 3),
                 q = rows(tokens, shape_.heads, shape_.q_dim(), 4),
                 out = device_.tensor(dtype_, {tokens, shape_.heads, shape_.out_dim()});
    for (uint64_t i = 0; i < repeats_; ++i) {
      for (uint64_t layer = 0; layer < kLayers; ++layer) {
        if (write) {
          cache.append(encoder_, layer, k, v);
        } else {
          cache.attend(encoder_, layer, {.q = q, .out = out}, {.scale = 0.1f});
        }
      }
    }
    return encoder_.instantiate();
  }

  void measure(const char* what, KvCache& plain, KvCache& calibrated, uint64_t tokens, bool write) {
    const std::string name = std::string(shape_.name) + what;
    progress_.begin(name);
    repeats_ = gpu_ ? 16 : 1;
    const Graph graphs[] = {record(plain, tokens, write), record(calibrated, tokens, write)};
    const auto times = medians_us({[&](uint64_t) { graphs[0].replay().wait(); },
                                   [&](uint64_t) { graphs[1].replay().wait(); }},
                                  2 * options_.seconds_per_row());
    const auto commands = static_cast<double>(repeats_ * kLayers);
    Shape dims = {{"tokens", tokens},
                  {"heads", shape_.heads},
                  {"kv_heads", shape_.kv_heads},
                  {"head_dim", shape_.dim},
                  {"context", write ? tokens : context_},
                  {"k", std::string("tq4")},
                  {"v", std::string(gyre::name(shape_.v))}};
    if (shape_.latent) dims.emplace_back("rotary_dim", shape_.v_dim);
    Row row = make_row(options_, device_, name, std::move(dims), times[1] / commands);
    if (gpu_) row.threads = 0;
    row.set_against("without a calibration", times[0] / commands);
    rows_.push_back(row);
    progress_.done(rows_.back());
  }

  const Device& device_;
  const Options& options_;
  const Progress& progress_;
  CachedRows shape_;
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
  std::vector<Row> all;
  for (const CachedRows& shape : shapes()) {
    if (shape.latent && !supports(device, AttentionTypes{DType::f16, KvFormat::tq4, shape.v,
                                                         DType::f16, false, true}))
      continue;
    const std::vector<Row> rows = CalibrationBench(device, options, progress, shape).run();
    all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
}

std::vector<Row> run_cpu_kv_calibration(const Options& options, const Progress& progress) {
  return run_kv_calibration(open_cpu(options.cpu_threads()), options, progress);
}

}  // namespace gyre::bench
