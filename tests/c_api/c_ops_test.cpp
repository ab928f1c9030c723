#include "c_api/c_equals_cpp.h"

namespace gyre::test {
namespace {

TEST_F(CEqualsCpp, Rope) {
  const Tensor x = random({kTokens, kHeads, kDim}), positions = integers({3, 9, 27, 81, 243});
  const Tensor a = made(x.shape()), b = made(x.shape());
  gyre_rope_inputs inputs{.size = sizeof inputs, .x = c(x), .positions = c(positions), .out = c(a)};
  ran(gyre_rope(&encoder, &inputs, nullptr));
  rope(encoder.value, {.x = x, .positions = positions, .out = b});
  same(a, b);

  const Tensor four = made({4, kTokens}, DType::i32);
  for (int32_t i = 0; auto& value : four.data<int32_t>()) value = 7 * i++;
  inputs.positions = c(four);
  const gyre_rope_options options{.size = sizeof options,
                                  .pairing = GYRE_ROPE_ADJACENT,
                                  .mode = GYRE_ROPE_SECTIONED,
                                  .partner = GYRE_ROPE_HEAD_DIM,
                                  .exponent = GYRE_ROPE_HEAD_DIM,
                                  .base = 500.0,
                                  .sections = {4, 5, 6, 1},
                                  .rotary_dim = 32,
                                  .magnitude = 1.25f};
  ran(gyre_rope(&encoder, &inputs, &options));
  rope(encoder.value, {.x = x, .positions = four, .out = b},
       {.pairing = RopePairing::adjacent,
        .mode = RopeMode::sectioned,
        .rotary_dim = 32,
        .partner = RopeSpan::head_dim,
        .exponent = RopeSpan::head_dim,
        .base = 500.0,
        .sections = {4, 5, 6, 1},
        .magnitude = 1.25f});
  same(a, b);
}

TEST_F(CEqualsCpp, NormRope) {
  const Tensor x = random({kTokens, kHeads, kDim}), k = random({kTokens, kKvHeads, kDim}),
               positions = integers({3, 9, 27, 81, 243}), weight = random({kDim}),
               k_weight = random({kDim});
  const Tensor a = made(x.shape()), b = made(x.shape()), ka = made(k.shape()), kb = made(k.shape());
  gyre_norm_rope_inputs inputs{.size = sizeof inputs,
                               .x = c(x),
                               .positions = c(positions),
                               .out = c(a),
                               .weight = c(weight),
                               .second = nullptr,
                               .k = c(k),
                               .k_out = c(ka),
                               .k_weight = c(k_weight)};
  NormRopeInputs cpp{.x = x,
                     .positions = positions,
                     .out = b,
                     .weight = weight,
                     .k = k,
                     .k_out = kb,
                     .k_weight = k_weight};
  ran(gyre_norm_rope(&encoder, &inputs, nullptr));
  norm_rope(encoder.value, cpp);
  same(a, b);
  same(ka, kb);

  const gyre_rope_norm norm{
      .size = sizeof norm, .epsilon = 0.5f, .has_epsilon = 1, .weight_offset = 1.0f};
  const gyre_norm_rope_options options{
      .size = sizeof options, .rope = nullptr, .norm = &norm, .no_rope = 1};
  inputs.positions = nullptr;
  cpp.positions = {};
  ran(gyre_norm_rope(&encoder, &inputs, &options));
  norm_rope(encoder.value, cpp, {.rope = std::nullopt, .epsilon = 0.5f, .weight_offset = 1.0f});
  same(a, b);
  same(ka, kb);
}

TEST_F(CEqualsCpp, RopeFrequenciesAndTable) {
  gyre_rope_config config{.size = sizeof config, .rope_theta = 0, .rotary_dim = kDim};
  RopeConfig cpp{.rotary_dim = kDim};
  for (const gyre_rope_type type :
       {GYRE_ROPE_STANDARD, GYRE_ROPE_LINEAR, GYRE_ROPE_NTK, GYRE_ROPE_YARN, GYRE_ROPE_LLAMA3}) {
    config.rope_type = type;
    cpp.rope_type = static_cast<RopeType>(type);
    if (type != GYRE_ROPE_STANDARD) {
      config.factor = cpp.factor = 4.0;
      config.original_max_position_embeddings = cpp.original_max_position_embeddings = 4096;
    }
    std::vector<double> inverse(kDim / 2);
    double factor = 0;
    ASSERT_EQ(gyre_rope_frequencies(&config, inverse.data(), inverse.size(), &factor), GYRE_OK)
        << gyre_last_error();
    const RopeFrequencies expected = rope_frequencies(cpp);
    EXPECT_EQ(inverse, expected.inverse) << type;
    EXPECT_EQ(factor, expected.attention_factor) << type;

    gyre_tensor* table = nullptr;
    ASSERT_EQ(gyre_rope_table(std::make_unique<gyre_device>(gyre_device{{.value = device}}).get(),
                              inverse.data(), inverse.size(), &table),
              GYRE_OK);
    same(table->value, rope_table(device, expected.inverse));
    gyre_tensor_destroy(table);
  }
  // Those that have no effect above, each at another value than its default.
  config.mscale = 0.7, config.mscale_all_dim = 0.9, config.beta_fast = 16, config.beta_slow = 2;
  config.no_truncate = 1, config.rope_type = GYRE_ROPE_YARN, config.rope_theta = 500;
  cpp.mscale = 0.7, cpp.mscale_all_dim = 0.9, cpp.beta_fast = 16, cpp.beta_slow = 2;
  cpp.truncate = false, cpp.rope_type = RopeType::yarn, cpp.rope_theta = 500;
  std::vector<double> inverse(kDim / 2);
  double factor = 0;
  ASSERT_EQ(gyre_rope_frequencies(&config, inverse.data(), inverse.size(), &factor), GYRE_OK);
  EXPECT_EQ(inverse, rope_frequencies(cpp).inverse);
  EXPECT_EQ(factor, rope_frequencies(cpp).attention_factor);
}

TEST_F(CEqualsCpp, KvCopy) {
  const Tensor k = random({kTokens, kKvHeads, kDim}), v = random({kTokens, kKvHeads, kDim});
  const Dims slots{kSlots, kKvHeads, kDim};
  const Tensor ka = made(slots, DType::f16), kb = made(slots, DType::f16),
               va = made(slots, DType::f16), vb = made(slots, DType::f16);
  const gyre_kv_copy_inputs inputs{
      .size = sizeof inputs, .k = c(k), .k_cache = c(ka), .v = c(v), .v_cache = c(va)};
  const KvCopyInputs cpp{.k = k, .k_cache = kb, .v = v, .v_cache = vb};
  ran(gyre_kv_copy(&encoder, &inputs, nullptr));
  kv_copy(encoder.value, cpp);
  same(ka, kb);
  same(va, vb);
  const gyre_kv_range options{.size = sizeof options,
                              .position = 30,
                              .source_begin = 1,
                              .tokens = 3,
                              .has_tokens = 1,
                              .cache = GYRE_RING};
  ran(gyre_kv_copy(&encoder, &inputs, &options));
  kv_copy(encoder.value, cpp,
          {.position = 30, .cache = CacheKind::ring, .source_begin = 1, .tokens = 3});
  same(ka, kb);
  same(va, vb);
  // 0 tokens are none, not all.
  const std::vector before = read_bytes(ka);
  const gyre_kv_range none{
      .size = sizeof none, .position = 0, .source_begin = 0, .tokens = 0, .has_tokens = 1};
  ran(gyre_kv_copy(&encoder, &inputs, &none));
  EXPECT_EQ(read_bytes(ka), before);
}

TEST_F(CEqualsCpp, Hadamard) {
  const Tensor x = random({kTokens, kDim}), a = made(x.shape()), b = made(x.shape());
  const gyre_hadamard_inputs inputs{.size = sizeof inputs, .x = c(x), .out = c(a)};
  const gyre_hadamard_options options{
      .size = sizeof options, .direction = GYRE_HADAMARD_INVERSE, .signs = GYRE_SIGNS_NATIVE};
  ran(gyre_hadamard(&encoder, &inputs, nullptr));
  hadamard(encoder.value, {.x = x, .out = b});
  same(a, b);
  ran(gyre_hadamard(&encoder, &inputs, &options));
  hadamard(encoder.value, {.x = x, .out = b},
           {.direction = HadamardDirection::inverse, .signs = HadamardSigns::native});
  same(a, b);
}

}  // namespace
}  // namespace gyre::test
