#pragma once
// Latent layers of KvCache and KvPool: sequences that a model would have, and what attention must
// give, in double precision over the rows as they are stored.

#include "attention/attention_reference.h"
#include "cpu/attention/isa/kernels.h"
#include "gyre_test.h"
#include "numbers.h"
#include "test_device.h"

namespace gyre::test {

inline constexpr uint64_t kLatent = 128, kRotary = 32, kHeads = 16, kTail = 16, kSinks = 2;
inline constexpr float kScale = 0.08f;

inline KvLayer latent_layer(KvFormat k, KvFormat v, uint64_t tail, uint64_t sink_tokens) {
  return {.k = k,
          .v = v,
          .tail = tail,
          .sink_tokens = sink_tokens,
          .kv_heads = 1,
          .head_dim = kLatent,
          .v_head_dim = kRotary,
          .latent = true};
}

// Rows of one kind: as they are given, stored and in f16.
struct Rows {
  Tensor given;  // f32 [tokens, 1, dim]
  std::vector<float> stored, half;
};

// matrix (x - before) + after for each row, as kv_transform has it, in double precision.
inline std::vector<float> transformed(const std::vector<float>& rows, const Tensor& matrix,
                                      const Tensor& before, const Tensor& after) {
  const std::vector<float> m = floats_of(matrix);
  const size_t dim = matrix.shape(2);
  const auto vector = [&](const Tensor& t) {
    return t.defined() ? floats_of(t) : std::vector<float>(dim);
  };
  const std::vector<float> less = vector(before), more = vector(after);
  std::vector<float> out(rows.size());
  for (size_t row = 0; row < rows.size(); row += dim) {
    for (size_t i = 0; i < dim; ++i) {
      double sum = more[i];
      for (size_t j = 0; j < dim; ++j)
        sum += double{m[j * dim + i]} * (double{rows[row + j]} - less[j]);
      out[row + i] = static_cast<float>(sum);
    }
  }
  return out;
}

// What a buffer of this format gives back, out of the calibration's basis.
inline std::vector<float> through(const Device& device, const Tensor& given, KvFormat format,
                                  KvRole role, const KvCalibration& calibration) {
  const uint64_t tokens = given.shape(0), dim = given.shape(2);
  const KvBuffer buffer = KvBuffer::allocate(device, {format, role, 1, tokens, dim});
  const Tensor back = device.tensor(DType::f32, given.shape());
  const KvTransform& basis = calibration.transform;
  Encoder encoder(device);
  if (!describe(format).compressed) {
    Tensor rows = given;
    if (basis.defined())
      rows = tensor_of(device, transformed(floats_of(given), basis.matrix, basis.mean, {}),
                       given.shape());
    kv_copy(encoder, {.k = rows, .k_cache = buffer.codes.permute({1, 0, 2})});
    kv_copy(encoder, {.k = buffer.codes.permute({1, 0, 2}), .k_cache = back});
  } else {
    if (role == KvRole::k)
      kv_quantize(encoder, {.k = given, .k_cache = buffer, .k_calibration = calibration});
    if (role == KvRole::v)
      kv_quantize(encoder, {.v = given, .v_cache = buffer, .v_calibration = calibration});
    kv_dequantize(encoder, {buffer, back});
  }
  encoder.submit().wait();
  const std::vector<float> held = floats_of(back);
  return basis.defined() ? transformed(held, basis.inverse, {}, basis.mean) : held;
}

// A sequence that a model would have: its rows, its queries, and what attention must give.
class Story {
 public:
  Story(const Device& device, const KvLayer& layer, uint64_t tokens, uint32_t seed,
        const KvLayerCalibration& calibration = {})
      : layer_(layer) {
    std::mt19937 random(seed);
    const auto rows = [&](KvFormat format, KvRole role, uint64_t dim, const KvCalibration& by) {
      const Tensor given = normal_tensor(device, {tokens, 1, dim}, random);
      return Rows{given, through(device, given, format, role, by),
                  through(device, given, KvFormat::f16, role, by)};
    };
    latent = rows(layer.k, KvRole::k, layer.head_dim, calibration.k);
    rotary = rows(layer.v, KvRole::v, layer.v_head_dim, calibration.v);
    q = normal_tensor(device, {tokens, kHeads, layer.head_dim + layer.v_head_dim}, random);
  }

  uint64_t out_floats() const { return kHeads * layer_.head_dim; }

  // NMSE of the output of the query at `position`, given as [heads, latent].
  double error(uint64_t position, std::span<const float> out) const {
    reference::AttentionData data;
    const std::vector<float> queries = floats_of(q);
    const uint64_t latent_dim = layer_.head_dim, rotary_dim = layer_.v_head_dim;
    const uint64_t row_floats = kHeads * (latent_dim + rotary_dim);
    const auto begin = queries.begin() + static_cast<ptrdiff_t>(position * row_floats);
    data.q.assign(begin, begin + static_cast<ptrdiff_t>(row_floats));
    for (uint64_t key = 0; key <= position; ++key) {
      append(data.k, latent, latent_dim, key, position);
      append(data.v, rotary, rotary_dim, key, position);
    }
    reference::join_latent(latent_dim, rotary_dim, data);
    const reference::AttentionResult expected =
        reference::attention({1, kHeads, 1, latent_dim + rotary_dim, latent_dim, position + 1,
                              position + 1, 0, double{kScale}},
                             data);
    return nmse(std::vector<double>(out.begin(), out.end()), expected.out);
  }

 private:
  // The first and the newest rows are there in f16.
  void append(std::vector<double>& to, const Rows& rows, uint64_t dim, uint64_t key,
              uint64_t position) const {
    const bool near = key < layer_.sink_tokens || key + layer_.tail > position;
    const std::vector<float>& from = near ? rows.half : rows.stored;
    const auto begin = from.begin() + static_cast<ptrdiff_t>(key * dim);
    to.insert(to.end(), begin, begin + static_cast<ptrdiff_t>(dim));
  }

  KvLayer layer_;

 public:
  Rows latent, rotary;
  Tensor q;
};

// The error of a layer's output. Prompts over 16-bit rows go through bf16 matrix products where a
// CPU has them: their weights have eight bits (attention_tolerance.h).
inline double max_error(const Device& device, const KvLayer& layer) {
  const bool in_16_bits = layer.tail != 0 || layer.sink_tokens != 0 ||
                          !describe(layer.k).compressed || !describe(layer.v).compressed;
  const bool as_bf16 =
      device.info().name == "cpu" && cpu::attention_kernels().score_prompt != nullptr;
  return in_16_bits && as_bf16 ? 6e-6 : 1e-6;
}

class LatentTest : public testing::Test {
 public:
  LatentTest() {
    if (!supports(device, AttentionTypes{DType::f32, KvFormat::tq4, KvFormat::tq8, DType::f32,
                                         false, true}))
      skipped = true;
  }
  void SetUp() override {
    if (skipped) GTEST_SKIP() << "the device has no latent attention";
  }

  Device device = test_device();
  Encoder encoder{device};
  bool skipped = false;
};

// Runs tokens [first, first + tokens) of a story; returns the largest error of a row.
inline double run_step(Encoder& encoder, KvCache& cache, const Story& story, uint64_t first,
                       uint64_t tokens) {
  const uint64_t latent = story.latent.given.shape(2), out_floats = story.out_floats();
  const Tensor out = encoder.device().tensor(DType::f32, {tokens, kHeads, latent});
  cache.begin_step(encoder, tokens);
  cache.append(encoder, 0, story.latent.given.slice(0, first, tokens),
               story.rotary.given.slice(0, first, tokens));
  cache.attend(encoder, 0, {.q = story.q.slice(0, first, tokens), .out = out}, {.scale = kScale});
  encoder.submit().wait();
  const std::vector<float> rows = floats_of(out);
  double largest = 0;
  for (uint64_t t = 0; t < tokens; ++t)
    largest = std::max(largest,
                       story.error(first + t, std::span(rows).subspan(t * out_floats, out_floats)));
  return largest;
}

// One sequence of a batch: its next tokens, and the largest error of their rows.
struct Part {
  KvSequence& sequence;
  const Story& story;
  uint64_t first, tokens;
};

inline double run_batch(Encoder& encoder, KvBatch& batch, const std::vector<Part>& parts) {
  const Device& device = encoder.device();
  const Story& any = parts.front().story;
  const uint64_t latent = any.latent.given.shape(2), rotary = any.rotary.given.shape(2);
  uint64_t rows = 0;
  std::vector<KvStep> steps;
  std::vector<float> k, v, q;
  const auto append = [](std::vector<float>& to, const Tensor& from, const Part& part) {
    const std::vector<float> values = floats_of(from.slice(0, part.first, part.tokens));
    to.insert(to.end(), values.begin(), values.end());
  };
  for (const Part& part : parts) {
    steps.push_back({part.sequence, part.tokens});
    append(k, part.story.latent.given, part);
    append(v, part.story.rotary.given, part);
    append(q, part.story.q, part);
    rows += part.tokens;
  }
  const Tensor out = device.tensor(DType::f32, {rows, kHeads, latent});
  batch.begin_step(encoder, steps);
  batch.append(encoder, 0, tensor_of(device, k, {rows, 1, latent}),
               tensor_of(device, v, {rows, 1, rotary}));
  batch.attend(encoder, 0, {.q = tensor_of(device, q, {rows, kHeads, latent + rotary}), .out = out},
               {.scale = kScale});
  encoder.submit().wait();
  batch.end_step();
  const std::vector<float> outs = floats_of(out);
  double largest = 0;
  size_t at = 0;
  for (const Part& part : parts) {
    for (uint64_t t = 0; t < part.tokens; ++t, at += any.out_floats())
      largest = std::max(
          largest, part.story.error(part.first + t, std::span(outs).subspan(at, any.out_floats())));
  }
  return largest;
}

}  // namespace gyre::test
