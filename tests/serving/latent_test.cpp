// Latent layers of KvCache and KvPool: steps, replays, forks, prefixes and files, against attention
// in double precision over the rows as they are stored.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <random>

#include "attention/attention_reference.h"
#include "expect_error.h"
#include "gyre/gyre.h"
#include "test_device.h"

namespace gyre::test {
namespace {

constexpr uint64_t kLatent = 128, kRotary = 32, kHeads = 16, kTail = 16, kSinks = 2;
constexpr float kScale = 0.08f;

KvLayer latent_layer(KvFormat k, KvFormat v, uint64_t tail, uint64_t sink_tokens) {
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

std::vector<float> floats_of(const Tensor& tensor) {
  std::vector<float> values(tensor.elements());
  tensor.read_to(std::span<float>(values));
  return values;
}

// What a buffer of this format gives back.
std::vector<float> through(const Device& device, const Tensor& given, KvFormat format,
                           KvRole role) {
  const uint64_t tokens = given.shape(0), dim = given.shape(2);
  const KvBuffer buffer = KvBuffer::allocate(device, {format, role, 1, tokens, dim});
  const Tensor back = device.tensor(DType::f32, given.shape());
  Encoder encoder(device);
  if (!describe(format).compressed) {
    kv_copy(encoder, {.k = given, .k_cache = buffer.codes.permute({1, 0, 2})});
    kv_copy(encoder, {.k = buffer.codes.permute({1, 0, 2}), .k_cache = back});
  } else {
    if (role == KvRole::k) kv_quantize(encoder, {.k = given, .k_cache = buffer});
    if (role == KvRole::v) kv_quantize(encoder, {.v = given, .v_cache = buffer});
    kv_dequantize(encoder, {buffer, back});
  }
  encoder.submit().wait();
  return floats_of(back);
}

// A sequence that a model would have: its rows, its queries, and what attention must give.
class Story {
 public:
  Story(const Device& device, const KvLayer& layer, uint64_t tokens, uint32_t seed)
      : layer_(layer), q(device.tensor(DType::f32, {tokens, kHeads, kLatent + kRotary})) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](const Tensor& tensor) {
      std::vector<float> values(tensor.elements());
      for (float& x : values) x = normal(random);
      tensor.write_from(std::span<const float>(values));
    };
    const auto rows = [&](KvFormat format, KvRole role, uint64_t dim) {
      const Tensor given = device.tensor(DType::f32, {tokens, 1, dim});
      fill(given);
      return Rows{given, through(device, given, format, role),
                  through(device, given, KvFormat::f16, role)};
    };
    latent = rows(layer.k, KvRole::k, kLatent);
    rotary = rows(layer.v, KvRole::v, kRotary);
    fill(q);
  }

  // NMSE of the output of the query at `position`, given as [heads, kLatent].
  double error(uint64_t position, std::span<const float> out) const {
    reference::AttentionData data;
    const std::vector<float> queries = floats_of(q);
    const uint64_t row_floats = kHeads * (kLatent + kRotary);
    const auto begin = queries.begin() + static_cast<ptrdiff_t>(position * row_floats);
    data.q.assign(begin, begin + static_cast<ptrdiff_t>(row_floats));
    for (uint64_t key = 0; key <= position; ++key) {
      append(data.k, latent, kLatent, key, position);
      append(data.v, rotary, kRotary, key, position);
    }
    reference::join_latent(kLatent, kRotary, data);
    const reference::AttentionResult expected = reference::attention(
        {1, kHeads, 1, kLatent + kRotary, kLatent, position + 1, position + 1, 0, double{kScale}},
        data);
    double wrong = 0, energy = 0;
    for (size_t i = 0; i < expected.out.size(); ++i) {
      wrong += std::pow(double{out[i]} - expected.out[i], 2);
      energy += expected.out[i] * expected.out[i];
    }
    return wrong / energy;
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

constexpr double kMostError = 1e-6;

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
double run_step(Encoder& encoder, KvCache& cache, const Story& story, uint64_t first,
                uint64_t tokens) {
  const Tensor out = encoder.device().tensor(DType::f32, {tokens, kHeads, kLatent});
  cache.begin_step(encoder, tokens);
  cache.append(encoder, 0, story.latent.given.slice(0, first, tokens),
               story.rotary.given.slice(0, first, tokens));
  cache.attend(encoder, 0, {.q = story.q.slice(0, first, tokens), .out = out}, {.scale = kScale});
  encoder.submit().wait();
  const std::vector<float> rows = floats_of(out);
  double largest = 0;
  for (uint64_t t = 0; t < tokens; ++t)
    largest = std::max(largest,
                       story.error(first + t, std::span(rows).subspan(t * kHeads * kLatent,
                                                                      kHeads * kLatent)));
  return largest;
}

TEST_F(LatentTest, StepsOfACache) {
  for (const auto& [k, v] : {std::pair{KvFormat::tq4, KvFormat::tq8},
                             {KvFormat::tq6, KvFormat::bf16},
                             {KvFormat::bf16, KvFormat::bf16}}) {
    const bool near = describe(k).compressed;
    const KvLayer layer = latent_layer(k, v, near ? kTail : 0, near ? kSinks : 0);
    const Story story(device, layer, 120, 7);
    KvCache cache(device, {.capacity = 130, .layers = {layer}, .step_tokens = 80});
    EXPECT_LT(run_step(encoder, cache, story, 0, 70), kMostError);
    uint64_t first = 70;
    for (const uint64_t tokens : {1u, 1u, 5u, 1u, 20u, 1u}) {
      EXPECT_LT(run_step(encoder, cache, story, first, tokens), kMostError) << first;
      first += tokens;
    }
    KvCache fork = cache.fork(encoder);
    EXPECT_LT(run_step(encoder, fork, story, first, 3), kMostError);
    EXPECT_LT(run_step(encoder, cache, story, first, 1), kMostError);
  }
}

TEST_F(LatentTest, BytesOfAToken) {
  const auto bytes = [&](KvFormat k, KvFormat v) {
    return kv_page_bytes({.k = k,
                          .v = v,
                          .kv_heads = 1,
                          .head_dim = 512,
                          .v_head_dim = 64,
                          .page_tokens = 64,
                          .latent = true}) /
           64;
  };
  EXPECT_LE(bytes(KvFormat::tq4, KvFormat::tq8), 330u);
  EXPECT_LE(bytes(KvFormat::tq8, KvFormat::tq8), 592u);
  EXPECT_EQ(bytes(KvFormat::bf16, KvFormat::bf16), 1152u);
}

TEST_F(LatentTest, AReplayedStepIsTheEagerOne) {
  const KvLayer layer = latent_layer(KvFormat::tq4, KvFormat::tq8, kTail, kSinks);
  const Story story(device, layer, 60, 9);
  const KvCacheOptions options{.capacity = 64, .layers = {layer}, .step_tokens = 50};
  KvCache eager(device, options), replayed(device, options);
  run_step(encoder, eager, story, 0, 50);
  run_step(encoder, replayed, story, 0, 50);
  const Tensor k = device.tensor(DType::f32, {1, 1, kLatent}),
               v = device.tensor(DType::f32, {1, 1, kRotary}),
               q = device.tensor(DType::f32, {1, kHeads, kLatent + kRotary}),
               out = device.tensor(DType::f32, {1, kHeads, kLatent});
  replayed.append(encoder, 0, k, v);
  replayed.attend(encoder, 0, {.q = q, .out = out}, {.scale = kScale});
  const Graph graph = encoder.instantiate();
  for (uint64_t at = 50; at < 60; ++at) {
    const Tensor wanted = device.tensor(DType::f32, {1, kHeads, kLatent});
    eager.begin_step(encoder, 1);
    eager.append(encoder, 0, story.latent.given.slice(0, at, 1), story.rotary.given.slice(0, at, 1));
    eager.attend(encoder, 0, {.q = story.q.slice(0, at, 1), .out = wanted}, {.scale = kScale});
    encoder.submit().wait();
    const auto copy = [](const Tensor& from, const Tensor& to) {
      to.write_from(std::span<const float>(floats_of(from)));
    };
    copy(story.latent.given.slice(0, at, 1), k);
    copy(story.rotary.given.slice(0, at, 1), v);
    copy(story.q.slice(0, at, 1), q);
    replayed.begin_step(encoder, 1);
    encoder.submit().wait();
    graph.replay().wait();
    EXPECT_EQ(floats_of(out), floats_of(wanted)) << at;
  }
}

TEST_F(LatentTest, SnapshotsKnowThatALayerIsLatent) {
  const KvLayer layer = latent_layer(KvFormat::tq4, KvFormat::tq8, kTail, kSinks);
  const Story story(device, layer, 50, 11);
  const KvCacheOptions options{.capacity = 64, .layers = {layer}, .step_tokens = 48};
  KvCache cache(device, options);
  run_step(encoder, cache, story, 0, 48);
  const std::string path = testing::TempDir() + "/gyre_latent.kv";
  cache.save(path);
  EXPECT_TRUE(inspect_snapshot(path).options.layers[0].latent);
  KvCache loaded(device, options);
  loaded.load(path);
  EXPECT_LT(run_step(encoder, loaded, story, 48, 2), kMostError);
  KvCacheOptions plain = options;
  plain.layers[0].latent = false;
  KvCache other(device, plain);
  EXPECT_TRUE(throws_error(ErrorCode::invalid_argument,
                           {"latent of layer 0 is 1 in the snapshot and 0 in the cache"},
                           [&] { other.load(path); }));
  std::filesystem::remove(path);
}

// One sequence of a batch: its next tokens, and the largest error of their rows.
struct Part {
  KvSequence& sequence;
  const Story& story;
  uint64_t first, tokens;
};

double run_batch(Encoder& encoder, KvBatch& batch, const std::vector<Part>& parts) {
  const Device& device = encoder.device();
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
  const auto upload = [&](const std::vector<float>& values, const Dims& shape) {
    Tensor tensor = device.tensor(DType::f32, shape);
    tensor.write_from(std::span<const float>(values));
    return tensor;
  };
  const Tensor out = device.tensor(DType::f32, {rows, kHeads, kLatent});
  batch.begin_step(encoder, steps);
  batch.append(encoder, 0, upload(k, {rows, 1, kLatent}), upload(v, {rows, 1, kRotary}));
  batch.attend(encoder, 0, {.q = upload(q, {rows, kHeads, kLatent + kRotary}), .out = out},
               {.scale = kScale});
  encoder.submit().wait();
  batch.end_step();
  const std::vector<float> outs = floats_of(out);
  double largest = 0;
  size_t at = 0;
  for (const Part& part : parts) {
    for (uint64_t t = 0; t < part.tokens; ++t, at += kHeads * kLatent)
      largest = std::max(largest, part.story.error(part.first + t,
                                                   std::span(outs).subspan(at, kHeads * kLatent)));
  }
  return largest;
}

TEST_F(LatentTest, APoolOfSequences) {
  const KvLayer layer = latent_layer(KvFormat::tq4, KvFormat::tq8, kTail, kSinks);
  const KvPoolOptions options{.layers = {layer}, .pages = 64, .page_tokens = 16, .sequences = 8};
  KvPool pool(device, options);
  KvBatch batch(pool, {.max_sequences = 4, .max_tokens = 128});
  const Story one(device, layer, 100, 1), two(device, layer, 100, 2);
  KvSequence a = pool.sequence(), b = pool.sequence();
  EXPECT_LT(run_batch(encoder, batch, {{a, one, 0, 64}, {b, two, 0, 33}}), kMostError);
  EXPECT_LT(run_batch(encoder, batch, {{a, one, 64, 1}, {b, two, 33, 4}}), kMostError);
  KvSequence fork = a.fork();
  EXPECT_LT(run_batch(encoder, batch, {{a, one, 65, 3}, {b, two, 37, 1}, {fork, one, 65, 1}}),
            kMostError);
  // A prefix that the index knows.
  std::vector<int32_t> tokens(64);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i);
  KvSequence prompt = pool.sequence();
  EXPECT_LT(run_batch(encoder, batch, {{prompt, one, 0, 64}}), kMostError);
  pool.publish(prompt, tokens);
  KvSequence matched = pool.match(tokens);
  ASSERT_EQ(matched.length(), 64u);
  EXPECT_LT(run_batch(encoder, batch, {{matched, one, 64, 2}}), kMostError);
  // A file, which a pool that is not latent refuses.
  const std::string path = testing::TempDir() + "/gyre_latent.sequence";
  pool.save(matched, path);
  KvSequence loaded = pool.load(path);
  EXPECT_LT(run_batch(encoder, batch, {{loaded, one, 66, 2}}), kMostError);
  KvPoolOptions plain = options;
  plain.layers[0].latent = false;
  const KvPool other(device, plain);
  EXPECT_TRUE(throws_error(ErrorCode::io, {"is of a pool with other layers"},
                           [&] { other.load(path); }));
  std::filesystem::remove(path);
}

TEST_F(LatentTest, Refusals) {
  KvLayer two_heads = latent_layer(KvFormat::tq4, KvFormat::tq8, 0, 0);
  two_heads.kv_heads = 2;
  EXPECT_TRUE(throws_error(ErrorCode::invalid_argument,
                           {"kv_cache: layer 0: latent attention has one KV head", "got kv_heads 2"},
                           [&] { KvCache(device, {.capacity = 8, .layers = {two_heads}}); }));
  const KvLayer layer = latent_layer(KvFormat::tq4, KvFormat::tq8, 0, 0);
  KvCache cache(device, {.capacity = 8, .layers = {layer}});
  const Tensor k = device.tensor(DType::f32, {1, 1, kLatent}),
               v = device.tensor(DType::f32, {1, 1, kRotary}),
               q = device.tensor(DType::f32, {1, kHeads, kLatent + kRotary}),
               out = device.tensor(DType::f32, {1, kHeads, kLatent});
  cache.begin_step(encoder, 1);
  EXPECT_TRUE(throws_error(
      ErrorCode::invalid_argument,
      {"kv_cache.rope_append: layer 0 is latent: its k is not rotated"},
      [&] { cache.rope_append(encoder, 0, {.k = k, .v = v}, {.rope = RopeOptions{}}); }));
  cache.append(encoder, 0, k, v);
  EXPECT_TRUE(throws_error(
      ErrorCode::invalid_argument,
      {"kv_cache.attend: the softmax scale of latent attention has no default: give it"},
      [&] { cache.attend(encoder, 0, {.q = q, .out = out}); }));
  KvCalibration calibration;
  calibration.transform.matrix = device.tensor(DType::f32, {1, kLatent, kLatent});
  calibration.transform.inverse = calibration.transform.matrix;
  EXPECT_TRUE(throws_error(ErrorCode::invalid_argument,
                           {"layer 0 is latent", "error feedback and no transform"}, [&] {
                             KvCache(device, {.capacity = 8,
                                              .layers = {layer},
                                              .calibration = {{calibration, {}}}});
                           }));
  encoder.submit().wait();
}

}  // namespace
}  // namespace gyre::test
