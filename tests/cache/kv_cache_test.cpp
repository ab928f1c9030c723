// KvCache: what was appended is what is attended to, whatever the layer stores and wherever its
// tokens lie.
#include "gyre/kv_cache.h"

#include "cache/kv_cache_model.h"
#include "expect_error.h"
#include "format_classes.h"

namespace gyre::test {
namespace {

TEST(KvCache, HoldsWhatWasAppended) {
  CacheModel model(small({.k = KvFormat::f32, .v = KvFormat::f32}));
  for (const uint64_t tokens : {1, 100, 3, 8, 1}) {
    model.append(tokens);
    EXPECT_LE(model.error(0, 1), 1e-10);
    EXPECT_LE(model.error(0, tokens), 1e-10);
  }
  model.rollback(50);
  EXPECT_EQ(model.cache.length(), 63u);
  EXPECT_LE(model.error(0, 5), 1e-10);
  model.append(20);
  EXPECT_LE(model.error(0, 20), 1e-10);
}

TEST(KvCache, EveryFormatLinearAndRing) {
  for (const KvFormat format : kv_formats()) {
    if (!stores(format, kDim) || !stores(format, kValueDim)) continue;  // kv_cache_random_test does
    for (const uint64_t window : {0, 1, 17, 64}) {
      CacheModel model(small({.k = format, .v = format, .window = window}));
      for (const uint64_t tokens : {5, 1, 1, 100, 2, 60, 1, 1, 99, 30}) {
        model.append(tokens);
        EXPECT_LE(model.error(0, 1), 3 * bound(format)) << name(format) << " window " << window;
        EXPECT_LE(model.error(0, tokens), bound(format)) << name(format) << " window " << window;
      }
    }
  }
}

TEST(KvCache, TheNewestAndTheFirstTokensStaySixteenBits) {
  for (const uint64_t tail : {1, 7, 32, 150}) {
    CacheModel model(
        small({.k = KvFormat::tq4, .v = KvFormat::tq2, .tail = tail, .sink_tokens = 4}));
    model.append(3);
    EXPECT_LE(model.error(0, 3), 1e-6);  // all sink tokens
    for (const uint64_t tokens : {1, 1, 30, 1, 100, 1, 1, 65, 64}) {
      model.append(tokens);
      const uint64_t window = std::min(tail, model.cache.length());
      EXPECT_LE(model.error(0, 1, window), 1e-6) << tail << " at " << model.cache.length();
      EXPECT_LE(model.error(0, tokens), 0.4);
    }
  }
}

TEST(KvCache, PositionsOfEveryTokenOfAStep) {
  CacheModel model(small({.k = KvFormat::f16, .v = KvFormat::f16}));
  const auto positions = [](const KvCache& cache, uint64_t tokens) {
    const auto data = cache.positions(tokens).data<int32_t>();
    return std::vector<int32_t>(data.begin(), data.end());
  };
  model.append(7);
  EXPECT_EQ(positions(model.cache, 7), (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6}));
  model.append(4);
  EXPECT_EQ(positions(model.cache, 4), (std::vector<int32_t>{7, 8, 9, 10}));
  const KvCache other = model.cache.fork(model.encoder);
  model.encoder.submit().wait();
  EXPECT_EQ(positions(other, 7), (std::vector<int32_t>{7, 8, 9, 10, 4, 5, 6}));
  EXPECT_EQ(positions(other, 100), positions(model.cache, 100));
}

// The cache outlives a call of another device's encoder.
TEST(KvCache, ARefusedAttendLeavesNothingBehind) {
  CacheModel model(small({.k = KvFormat::tq8, .v = KvFormat::tq8, .tail = 16}));
  model.append(60);
  const Device other = Device::open("cpu", {.threads = 1});
  Encoder encoder(other);
  const Tensor q = other.tensor(DType::f32, {1, kHeads, kDim}),
               out = other.tensor(DType::f32, {1, kHeads, kValueDim});
  EXPECT_REFUSED(("kv_cache.attend", "another device"),
                 model.cache.attend(encoder, 0, {.q = q, .out = out}));
  EXPECT_LE(model.error(0, 1), 1e-3);
  // Also when there is scratch already, and more is asked for.
  const Tensor many = other.tensor(DType::f32, {50, kHeads, kDim}),
               outs = other.tensor(DType::f32, {50, kHeads, kValueDim});
  EXPECT_REFUSED(("kv_cache.attend", "another device"),
                 model.cache.attend(encoder, 0, {.q = many, .out = outs}));
  EXPECT_LE(model.error(0, 20), 1e-3);
}

// The oldest query of a step sees a whole tail; no more slots than the cache has tokens.
TEST(KvCache, TheTailHasRoomForAStepBesideIt) {
  const Device device = Device::open("cpu", {.threads = 2});
  const auto tail_bytes = [&](uint64_t tail, uint64_t step_tokens) {
    KvCacheOptions options = small({.k = KvFormat::tq8, .v = KvFormat::tq8});
    options.step_tokens = step_tokens;
    const uint64_t plain = KvCache(device, options).bytes();
    options.layers[0].tail = tail;
    return KvCache(device, options).bytes() - plain;
  };
  constexpr uint64_t kSlotBytes = kKvHeads * (kDim + kValueDim) * 2;
  EXPECT_EQ(tail_bytes(20, 1), 21 * kSlotBytes);
  EXPECT_EQ(tail_bytes(20, 10), 30 * kSlotBytes);
  EXPECT_EQ(tail_bytes(20, 64), 84 * kSlotBytes);
  EXPECT_EQ(tail_bytes(20, 100), 120 * kSlotBytes);
  EXPECT_EQ(tail_bytes(20, 1000), 300 * kSlotBytes);
}

TEST(KvCache, LayersDifferAndKeepApart) {
  const std::vector<KvLayer> layers =
      kv_layers(6, {.layer = {.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 9, .sink_tokens = 2},
                    .edge_layers = 1,
                    .window = 33,
                    .full_every = 3});
  EXPECT_EQ(layers[0].window, 33u);  // a window layer is not an edge
  EXPECT_EQ(layers[0].k, KvFormat::f16);
  EXPECT_EQ(layers[2].v, KvFormat::tq4);
  EXPECT_EQ(layers[5].v, KvFormat::tq8);
  KvCacheOptions options = small({});
  options.layers = layers;
  CacheModel model(options);
  for (const uint64_t tokens : {50, 1, 1, 80, 1}) {
    model.append(tokens);
    EXPECT_LE(model.error(0, tokens), bound(KvFormat::f16));
    EXPECT_LE(model.error(2, tokens), 5e-2);
    EXPECT_LE(model.error(5, tokens), 4e-4);
  }
  const std::vector<KvLayerInfo> rows = model.cache.describe();
  ASSERT_EQ(rows.size(), 6u);
  EXPECT_EQ(rows[0].slots, 33u + 100 - 1);
  EXPECT_EQ(rows[2].slots, 300u - 2);
  EXPECT_EQ(rows[0].bytes, (33u + 99) * kKvHeads * (kDim + kValueDim) * 2);
  EXPECT_NE(rows[2].kernel.find(": K "), std::string::npos);
  uint64_t sum = 0;
  for (const KvLayerInfo& row : rows) sum += row.bytes;
  EXPECT_EQ(model.cache.bytes(), sum + 24 + 100 * 4);
}

TEST(KvCache, ForksAreOnTheirOwn) {
  CacheModel model(small({.k = KvFormat::tq8, .v = KvFormat::tq8, .tail = 16, .sink_tokens = 2}));
  model.append(60);
  KvCache other = model.cache.fork(model.encoder);
  model.encoder.submit().wait();
  const std::vector<float> k = model.k, v = model.v;
  model.append(40);
  EXPECT_LE(model.error(0, 1), 1e-3);
  std::swap(model.cache, other);
  std::vector<float> longer_k = model.k, longer_v = model.v;
  model.k = k, model.v = v, model.step = 60;
  EXPECT_EQ(model.cache.length(), 60u);
  EXPECT_LE(model.error(0, 8), 1e-3);
  model.append(7);
  EXPECT_LE(model.error(0, 7), 1e-3);
  std::swap(model.cache, other);
  model.k = longer_k, model.v = longer_v, model.step = 40;
  EXPECT_LE(model.error(0, 8), 1e-3);
}

TEST(KvCache, AForkCanHaveALargerCapacity) {
  for (const uint64_t sink_tokens : {0, 3}) {
    KvCacheOptions options =
        small({.k = KvFormat::tq8, .v = KvFormat::tq8, .sink_tokens = sink_tokens});
    options.capacity = 70;
    CacheModel model(options);
    model.append(70);
    KvCache more = model.cache.fork(model.encoder, 100);
    model.encoder.submit().wait();
    EXPECT_EQ(more.options().capacity, 100u);
    model.cache = std::move(more);
    EXPECT_LE(model.error(0, 70), bound(KvFormat::tq8));
    model.append(30);
    EXPECT_LE(model.error(0, 30), bound(KvFormat::tq8));
    EXPECT_REFUSED(("kv_cache.fork", "at least 100", "got 99"),
                   model.cache.fork(model.encoder, 99));
    EXPECT_EQ(model.cache.length(), 100u);
  }
}

TEST(KvCache, AForkKeepsItsRings) {
  KvCacheOptions options = small({.k = KvFormat::tq8, .v = KvFormat::tq8, .window = 10});
  options.step_tokens = 17;
  options.capacity = 16;
  EXPECT_REFUSED(("kv_cache.begin_step", "17 tokens can never fit into the capacity of 16"), {
    CacheModel never(options);
    never.append(17);
  });
  options.step_tokens = 8;
  CacheModel tight(options);
  EXPECT_REFUSED(("kv_cache.fork", "capacity of 18", "the window of layer 0 from 16 slots to 17"),
                 tight.cache.fork(tight.encoder, 18));
  options.capacity = 17;
  CacheModel model(options);
  for (int i = 0; i < 2; ++i) model.append(8);
  KvCache more = model.cache.fork(model.encoder, 40);
  model.encoder.submit().wait();
  model.cache = std::move(more);
  for (int i = 0; i < 3; ++i) {
    model.append(8);
    EXPECT_LE(model.error(0, 8), 3 * bound(KvFormat::tq8));
  }
  options.layers[0] = {KvFormat::tq8, KvFormat::tq8, 0, 9, 0};
  options.capacity = 16;
  CacheModel tail(options);
  EXPECT_REFUSED(("kv_cache.fork", "the tail of layer 0 from 16 slots to 17"),
                 tail.cache.fork(tail.encoder, 18));
}

TEST(KvCache, OneGraphForAWholeGeneration) {
  CacheModel model(small({.k = KvFormat::tq8, .v = KvFormat::tq8, .tail = 16, .sink_tokens = 2}));
  const Device device = model.encoder.device();
  model.append(30);
  const Tensor k = device.tensor(DType::f32, {1, kKvHeads, kDim}),
               v = device.tensor(DType::f32, {1, kKvHeads, kValueDim}),
               q = device.tensor(DType::f32, {1, kHeads, kDim}),
               out = device.tensor(DType::f32, {1, kHeads, kValueDim}),
               again = device.tensor(DType::f32, {1, kHeads, kValueDim});
  model.cache.append(model.encoder, 0, k, v);
  model.cache.attend(model.encoder, 0, {.q = q, .out = out});
  const Graph graph = model.encoder.instantiate();
  for (uint64_t step = 0; step < 200; ++step) {
    model.cache.begin_step(model.encoder, 1);
    model.encoder.submit().wait();
    for (const Tensor& input : {k, v, q}) {
      const std::vector<float> values = model.fresh(input.elements());
      input.write_from(std::span<const float>(values));
    }
    graph.replay().wait();
    EXPECT_EQ(model.cache.positions(1).data<int32_t>()[0], static_cast<int32_t>(30 + step));
    if (step % 20 != 0) continue;
    // Asks the same question, recorded now.
    model.cache.attend(model.encoder, 0, {.q = q, .out = again});
    model.encoder.submit().wait();
    EXPECT_EQ(floats_of(out), floats_of(again)) << step;
  }
  EXPECT_EQ(model.cache.length(), 230u);
}

// Equal numbers in another dtype or another order of memory are the same tokens.
TEST(KvCache, TakesAnyDtypeAndLayout) {
  const Device device = Device::open("cpu", {.threads = 2});
  constexpr uint64_t kTokens = 30;
  std::vector<float> values(kTokens * kKvHeads * kDim);
  for (size_t i = 0; i < values.size(); ++i)  // exact in bf16
    values[i] = static_cast<float>(static_cast<int>(i * 37 % 255) - 127) / 64.0f;
  const Tensor plain = tensor_of(device, values, {kTokens, kKvHeads, kDim}),
               head_major = device.tensor(DType::f32, {kKvHeads, kTokens, kDim});
  copy_floats(plain, head_major.permute({1, 0, 2}));
  Encoder encoder(device);
  std::vector<Tensor> sources = {plain, head_major.permute({1, 0, 2})};
  for (const DType dtype : {DType::f16, DType::bf16}) {
    sources.push_back(device.tensor(dtype, plain.shape()));
    kv_copy(encoder, {.k = plain, .k_cache = sources.back()});
  }
  const Tensor q = device.tensor(DType::f32, {2, kHeads, kDim});
  q.write_from(std::span<const float>(values).first(q.elements()));
  std::vector<float> first;
  for (const Tensor& source : sources) {
    KvCache cache(device, {.kv_heads = kKvHeads,
                           .head_dim = kDim,
                           .capacity = 64,
                           .layers = {{.k = KvFormat::tq4, .v = KvFormat::tq3, .tail = 7}}});
    const Tensor out = device.tensor(DType::f32, q.shape());
    for (const uint64_t at : {0, 10, 20}) {
      cache.begin_step(encoder, 10);
      cache.append(encoder, 0, source.slice(0, at, 10), source.slice(0, at, 10));
    }
    cache.attend(encoder, 0, {.q = q, .out = out}, {.scale = 0.1f});
    encoder.submit().wait();
    if (first.empty()) first = floats_of(out);
    EXPECT_EQ(first, floats_of(out)) << name(source.dtype()) << source.strides();
  }
}

TEST(KvCache, RefusesWrongUseAndStaysAsItWas) {
  CacheModel model(small({.k = KvFormat::tq8, .v = KvFormat::tq8, .window = 40}));
  Encoder& encoder = model.encoder;
  const Device device = encoder.device();
  const auto rows = [&](uint64_t tokens, uint64_t heads, uint64_t dim) {
    return device.tensor(DType::f32, {tokens, heads, dim});
  };
  for (int i = 0; i < 2; ++i) model.append(100);
  model.append(95);
  EXPECT_REFUSED(("kv_cache.begin_step", "295", "300", "6"), model.cache.begin_step(encoder, 6));
  EXPECT_REFUSED(("kv_cache.begin_step", "101"), model.cache.begin_step(encoder, 101));
  EXPECT_REFUSED(("kv_cache.begin_step", "got 0"), model.cache.begin_step(encoder, 0));
  EXPECT_REFUSED(("kv_cache.append", "k must be", "[95, 64]"),
                 model.cache.append(encoder, 0, device.tensor(DType::f32, {95, kDim}),
                                    rows(95, kKvHeads, kValueDim)));
  EXPECT_REFUSED(
      ("kv_cache.append", "v must be"),
      model.cache.append(encoder, 0, rows(95, kKvHeads, kDim), rows(95, kKvHeads, kDim)));
  EXPECT_REFUSED(
      ("kv_cache.append", "layer 1"),
      model.cache.append(encoder, 1, rows(95, kKvHeads, kDim), rows(95, kKvHeads, kValueDim)));
  EXPECT_REFUSED(
      ("kv_cache.attend", "heads", "5"),
      model.cache.attend(encoder, 0, {.q = rows(1, 5, kDim), .out = rows(1, 5, kValueDim)}));
  EXPECT_REFUSED(
      ("kv_cache.attend", "40", "41"),
      model.cache.attend(encoder, 0, {.q = rows(1, 4, kDim), .out = rows(1, 4, kValueDim)},
                         {.mask = {.window = 41}}));
  EXPECT_REFUSED(
      ("kv_cache.attend", "at most step_tokens 100", "101"),
      model.cache.attend(encoder, 0, {.q = rows(101, 4, kDim), .out = rows(101, 4, kValueDim)},
                         {.mask = {.window = 1}}));
  const auto attend_with = [&](Tensor scratch) {
    model.cache.attend(encoder, 0,
                       {.q = rows(1, 4, kDim), .out = rows(1, 4, kValueDim), .scratch = &scratch});
  };
  EXPECT_REFUSED(
      ("kv_cache.attend", "scratch must be an undefined tensor", "contiguous f32", "u8 [64]"),
      attend_with(device.tensor(DType::u8, {64})));
  EXPECT_REFUSED(("kv_cache.attend", "at a multiple of 16 bytes, got address"),
                 attend_with(device.tensor(DType::f32, {65}).slice(0, 1, 64)));
  EXPECT_REFUSED(("kv_cache.rollback", "295", "296"), model.cache.rollback(encoder, 296));
  EXPECT_REFUSED(("kv_cache.rollback", "window of layer 0"), model.cache.rollback(encoder, 101));
  EXPECT_EQ(encoder.size(), 0u);
  EXPECT_EQ(model.cache.length(), 295u);
  EXPECT_LE(model.error(0, 10), 4e-4);
  model.rollback(100);  // exactly what the ring allows the next token
  EXPECT_TRUE(refused({"kv_cache.attend", "no longer has key 155", "1 queries"}, [&] {
    model.cache.attend(encoder, 0, {.q = rows(1, 4, kDim), .out = rows(1, 4, kValueDim)});
    encoder.submit();
  }));
  encoder.clear();
  model.append(30);
  EXPECT_LE(model.error(0, 30), 4e-4);
  EXPECT_TRUE(refused({"encoder.instantiate", "kv_extend"}, [&] {
    model.cache.begin_step(encoder, 1);
    encoder.instantiate();
  }));
}

// Whatever the formats of a policy, a cache takes the list.
TEST(KvCache, LayersThatAreNotCompressedHaveNoTail) {
  const Device device = Device::open("cpu", {.threads = 1});
  const KvLayer fine{.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 9, .sink_tokens = 2};
  KvCacheOptions options = small({});
  options.layers = kv_layers(4, {.layer = fine, .edge_layers = 1, .edge_format = KvFormat::f16});
  EXPECT_EQ(options.layers[0].tail, 0u);
  EXPECT_EQ(options.layers[0].sink_tokens, 0u);
  EXPECT_EQ(options.layers[1].tail, 9u);
  EXPECT_EQ(options.layers[1].sink_tokens, 2u);
  EXPECT_EQ(options.layers[3].tail, 0u);
  EXPECT_EQ(KvCache(device, options).describe().size(), 4u);
  KvLayer plain = fine;
  plain.k = plain.v = KvFormat::bf16;
  options.layers = kv_layers(4, {.layer = plain, .edge_layers = 1});
  EXPECT_EQ(options.layers[0].tail, 9u);
  EXPECT_EQ(options.layers[1].tail, 0u);
  EXPECT_EQ(KvCache(device, options).describe().size(), 4u);
}

TEST(KvCache, RefusesWhatItCannotHold) {
  const Device device = Device::open("cpu", {.threads = 1});
  const auto make = [&](const KvLayer& layer, uint64_t capacity = 100) {
    return [&device, layer, capacity] { KvCache cache(device, small(layer, capacity)); };
  };
  EXPECT_TRUE(refused({"capacity", "got 0"}, make({}, 0)));
  EXPECT_TRUE(refused({"capacity", "2^31"}, make({}, uint64_t{1} << 31)));
  EXPECT_TRUE(
      refused({"not compressed"}, make({.k = KvFormat::f16, .v = KvFormat::f16, .tail = 4})));
  for (const uint64_t dim : {0, 8, 20, 36}) {
    for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::tq8}) {
      KvCacheOptions options = small({.k = format, .v = format});
      options.head_dim = dim;
      EXPECT_REFUSED(("kv_cache: layer 0: head_dim", "multiple of 8", std::to_string(dim)),
                     KvCache cache(device, options));
      options = small({.k = format, .v = format});
      options.v_head_dim = dim == 0 ? 12 : dim;
      EXPECT_REFUSED(("kv_cache: layer 0: v_head_dim", "multiple of 8"),
                     KvCache cache(device, options));
    }
  }
  EXPECT_TRUE(refused({"sink_tokens", "window"}, make({.window = 5, .sink_tokens = 4})));
  EXPECT_TRUE(refused({"sink_tokens", "100"}, make({.sink_tokens = 100})));
  EXPECT_NO_THROW(make({.tail = 101})());  // all tokens stay in 16 bits
  EXPECT_TRUE(refused({"layers with a tail", "3", "4"}, [&] {
    KvCacheOptions options = small({.tail = 4});
    options.layers.push_back({.tail = 3});
    KvCache cache(device, options);
  }));
  EXPECT_TRUE(refused({"layers", "got 0"}, [&] {
    KvCacheOptions options = small({});
    options.layers.clear();
    KvCache cache(device, options);
  }));
}

}  // namespace
}  // namespace gyre::test
