// rope_append leaves the bits that rope (or norm_rope) and kv_write or append leave on the same
// device, with angles and norms as models have them; through KvCache and KvBatch, too.
#include "device_setups.h"
#include "folder.h"
#include "gyre_test.h"
#include "numbers.h"
#include "reference.h"

namespace gyre::test {
namespace {

constexpr DType kFloats[] = {DType::f32, DType::f16, DType::bf16};

class RopeAppend : public testing::TestWithParam<DeviceSetup> {
 protected:
  Tensor random(DType dtype, const Dims& shape) {
    const Tensor tensor = device().tensor(dtype, shape);
    write_bytes(tensor, reference::stored(dtype, normal_floats(tensor.elements(), random_)));
    return tensor;
  }
  Tensor integers(const std::vector<int32_t>& values) {
    return tensor_of(device(), values, {values.size()});
  }

  // Rope and, by `separate`, everything else on its own.
  void rotate(Encoder& encoder, const RopeAppendInputs& in, const RopeAppendOptions& options,
              const Tensor& k_out) const {
    if (!options.norm) {
      rope(encoder,
           {.x = in.q,
            .positions = in.positions,
            .out = in.q_out,
            .k = in.k,
            .k_out = k_out,
            .frequencies = in.frequencies,
            .factors = in.factors},
           *options.rope);
      return;
    }
    norm_rope(encoder,
              {.x = in.q,
               .positions = in.positions,
               .out = in.q_out,
               .weight = in.q_weight,
               .k = in.k,
               .k_out = k_out,
               .k_weight = in.k_weight,
               .frequencies = in.frequencies,
               .factors = in.factors},
              {.rope = options.rope,
               .epsilon = options.norm->epsilon,
               .weight_offset = options.norm->weight_offset});
  }

  // The i-th of many combinations.
  RopeAppendOptions options_of(uint32_t i) {
    RopeAppendOptions options;
    options.rope->pairing = i % 2 == 0 ? RopePairing::split_half : RopePairing::adjacent;
    if (i % 3 == 1) options.rope->rotary_dim = 24;
    if (i % 5 == 2) options.rope->magnitude = 1.25f;
    options.rope->base = i % 2 == 0 ? 10000.0 : 500000.0;
    if (i / 2 % 2 == 1) options.norm = RopeNorm{.weight_offset = i % 3 == 0 ? 1.0f : 0.0f};
    return options;
  }
  RopeAppendInputs inputs_of(uint32_t i, uint64_t tokens, uint64_t k_dim, uint64_t v_dim,
                             const RopeAppendOptions& options) {
    const DType dtype = kFloats[i % 3];
    RopeAppendInputs in;
    in.q = random(dtype, {tokens, 5, k_dim});
    in.q_out = device().tensor(dtype, in.q.shape());
    in.k = random(dtype, {tokens, kHeads, k_dim});
    in.v = random(dtype, {tokens, kHeads, v_dim});
    std::vector<int32_t> at;
    for (uint64_t t = 0; t < tokens; ++t) at.push_back(static_cast<int32_t>(random_() % 100000));
    in.positions = integers(at);
    if (options.norm && i % 4 != 3) {
      in.q_weight = random(DType::f32, {k_dim});
      in.k_weight = random(DType::f16, {k_dim});
    }
    const uint64_t pairs = options.rope->rotary_dim.value_or(static_cast<uint32_t>(k_dim)) / 2;
    if (i % 7 == 3) in.factors = positive({pairs});
    if (i % 7 == 5) in.frequencies = positive({pairs});
    return in;
  }
  Tensor positive(const Dims& shape) {
    std::vector<float> values = normal_floats(elements_of(shape), random_);
    for (float& x : values) x = 0.1f + x * x;
    return tensor_of(device(), values, shape);
  }

  const Device& device() const { return open_.device(); }

  static constexpr uint64_t kHeads = 3;
  OpenDevice open_{GetParam()};
  std::mt19937 random_{11};
};

TEST_P(RopeAppend, IntoPages) {
  constexpr uint64_t kTokens[] = {1, 2, 9, 31, 32, 33, 70};
  constexpr uint64_t kDims[] = {64, 128, 80, 256, 32};
  for (uint32_t i = 0; i < 84; ++i) {
    const uint64_t tokens = kTokens[i % 7], k_dim = kDims[i % 5], v_dim = kDims[i / 5 % 5];
    const RopeAppendOptions options = options_of(i);
    RopeAppendInputs in = inputs_of(i, tokens, k_dim, v_dim, options);
    const KvFormat k = i % 4 == 3 ? KvFormat::f16 : KvFormat::tq8;
    const KvFormat v = i % 8 == 1 ? KvFormat::bf16 : KvFormat::tq4;
    std::vector<int32_t> list;
    for (uint64_t t = 0; t < tokens; ++t) list.push_back(static_cast<int32_t>(11 + t));
    if (i % 2 == 1) list[tokens / 2] = -1;
    if (i % 3 == 2) std::swap(list.front(), list[tokens > 3 ? 3 : 0]);
    const Tensor slots = integers(list);
    Bytes bytes[2], queries[2];
    for (const bool fused : {false, true}) {
      const KvPages pages = KvPages::allocate(device(), {k, v, kHeads, k_dim, v_dim, 16}, 6);
      in.q_out = device().tensor(in.q.dtype(), in.q.shape());
      Encoder encoder(device());
      if (fused) {
        rope_append(encoder, in, {pages, slots}, options);
      } else {
        const Tensor rotated = device().tensor(in.k.dtype(), in.k.shape());
        rotate(encoder, in, options, rotated);
        kv_write(encoder, {rotated, in.v, pages, slots});
      }
      encoder.submit().wait();
      bytes[fused] = read_bytes(pages.bytes), queries[fused] = read_bytes(in.q_out);
    }
    EXPECT_TRUE(queries[0] == queries[1]) << "queries of " << i;
    EXPECT_TRUE(bytes[0] == bytes[1]) << "pages of " << i;
  }
}

// A prompt, tokens one by one through a graph, several at a time: what save() writes is the same.
TEST_P(RopeAppend, IntoACache) {
  const std::vector<KvLayer> layers = {{KvFormat::tq8, KvFormat::tq4, 0, 0, 0},
                                       {KvFormat::tq4, KvFormat::tq4, 0, 6, 3},
                                       {KvFormat::f16, KvFormat::f16, 20, 0, 0}};
  const KvCacheOptions wanted{.kv_heads = kHeads,
                              .head_dim = 64,
                              .v_head_dim = 96,
                              .capacity = 120,
                              .layers = layers,
                              .step_tokens = 40};
  KvCache apart(device(), wanted), fused(device(), wanted);
  uint32_t i = 0;
  for (const uint64_t tokens : {2u, 39u, 1u, 1u, 7u, 1u, 33u}) {
    const RopeAppendOptions options = options_of(i);
    RopeAppendInputs in = inputs_of(i, tokens, 64, 96, options);
    ++i;
    Encoder encoder(device());
    apart.begin_step(encoder, tokens);
    fused.begin_step(encoder, tokens);
    for (uint64_t layer = 0; layer < layers.size(); ++layer) {
      in.positions = apart.positions(tokens);
      const Tensor rotated = device().tensor(in.k.dtype(), in.k.shape());
      rotate(encoder, in, options, rotated);
      apart.append(encoder, layer, rotated, in.v);
      in.positions = {};
      fused.rope_append(encoder, layer, in, options);
    }
    encoder.submit().wait();
    const Folder folder;
    apart.save(folder / "apart");
    fused.save(folder / "fused");
    EXPECT_TRUE(bytes_of_file(folder / "apart") == bytes_of_file(folder / "fused"))
        << "after step " << i;
  }
}

TEST_P(RopeAppend, ACacheRefusesAndStaysAsItWas) {
  KvCache cache(device(), {.kv_heads = kHeads, .head_dim = 64, .capacity = 32, .step_tokens = 8});
  RopeAppendInputs in;
  in.k = random(DType::f32, {2, kHeads, 64});
  in.v = random(DType::f32, {2, kHeads, 64});
  Encoder encoder(device());
  cache.begin_step(encoder, 2);
  const uint32_t before = encoder.size();
  EXPECT_THROW(cache.rope_append(encoder, 1, in), Error);  // there is one layer
  in.q = random(DType::f32, {2, 4, 64});
  EXPECT_THROW(cache.rope_append(encoder, 0, in), Error);  // no q_out
  in.q_out = in.q;
  RopeAppendOptions sectioned;
  sectioned.rope->mode = RopeMode::sectioned;
  sectioned.rope->sections[0] = 32;
  EXPECT_THROW(cache.rope_append(encoder, 0, in, sectioned), Error);  // positions of four axes
  EXPECT_EQ(encoder.size(), before);
  EXPECT_THROW(cache.begin_step(encoder, 1), Error);  // the layer lacks the step
  cache.rope_append(encoder, 0, in);
  cache.begin_step(encoder, 1);
}

// Two batches in lockstep: ragged steps, a graph, tails and sink tokens.
TEST_P(RopeAppend, IntoABatch) {
  const KvPoolOptions wanted{
      .kv_heads = kHeads,
      .head_dim = 64,
      .layers = {{KvFormat::tq8, KvFormat::tq4, 0, 0, 0}, {KvFormat::tq4, KvFormat::tq4, 0, 8, 3}},
      .pages = 24,
      .page_tokens = 16};
  Bytes rows[2];
  for (const bool fused : {false, true}) {
    random_.seed(5);
    KvPool pool(device(), wanted);
    KvSequence a = pool.sequence(), b = pool.sequence();
    KvBatch batch(pool, {.max_sequences = 2, .max_tokens = 64});
    for (const auto& [of_a, of_b] : {std::pair{35u, 5u}, {1u, 1u}, {1u, 6u}, {1u, 1u}}) {
      const RopeAppendOptions options = options_of(0);
      RopeAppendInputs in = inputs_of(0, of_a + of_b, 64, 64, options);
      const Tensor out = device().tensor(DType::f32, {of_a + of_b, 6, 64});
      in.q = random(DType::f32, {of_a + of_b, 6, 64});
      in.q_out = device().tensor(DType::f32, in.q.shape());
      Encoder encoder(device());
      batch.begin_step(encoder, {{a, of_a}, {b, of_b}});
      for (uint64_t layer = 0; layer < 2; ++layer) {
        if (fused) {
          in.positions = {};
          batch.rope_append(encoder, layer, in, options);
        } else {
          const Tensor rotated = device().tensor(in.k.dtype(), in.k.shape());
          in.positions = batch.positions();
          rotate(encoder, in, options, rotated);
          batch.append(encoder, layer, rotated, in.v);
        }
        batch.attend(encoder, layer, {.q = in.q_out, .out = out});
      }
      encoder.submit().wait();
      const Bytes got = read_bytes(out);
      rows[fused].insert(rows[fused].end(), got.begin(), got.end());
    }
  }
  EXPECT_TRUE(rows[0] == rows[1]);
}

INSTANTIATE_TEST_SUITE_P(Devices, RopeAppend, testing::ValuesIn(device_setups()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace gyre::test
