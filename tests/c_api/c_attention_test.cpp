#include "c_api/c_equals_cpp.h"

namespace gyre::test {
namespace {

// Buffers of C's and of C++'s hold the same keys and values.
class CBuffers : public CEqualsCpp {
 protected:
  void SetUp() override {
    ASSERT_EQ(gyre_kv_buffer_allocate(&on, &k_shape, &ka), GYRE_OK) << gyre_last_error();
    ASSERT_EQ(gyre_kv_buffer_allocate(&on, &v_shape, &va), GYRE_OK) << gyre_last_error();
    const Tensor k = random({kSlots, kKvHeads, kDim}), v = random({kSlots, kKvHeads, kDim});
    const gyre_kv_quantize_inputs quantize{
        .size = sizeof quantize, .k = c(k), .k_cache = ka, .v = c(v), .v_cache = va};
    ran(gyre_kv_quantize(&encoder, &quantize, nullptr));
    kv_quantize(encoder.value, {.k = k, .k_cache = kb, .v = v, .v_cache = vb});
  }
  void TearDown() override {
    gyre_kv_buffer_destroy(ka);
    gyre_kv_buffer_destroy(va);
  }
  KvBuffer buffer(KvFormat format, KvRole role) const {
    return KvBuffer::allocate(device, {.format = format,
                                       .role = role,
                                       .kv_heads = kKvHeads,
                                       .capacity = kSlots,
                                       .head_dim = kDim});
  }

  const gyre_kv_shape k_shape{.size = sizeof k_shape,
                              .format = GYRE_KV_TQ8,
                              .role = GYRE_KV_ROLE_K,
                              .kv_heads = kKvHeads,
                              .capacity = kSlots,
                              .head_dim = kDim};
  const gyre_kv_shape v_shape{.size = sizeof v_shape,
                              .format = GYRE_KV_TQ4,
                              .role = GYRE_KV_ROLE_V,
                              .kv_heads = kKvHeads,
                              .capacity = kSlots,
                              .head_dim = kDim};
  gyre_kv_buffer *ka = nullptr, *va = nullptr;
  KvBuffer kb = buffer(KvFormat::tq8, KvRole::k), vb = buffer(KvFormat::tq4, KvRole::v);
  // All that differs from the defaults.
  const Tensor alibi_slopes = random({kHeads}), sink_logits = random({kHeads});
  const gyre_tensor c_slopes{{.value = alibi_slopes}}, c_sinks{{.value = sink_logits}};
  gyre_attention_mask c_mask{.size = sizeof c_mask,
                             .window = 6,
                             .soft_cap = 2.0f,
                             .not_causal = 1,
                             .alibi_slopes = &c_slopes,
                             .tree_mask = nullptr,
                             .sink_logits = &c_sinks};
  const gyre_attention_options c_options{.size = sizeof c_options,
                                         .length = kSlots - 2,
                                         .ring_start = 3,
                                         .mask = &c_mask,
                                         .scale = 0.125f};
  AttentionOptions cpp_options{.length = kSlots - 2,
                               .ring_start = 3,
                               .scale = 0.125f,
                               .mask = {.causal = false,
                                        .window = 6,
                                        .soft_cap = 2.0f,
                                        .alibi_slopes = alibi_slopes,
                                        .sink_logits = sink_logits}};
};

TEST_F(CBuffers, AScaleFactorIsTheBuffers) {
  gyre_kv_shape shape{.size = sizeof shape,
                      .format = GYRE_KV_MLX_NATIVE4,
                      .role = GYRE_KV_ROLE_K,
                      .kv_heads = 1,
                      .capacity = 4,
                      .head_dim = 512};
  for (const float factor : {0.0f, 16.0f}) {
    shape.scale_factor = factor;
    gyre_kv_buffer* made = nullptr;
    ASSERT_EQ(gyre_kv_buffer_allocate(&on, &shape, &made), GYRE_OK) << gyre_last_error();
    EXPECT_EQ(made->value.shape.scale_factor, factor == 0 ? 1 : factor);
    gyre_kv_buffer_destroy(made);
  }
  shape.scale_factor = -1;
  uint32_t rank = 0;
  uint64_t dims[6] = {};
  EXPECT_EQ(gyre_kv_codes_shape(&shape, &rank, dims), GYRE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(gyre_last_error()).find("scale_factor"), std::string::npos);
}

TEST_F(CBuffers, Codec) {
  gyre_tensor *codes = nullptr, *scales = nullptr;
  ASSERT_EQ(gyre_kv_buffer_codes(va, &codes), GYRE_OK);
  ASSERT_EQ(gyre_kv_buffer_scales(va, &scales), GYRE_OK);
  same(codes->value, vb.codes);
  same(scales->value, vb.scales);
  uint32_t rank = 0;
  uint64_t dims[6] = {};
  ASSERT_EQ(gyre_kv_scales_shape(&v_shape, &rank, dims), GYRE_OK);
  EXPECT_EQ(Dims(std::span(dims, rank)), vb.scales.shape());
  ASSERT_EQ(gyre_kv_codes_shape(&v_shape, &rank, dims), GYRE_OK);
  EXPECT_EQ(Dims(std::span(dims, rank)), vb.codes.shape());
  gyre_kv_buffer* again = nullptr;
  ASSERT_EQ(gyre_kv_buffer_create(&v_shape, codes, scales, &again), GYRE_OK);
  gyre_tensor_destroy(codes);
  gyre_tensor_destroy(scales);

  const Tensor a = made({3, kKvHeads, kDim}), b = made({3, kKvHeads, kDim});
  const gyre_kv_dequantize_inputs dequantize{
      .size = sizeof dequantize, .cache = again, .out = c(a)};
  const gyre_kv_dequantize_options rotated{
      .size = sizeof rotated, .first_slot = 8, .domain = GYRE_ROTATED};
  ran(gyre_kv_dequantize(&encoder, &dequantize, nullptr));
  kv_dequantize(encoder.value, {.cache = vb, .out = b});
  same(a, b);
  ran(gyre_kv_dequantize(&encoder, &dequantize, &rotated));
  kv_dequantize(encoder.value, {.cache = vb, .out = b},
                {.first_slot = 8, .domain = KvDomain::rotated});
  same(a, b);
  gyre_kv_buffer_destroy(again);
}

TEST_F(CBuffers, Attention) {
  const Tensor q = random({kTokens, kHeads, kDim}), oa = made(q.shape()), ob = made(q.shape()),
               la = made({kTokens, kHeads}), lb = made({kTokens, kHeads});
  gyre_attention_inputs attend{
      .size = sizeof attend, .q = c(q), .k_cache = ka, .v_cache = va, .out = c(oa), .lse = c(la)};
  const AttentionInputs cpp{.q = q, .k_cache = kb, .v_cache = vb, .out = ob, .lse = lb};
  gyre_attention_options options{.size = sizeof options, .length = kSlots};
  ran(gyre_attention(&encoder, &attend, &options));
  attention(encoder.value, cpp, {.length = kSlots});
  same(oa, ob);
  same(la, lb);
  ran(gyre_attention(&encoder, &attend, &c_options));
  attention(encoder.value, cpp, cpp_options);
  same(oa, ob);
  same(la, lb);
}

TEST_F(CBuffers, Latent) {
  const auto half = [&](KvRole role) {
    return KvBuffer::allocate(device, {.format = KvFormat::tq8,
                                       .role = role,
                                       .kv_heads = 1,
                                       .capacity = kSlots,
                                       .head_dim = kDim});
  };
  const gyre_kv_buffer latent{{.value = half(KvRole::k)}}, rotary{{.value = half(KvRole::v)}};
  kv_quantize(encoder.value, {.k = random({kSlots, 1, kDim}),
                              .k_cache = latent.value,
                              .v = random({kSlots, 1, kDim}),
                              .v_cache = rotary.value});
  const Tensor q = random({kTokens, kHeads, 2 * kDim}), oa = made({kTokens, kHeads, kDim}),
               ob = made({kTokens, kHeads, kDim});
  const gyre_attention_inputs attend{.size = sizeof attend,
                                     .q = c(q),
                                     .k_cache = &latent,
                                     .v_cache = &rotary,
                                     .out = c(oa),
                                     .latent = 1};
  const gyre_attention_options options{.size = sizeof options, .length = kSlots, .scale = 0.25f};
  ran(gyre_attention(&encoder, &attend, &options));
  attention(encoder.value,
            {.q = q, .k_cache = latent.value, .v_cache = rotary.value, .out = ob, .latent = true},
            {.length = kSlots, .scale = 0.25f});
  same(oa, ob);
}

TEST_F(CBuffers, PartialAndMerge) {
  const Tensor q = random({kTokens, kHeads, kDim}), oa = made(q.shape()), ob = made(q.shape()),
               la = made({kTokens, kHeads}), lb = made({kTokens, kHeads});
  const Tensor pa = made(attention_partial_shape(3, q.shape(), kDim)), pb = made(pa.shape());
  const gyre_attention_partial_inputs partial{
      .size = sizeof partial, .q = c(q), .k_cache = ka, .v_cache = va, .partial = c(pa)};
  c_mask.sink_logits = nullptr;
  cpp_options.mask.sink_logits = {};
  ran(gyre_attention_partial(&encoder, &partial, &c_options));
  attention_partial(encoder.value, {.q = q, .k_cache = kb, .v_cache = vb, .partial = pb},
                    cpp_options);
  same(pa, pb);
  const gyre_attention_merge_inputs merge{.size = sizeof merge,
                                          .partial = c(pa),
                                          .out = c(oa),
                                          .lse = c(la),
                                          .sink_logits = c(sink_logits)};
  ran(gyre_attention_merge(&encoder, &merge));
  attention_merge(encoder.value, {.partial = pb, .out = ob, .lse = lb, .sink_logits = sink_logits});
  same(oa, ob);
  same(la, lb);
}

}  // namespace
}  // namespace gyre::test
