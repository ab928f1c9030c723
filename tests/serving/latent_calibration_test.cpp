// Latent layers with a calibration: the latent's transform is undone for scores and for outputs,
// the rotary part has its own; against double precision over the rows as they are stored.
#include <numeric>

#include "expect_error.h"
#include "folder.h"
#include "serving/latent_story.h"

namespace gyre::test {
namespace {

class LatentCalibrated : public LatentTest {
 public:
  std::vector<float> normal(uint64_t count, float spread) {
    return normal_floats(count, random, spread);
  }
  // 1 + e e^t and its inverse 1 - e e^t / (1 + |e|^2).
  KvCalibration part(uint64_t n, bool with_mean) {
    const std::vector<float> e = normal(n, n > 128 ? 0.1f : 0.2f);  // |e|^2 is 5 at most
    const float square = std::inner_product(e.begin(), e.end(), e.begin(), 0.0f);
    std::vector<float> matrix, inverse;
    for (uint64_t i = 0; i < n * n; ++i) {
      const float one = i / n == i % n ? 1.0f : 0.0f, product = e[i / n] * e[i % n];
      matrix.push_back(one + product);
      inverse.push_back(one - product / (1.0f + square));
    }
    KvCalibration made;
    made.transform = {
        tensor_of(device, matrix, {1, n, n}), tensor_of(device, inverse, {1, n, n}), {}};
    if (with_mean) made.transform.mean = tensor_of(device, normal(n, 0.5f), {1, n});
    made.feedback = {tensor_of(device, normal(n * n, 0.05f), {1, n, n}),
                     tensor_of(device, std::vector<float>(n, 1.25f), {1, n}),
                     {0.9f, 1.0f, 1.1f}};
    return made;
  }
  KvLayerCalibration calibration(bool with_mean) {
    return {part(kLatent, with_mean), part(kRotary, with_mean)};
  }
  // DeepSeek's dims: rows of the latent have two scales.
  static KvLayer large_layer(uint64_t tail) {
    KvLayer layer = latent_layer(KvFormat::tq4, KvFormat::tq8, tail, tail != 0 ? 1 : 0);
    layer.head_dim = 512, layer.v_head_dim = 64;
    return layer;
  }

  std::mt19937 random{5};
};

// Steps of a calibrated cache and of a fork of it.
void run_cache(LatentCalibrated& test, const KvLayer& layer) {
  SCOPED_TRACE(testing::Message() << name(layer.k) << ", tail " << layer.tail);
  const Device& device = test.device;
  const KvLayerCalibration by{test.part(layer.head_dim, true), test.part(layer.v_head_dim, true)};
  const Story story(device, layer, 100, 7, by);
  KvCache cache(device,
                {.capacity = 130, .layers = {layer}, .step_tokens = 80, .calibration = {by}});
  EXPECT_NE(cache.describe()[0].calibration, 0u);
  EXPECT_LT(run_step(test.encoder, cache, story, 0, 70), max_error(device, layer));
  uint64_t first = 70;
  for (const uint64_t tokens : {1u, 5u, 20u, 1u}) {
    EXPECT_LT(run_step(test.encoder, cache, story, first, tokens), max_error(device, layer))
        << first;
    first += tokens;
  }
  KvCache fork = cache.fork(test.encoder);
  EXPECT_LT(run_step(test.encoder, fork, story, first, 2), max_error(device, layer));
}

TEST_F(LatentCalibrated, StepsOfACache) {
  run_cache(*this, latent_layer(KvFormat::tq4, KvFormat::tq8, 0, 0));
}

TEST_F(LatentCalibrated, StepsWithRowsIn16Bits) {
  run_cache(*this, latent_layer(KvFormat::tq4, KvFormat::tq8, kTail, kSinks));
}

TEST_F(LatentCalibrated, StepsInOtherFormats) {
  run_cache(*this, latent_layer(KvFormat::tq6, KvFormat::tq3, 0, 0));
  run_cache(*this, latent_layer(KvFormat::tq2, KvFormat::tq5, kTail, 0));
}

TEST_F(LatentCalibrated, StepsOf512) { run_cache(*this, large_layer(0)); }

TEST_F(LatentCalibrated, StepsOf512WithRowsIn16Bits) { run_cache(*this, large_layer(kTail)); }

TEST_F(LatentCalibrated, FilesOf512) {
  const KvLayer layer = large_layer(0);
  const KvLayerCalibration by{part(512, true), part(64, false)};
  const Story story(device, layer, 30, 9, by);
  const KvCacheOptions options{.capacity = 40, .layers = {layer}, .calibration = {by}};
  const Folder folder;
  {
    KvCache cache(device, options);
    EXPECT_LT(run_step(encoder, cache, story, 0, 20), max_error(device, layer));
    cache.save(folder / "a");
  }
  KvCache loaded(device, options);
  loaded.load(folder / "a");
  EXPECT_LT(run_step(encoder, loaded, story, 20, 2), max_error(device, layer));
  KvCacheOptions others = options;
  others.calibration[0].k = part(512, true);
  EXPECT_THROW(KvCache(device, others).load(folder / "a"), Error);
}

TEST_F(LatentCalibrated, FeedbackAlone) {
  const KvLayer layer = latent_layer(KvFormat::tq4, KvFormat::tq8, 0, 0);
  KvLayerCalibration by = calibration(false);
  by.k.transform = by.v.transform = {};
  const Story story(device, layer, 60, 8, by);
  KvCache cache(device,
                {.capacity = 64, .layers = {layer}, .step_tokens = 50, .calibration = {by}});
  EXPECT_LT(run_step(encoder, cache, story, 0, 50), max_error(device, layer));
  EXPECT_LT(run_step(encoder, cache, story, 50, 1), max_error(device, layer));
}

TEST_F(LatentCalibrated, APoolOfSequences) {
  for (const KvLayer& layer :
       {latent_layer(KvFormat::tq4, KvFormat::tq8, 0, 0),
        latent_layer(KvFormat::tq4, KvFormat::tq8, kTail, kSinks), large_layer(0)}) {
    const KvLayerCalibration by{part(layer.head_dim, true), part(layer.v_head_dim, true)};
    KvPool pool(
        device,
        {.layers = {layer}, .pages = 64, .page_tokens = 16, .sequences = 8, .calibration = {by}});
    EXPECT_NE(pool.describe().calibration, 0u);
    KvBatch batch(pool, {.max_sequences = 4, .max_tokens = 128});
    const Story one(device, layer, 70, 1, by), two(device, layer, 70, 2, by);
    KvSequence a = pool.sequence(), b = pool.sequence();
    EXPECT_LT(run_batch(encoder, batch, {{a, one, 0, 64}, {b, two, 0, 33}}),
              max_error(device, layer));
    EXPECT_LT(run_batch(encoder, batch, {{a, one, 64, 1}, {b, two, 33, 4}}),
              max_error(device, layer));
    const Folder folder;
    pool.save(a, folder / "a");
    KvSequence loaded = pool.load(folder / "a");
    EXPECT_LT(run_batch(encoder, batch, {{loaded, one, 65, 2}}), max_error(device, layer));
    const KvPool other(device, {.layers = {layer}, .pages = 64, .page_tokens = 16});
    EXPECT_THROW(other.load(folder / "a"), Error);
  }
}

TEST_F(LatentCalibrated, Refusals) {
  const KvLayer layer = latent_layer(KvFormat::tq4, KvFormat::tq8, 0, 0);
  const KvLayerCalibration by = calibration(true);
  const auto refused = [&](const char* message, const KvLayerCalibration& given) {
    EXPECT_ERROR(invalid_argument, ("layer 0", message),
                 KvCache(device, {.capacity = 8, .layers = {layer}, .calibration = {given}}));
    EXPECT_ERROR(invalid_argument, ("layer 0", message),
                 KvPool(device, {.layers = {layer}, .pages = 4, .calibration = {given}}));
  };
  KvLayerCalibration wrong = by;
  wrong.v.transform = {};
  refused("transform of k alone", wrong);
  // Rotations by one coordinate, which are no reflections: outputs come back, scores do not, and
  // the other way round.
  for (const bool scores : {false, true}) {
    const auto shifted = [&](uint64_t n, bool back) {
      std::vector<float> values(n * n);
      for (uint64_t i = 0; i < n; ++i)
        values[back ? (i + 1) % n * n + i : i * n + (i + 1) % n] = 1.0f;
      return tensor_of(device, values, {1, n, n});
    };
    wrong = by;
    wrong.k.transform = {shifted(kLatent, false), shifted(kLatent, !scores), {}};
    refused("inverse times matrix of k, head 0", wrong);
    wrong = by;
    wrong.v.transform = {shifted(kRotary, false), shifted(kRotary, true), {}};
    refused("inverse times matrix of v, head 0", wrong);
  }
  KvLayerCalibration rotary_mean = by;
  rotary_mean.k.transform.mean = {};
  KvCache cache(device, {.capacity = 8, .layers = {layer}, .calibration = {rotary_mean}});
  const AttendInputs in{.q = device.tensor(DType::f32, {1, kHeads, kLatent + kRotary}),
                        .out = device.tensor(DType::f32, {1, kHeads, kLatent})};
  EXPECT_ERROR(invalid_argument, ("kv_cache.attend", "mean", "soft_cap"),
               cache.attend(encoder, 0, in, {.scale = kScale, .mask = {.soft_cap = 30.0f}}));
}

}  // namespace
}  // namespace gyre::test
