// Layers of one cache whose heads and dims differ, and layers that share another's cache.
#include "cache/given_rows.h"
#include "expect_error.h"
#include "gyre_test.h"
#include "test_device.h"

namespace gyre::test {
namespace {

using F = KvFormat;

KvCacheOptions mixed(uint64_t capacity = 120) {
  return {.kv_heads = 2,
          .head_dim = 64,
          .v_head_dim = 40,
          .capacity = capacity,
          .layers = layers_that_differ(),
          .step_tokens = 20};
}

class KvLayers : public testing::Test {
 public:
  // One list: a layer that shares attends right behind its owner's append.
  void step(KvCache& to, uint64_t tokens) {
    to.begin_step(encoder, tokens);
    std::vector<Tensor> q, out;
    for (uint64_t i = 0; i < to.layers().size(); ++i) {
      const KvLayer& layer = to.layers()[i];
      if (!layer.kv_shared_layer_index)
        to.append(encoder, i, given.k(device, i, tokens), given.v(device, i, tokens));
      // A layer that shares has query heads of its own.
      const uint64_t heads = layer.kv_heads * (layer.kv_shared_layer_index ? 3 : 2);
      q.push_back(given.fresh(device, {tokens, heads, layer.head_dim}));
      out.push_back(device.tensor(DType::f32, {tokens, heads, layer.v_head_dim}));
      to.attend(encoder, i, {.q = q[i], .out = out[i]});
    }
    to.end_step();
    encoder.submit().wait();
    for (uint64_t i = 0; i < to.layers().size(); ++i)
      EXPECT_LE(given.error(i, q[i], out[i]), bound_of(to.layers()[i])) << "layer " << i;
  }
  void rollback(KvCache& to, uint64_t tokens) {
    to.rollback(encoder, tokens);
    encoder.submit().wait();
    given.rollback(tokens);
  }
  static testing::AssertionResult refuses(const std::vector<std::string>& parts,
                                          const std::vector<KvLayer>& layers) {
    KvCacheOptions options = mixed();
    options.layers = layers;
    return refused(parts, [&] { const KvCache made(test_device(), options); });
  }

  Device device = test_device();
  Encoder encoder{device};
  KvCache cache{device, mixed()};
  GivenRows given{cache.layers()};
};

TEST_F(KvLayers, CachesThatAreGivenNoneHaveATailAndASinkToken) {
  EXPECT_EQ(kDefaultKvLayer, (KvLayer{.k = F::tq8, .v = F::tq4, .tail = 128, .sink_tokens = 1}));
  EXPECT_EQ(KvCacheOptions{}.layers, std::vector{kDefaultKvLayer});
  EXPECT_EQ(KvPoolOptions{}.layers, std::vector{kDefaultKvLayer});
  EXPECT_EQ(kv_layers(2, {}), (std::vector<KvLayer>(2, kDefaultKvLayer)));
  for (const uint64_t capacity : {40u, 400u}) {  // below the tail, everything stays in 16 bits
    KvCache made(device, {.kv_heads = 2, .head_dim = 64, .capacity = capacity, .step_tokens = 20});
    given = GivenRows(made.layers());
    for (uint64_t tokens = 0; tokens < capacity; tokens += 20) step(made, 20);
  }
  EXPECT_REFUSED(("the tail of layer 0 must be below 2^31", "got 4294967296"),
                 const KvCache made(device, {.kv_heads = 2,
                                             .head_dim = 64,
                                             .capacity = 400,
                                             .layers = {{.tail = uint64_t{1} << 32}}}));
}

TEST_F(KvLayers, StepsRollbackForkAndClear) {
  for (const uint64_t tokens : {1, 20, 7, 1, 13}) step(cache, tokens);
  rollback(cache, 15);
  step(cache, 3);
  KvCache fork = cache.fork(encoder, 150);
  encoder.submit().wait();
  const GivenRows before = given;
  step(fork, 20);
  step(fork, 1);
  given = before;
  step(cache, 5);  // has not seen the fork's
  cache.clear(encoder);
  encoder.submit().wait();
  given = GivenRows(cache.layers());
  step(cache, 20);
}

TEST_F(KvLayers, AGraphServesEveryStep) {
  constexpr uint64_t kTokens = 2;
  std::vector<Tensor> k, v, q, out;
  for (uint64_t i = 0; i < cache.layers().size(); ++i) {
    const KvLayer& l = cache.layers()[i];
    const uint64_t heads = 2 * l.kv_heads;
    k.push_back(device.tensor(DType::f32, {kTokens, l.kv_heads, l.head_dim}));
    v.push_back(device.tensor(DType::f32, {kTokens, l.kv_heads, l.v_head_dim}));
    q.push_back(given.fresh(device, {kTokens, heads, l.head_dim}));
    out.push_back(device.tensor(DType::f32, {kTokens, heads, l.v_head_dim}));
    if (!l.kv_shared_layer_index) cache.append(encoder, i, k[i], v[i]);
    cache.attend(encoder, i, {.q = q[i], .out = out[i]});
  }
  const Graph graph = encoder.instantiate();
  for (int round = 0; round < 25; ++round) {
    for (uint64_t i = 0; i < k.size(); ++i) {
      if (cache.layers()[i].kv_shared_layer_index) continue;
      copy_floats(given.k(device, i, kTokens), k[i]);
      copy_floats(given.v(device, i, kTokens), v[i]);
    }
    cache.begin_step(encoder, kTokens);
    encoder.submit();
    graph.replay().wait();
    cache.end_step();
    for (uint64_t i = 0; i < q.size(); ++i)
      EXPECT_LE(given.error(i, q[i], out[i]), bound_of(cache.layers()[i])) << round << ": " << i;
  }
}

TEST_F(KvLayers, NumbersThatALayerDoesNotGive) {
  const std::vector<KvLayer>& l = cache.layers();
  const auto shape = [&](uint64_t i) {
    return std::vector<uint64_t>{l[i].kv_heads, l[i].head_dim, l[i].v_head_dim};
  };
  using S = std::vector<uint64_t>;
  EXPECT_EQ(shape(0), (S{2, 64, 40}));
  EXPECT_EQ(shape(1), (S{3, 24, 24}));  // a head_dim of its own is V's, too
  EXPECT_EQ(shape(4), (S{2, 512, 16}));
  EXPECT_EQ(shape(9), shape(5));
  EXPECT_EQ(l[8].window, 30u);
  EXPECT_EQ(l[8].tail, 9u);
  EXPECT_EQ(l[8].v, F::f16);
  EXPECT_EQ(cache.options().layers, mixed().layers);
  // Layers that give everything need no options, and resolved layers resolve to themselves.
  const KvCache again(device, {.capacity = 120, .layers = l, .step_tokens = 20});
  EXPECT_EQ(again.layers(), l);
  EXPECT_EQ(again.bytes(), cache.bytes());
}

TEST_F(KvLayers, SharedLayersTakeNoMemory) {
  const std::vector<KvLayerInfo> rows = cache.describe();
  uint64_t sum = 0;
  for (uint64_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].layer, cache.layers()[i]);
    const auto& owner = rows[i].layer.kv_shared_layer_index;
    EXPECT_EQ(rows[i].bytes == 0, owner.has_value()) << i;
    if (owner) {
      EXPECT_EQ(rows[i].slots, rows[*owner].slots);
      EXPECT_EQ(rows[i].kernel, rows[*owner].kernel);
    }
    sum += rows[i].bytes;
  }
  KvCacheOptions options = mixed();
  std::erase_if(options.layers, [](const KvLayer& l) { return l.kv_shared_layer_index; });
  const KvCache without(device, options);
  EXPECT_EQ(cache.bytes(), without.bytes());
  EXPECT_LE(sum, cache.bytes());
}

TEST_F(KvLayers, AnAppendToASharedLayerIsRefused) {
  const KvLayer& l = cache.layers()[6];
  const Tensor k = device.tensor(DType::f32, {1, l.kv_heads, l.head_dim}),
               q = device.tensor(DType::f32, {1, l.kv_heads, l.head_dim});
  cache.begin_step(encoder, 1);
  const size_t recorded = encoder.size();
  EXPECT_REFUSED(("kv_cache.append", "layer 6 has no K and V of its own", "of layer 1"),
                 cache.append(encoder, 6, k, k));
  EXPECT_REFUSED(("kv_cache.rope_append", "layer 6 has no K and V of its own"),
                 cache.rope_append(encoder, 6, {.q = q, .q_out = q, .k = k, .v = k}));
  EXPECT_REFUSED(("kv_cache.append", "10 layers, got layer 10"), cache.append(encoder, 10, k, k));
  EXPECT_EQ(encoder.size(), recorded);
  // Layers that share are not among those that a step waits for.
  EXPECT_REFUSED(("lacks append() of layers 0 to 2, 4 to 5;"), cache.end_step());
  // Its owner's append must come first.
  cache.attend(encoder, 6, {.q = q, .out = device.tensor(DType::f32, q.shape())});
  EXPECT_REFUSED(("attend of layer 1 comes before the step's append()"), encoder.submit());
  encoder.clear();
  cache.rollback(encoder, 1);
  encoder.submit().wait();
  step(cache, 4);
}

TEST_F(KvLayers, WrongShapesAreRefusedForEachLayer) {
  const Tensor k = device.tensor(DType::f32, {1, 2, 64}), v = device.tensor(DType::f32, {1, 2, 40});
  cache.begin_step(encoder, 1);
  for (const uint64_t layer : {1, 2, 4, 5})
    EXPECT_THROW(cache.append(encoder, layer, k, v), Error) << layer;
  cache.append(encoder, 0, k, v);
  const Tensor q = device.tensor(DType::f32, {1, 4, 64}),
               out = device.tensor(DType::f32, {1, 4, 64});
  EXPECT_THROW(cache.attend(encoder, 0, {.q = q, .out = out}), Error);
  EXPECT_THROW(cache.attend(encoder, 3, {.q = q, .out = out}), Error);
  EXPECT_THROW(cache.attend(encoder, 7, {.q = q, .out = out}), Error);
  encoder.clear();
}

TEST_F(KvLayers, LayersThatNoCacheCanHave) {
  const KvLayer f16{.k = F::f16, .v = F::f16};
  EXPECT_TRUE(refuses({"kv_cache: layer 1: head_dim", "multiple of 8 from 16, got 20"},
                      {f16, {.head_dim = 20}}));
  EXPECT_TRUE(refuses({"kv_cache: layer 1: v_head_dim", "got 8"}, {f16, {.v_head_dim = 8}}));
  EXPECT_TRUE(refuses({"kv_cache: layer 1: head_dim must be at most 1024, got 1032"},
                      {f16, {.head_dim = 1032}}));
  EXPECT_TRUE(refuses({"layer 0: kv_heads must be at most 2^14"}, {{.kv_heads = 1u << 15}}));
  EXPECT_TRUE(refuses({"kv_cache: layer 1: mlx_native8 stores 256 and 512, got 64"},
                      {f16, {.k = F::mlx_native8, .v = F::f16}}));
  const auto shares = [](uint64_t index) { return KvLayer{.kv_shared_layer_index = index}; };
  EXPECT_TRUE(
      refuses({"layer 0 can share the cache of an earlier layer, got layer 0"}, {shares(0)}));
  EXPECT_TRUE(refuses({"layer 1 can share", "earlier layer, got layer 2"}, {f16, shares(2), f16}));
  EXPECT_TRUE(refuses({"layer 2 shares the cache of layer 1", "none of its own", "of layer 0"},
                      {f16, shares(0), shares(1)}));
  const std::pair<const char*, KvLayer> others[] = {
      {"k is f16, got tq4", {.k = F::tq4}},
      {"v is f16, got tq8", {.v = F::tq8}},
      {"window is 0, got 4", {.window = 4}},
      {"tail is 0, got 4", {.tail = 4}},
      {"kv_heads is 2, got 1", {.kv_heads = 1}},
      {"head_dim is 64, got 32", {.head_dim = 32}},
      {"v_head_dim is 40, got 64", {.v_head_dim = 64}}};
  for (const auto& [words, layer] : others) {
    KvLayer shared = layer;
    shared.kv_shared_layer_index = 0;
    EXPECT_TRUE(
        refuses({"kv_cache: layer 1 shares the cache of layer 0, whose ", words}, {f16, shared}));
  }
  KvCacheOptions options = mixed();
  options.kv_heads = 0;
  EXPECT_REFUSED(("kv_cache: layer 0: kv_heads must be given"),
                 const KvCache made(device, options));
}

// 64 coordinates in one layer, 128 in the next: each has a basis of its size.
TEST_F(KvLayers, CalibrationsOfEachLayersSize) {
  const std::vector<KvLayer> layers = {{.k = F::tq8, .v = F::tq8},
                                       {.k = F::tq8, .v = F::tq8, .kv_heads = 1, .head_dim = 128},
                                       {.kv_shared_layer_index = 1}};
  const auto basis = [&](uint64_t heads, uint64_t dim) {
    const auto times = [&](float factor) {
      std::vector<float> values(heads * dim * dim);
      for (uint64_t i = 0; i < heads * dim; ++i) values[i * dim + i % dim] = factor;
      return tensor_of(device, values, {heads, dim, dim});
    };
    const KvTransform transform{.matrix = times(2), .inverse = times(0.5f)};
    return KvLayerCalibration{{.transform = transform}, {.transform = transform}};
  };
  KvCacheOptions options{.kv_heads = 2,
                         .head_dim = 64,
                         .capacity = 64,
                         .layers = layers,
                         .calibration = {basis(2, 64), basis(1, 128), {}}};
  KvCache made(device, options);
  given = GivenRows(made.layers());
  for (const uint64_t tokens : {30, 1, 8}) step(made, tokens);
  const std::vector<KvLayerInfo> rows = made.describe();
  EXPECT_NE(rows[1].calibration, 0u);
  EXPECT_EQ(rows[2].calibration, rows[1].calibration);
  std::swap(options.calibration[0], options.calibration[1]);
  EXPECT_THROW(KvCache(device, options), Error);
  options.calibration = {{}, basis(1, 128), basis(1, 128)};
  EXPECT_REFUSED(("kv_cache: layer 2 shares the cache of layer 1", "calibration"),
                 const KvCache refused_cache(device, options));
}

// 5 windows and a full layer in turns; the last layers share, as Gemma 3n and 4 do.
TEST_F(KvLayers, APolicyWithSharedLayers) {
  const std::vector<KvLayer> layers = kv_layers(12, {.layer = {.kv_heads = 1, .head_dim = 512},
                                                     .window = 1024,
                                                     .full_every = 6,
                                                     .kv_shared_layers = 5});
  for (uint64_t i = 0; i < 12; ++i) {
    const bool full = i % 6 == 5;
    EXPECT_EQ(layers[i].window, full ? 0u : 1024u);
    EXPECT_EQ(layers[i].head_dim, full ? 512u : 0u);
    EXPECT_EQ(layers[i].kv_shared_layer_index,
              i < 7 ? std::nullopt : std::optional<uint64_t>(full ? 5 : 6));
  }
  const KvCache made(device, {.kv_heads = 4, .head_dim = 256, .capacity = 4096, .layers = layers});
  EXPECT_EQ(made.layers()[0].v_head_dim, 256u);
  EXPECT_EQ(made.layers()[11].v_head_dim, 512u);
  const auto fails = [](const std::vector<std::string>& parts, const KvPolicy& policy) {
    EXPECT_TRUE(refused(parts, [&] { (void)kv_layers(6, policy); }));
  };
  fails({"kv_layers: kv_shared_layers must be fewer than the 6", "got 6"}, {.kv_shared_layers = 6});
  fails({"kv_layers: layer 5 with a window of 0 cannot share", "first 5"},
        {.window = 8, .full_every = 6, .kv_shared_layers = 1});
}

TEST_F(KvLayers, PrepareTakesThem) {
  prepare(device, {.heads = 6,
                   .kv_heads = 2,
                   .head_dim = 64,
                   .layers = {{.k = F::f16, .v = F::f16, .window = 16},
                              {.kv_heads = 3, .head_dim = 128},
                              {.kv_shared_layer_index = 0}},
                   .context = 64,
                   .step_tokens = 8});
  EXPECT_REFUSED(
      ("prepare: heads must be a multiple of kv_heads, got 4 and 3"),
      prepare(device, {.heads = 4, .layers = {{.kv_heads = 3, .head_dim = 64}}, .context = 64}));
}

}  // namespace
}  // namespace gyre::test
