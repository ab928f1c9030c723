#include <cmath>

#include "c_api/c_equals_cpp.h"

namespace gyre::test {
namespace {

class CCalibration : public CEqualsCpp {
 protected:
  Tensor mixing() {  // near the identity
    const Tensor tensor = random({kKvHeads, kDim, kDim});
    const auto values = tensor.data<float>();
    for (uint64_t i = 0; i < values.size(); ++i)
      values[i] = values[i] * 0.01f + (i / kDim % kDim == i % kDim ? 1.0f : 0.0f);
    return tensor;
  }
  // The identity with a few pairs of coordinates mixed, of which the determinant is 1.
  Tensor symmetric(float off) {
    const Tensor tensor = made({kKvHeads, kDim, kDim});
    const auto values = tensor.data<float>();
    for (uint64_t i = 0; i < values.size(); ++i) {
      const uint64_t row = i / kDim % kDim, column = i % kDim;
      values[i] = row == column ? std::sqrt(1.0f + off * off) : (row ^ 1) == column ? off : 0.0f;
    }
    return tensor;
  }
  KvCalibration calibration() {
    return {{symmetric(0.3f), symmetric(-0.3f), random({kKvHeads, kDim})},
            {mixing(), random({kKvHeads, kDim}), {0.9f, 1.1f}}};
  }
  gyre_kv_calibration of(const KvCalibration& calibration) {
    return {.size = sizeof(gyre_kv_calibration),
            .matrix = c(calibration.transform.matrix),
            .inverse = c(calibration.transform.inverse),
            .mean = c(calibration.transform.mean),
            .factor = c(calibration.feedback.factor),
            .diagonal = c(calibration.feedback.diagonal),
            .gains = calibration.feedback.gains.data(),
            .gain_count = calibration.feedback.gains.size()};
  }

  const KvCalibration k_cpp = calibration(), v_cpp = calibration();
  const gyre_kv_calibration k_c = of(k_cpp), v_c = of(v_cpp);
  const Tensor k = random({kTokens, kKvHeads, kDim}), v = random({kTokens, kKvHeads, kDim});
};

TEST_F(CCalibration, KvQuantize) {
  const auto buffer = [&](KvRole role) {
    return KvBuffer::allocate(device, {KvFormat::tq4, role, kKvHeads, kSlots, kDim});
  };
  const KvBuffer ka = buffer(KvRole::k), va = buffer(KvRole::v), kb = buffer(KvRole::k),
                 vb = buffer(KvRole::v);
  const gyre_kv_buffer k_cache{{.value = ka}}, v_cache{{.value = va}};
  const gyre_kv_quantize_inputs inputs{.size = sizeof inputs,
                                       .k = c(k),
                                       .k_cache = &k_cache,
                                       .v = c(v),
                                       .v_cache = &v_cache,
                                       .k_calibration = &k_c,
                                       .v_calibration = &v_c};
  ran(gyre_kv_quantize(&encoder, &inputs, nullptr));
  kv_quantize(encoder.value, {k, kb, v, vb, k_cpp, v_cpp});
  same(ka.codes, kb.codes);
  same(va.codes, vb.codes);
  same(ka.scales, kb.scales);
  const KvBuffer plain = buffer(KvRole::k);
  kv_quantize(encoder.value, {.k = k, .k_cache = plain});
  encoder.value.submit().wait();
  EXPECT_NE(read_bytes(plain.codes), read_bytes(ka.codes)) << "the calibration has no effect";
}

TEST_F(CCalibration, KvWrite) {
  const KvPageShape shape{
      .k = KvFormat::tq4, .v = KvFormat::tq3, .kv_heads = kKvHeads, .head_dim = kDim};
  const KvPages a = KvPages::allocate(device, shape, 1), b = KvPages::allocate(device, shape, 1);
  const gyre_kv_pages pages{{.value = a}};
  const Tensor slots = integers({3, 4, 5, 6, 7});
  const gyre_kv_write_inputs inputs{.size = sizeof inputs,
                                    .k = c(k),
                                    .v = c(v),
                                    .pages = &pages,
                                    .slots = c(slots),
                                    .k_calibration = &k_c,
                                    .v_calibration = &v_c};
  ran(gyre_kv_write(&encoder, &inputs));
  kv_write(encoder.value, {k, v, b, slots, k_cpp, v_cpp});
  same(a.bytes, b.bytes);
}

TEST_F(CCalibration, RopeAppend) {
  const KvPageShape shape{
      .k = KvFormat::tq4, .v = KvFormat::tq3, .kv_heads = kKvHeads, .head_dim = kDim};
  const KvPages a = KvPages::allocate(device, shape, 1), b = KvPages::allocate(device, shape, 1),
                plain = KvPages::allocate(device, shape, 1);
  const gyre_kv_pages pages{{.value = a}};
  const Tensor slots = integers({3, 4, 5, 6, 7});
  const gyre_rope_append_inputs inputs{
      .size = sizeof inputs, .k = c(k), .v = c(v), .positions = c(slots)};
  const gyre_kv_slots to{.size = sizeof to,
                         .pages = &pages,
                         .slots = c(slots),
                         .k_calibration = &k_c,
                         .v_calibration = &v_c};
  ran(gyre_rope_append(&encoder, &inputs, &to, nullptr));
  const RopeAppendInputs given{.k = k, .v = v, .positions = slots};
  rope_append(encoder.value, given, {b, slots, k_cpp, v_cpp});
  rope_append(encoder.value, given, {.pages = plain, .slots = slots});
  same(a.bytes, b.bytes);
  EXPECT_NE(read_bytes(plain.bytes), read_bytes(a.bytes)) << "the calibration has no effect";
}

TEST_F(CCalibration, KvTransform) {
  const Tensor q = random({kTokens, kHeads, kDim}), a = made(q.shape()), b = made(q.shape());
  const gyre_kv_transform_inputs inputs{.size = sizeof inputs,
                                        .x = c(q),
                                        .matrix = k_c.matrix,
                                        .before = k_c.mean,
                                        .after = v_c.mean,
                                        .out = c(a)};
  ran(gyre_kv_transform(&encoder, &inputs));
  kv_transform(encoder.value,
               {q, k_cpp.transform.matrix, k_cpp.transform.mean, v_cpp.transform.mean, b});
  same(a, b);
}

TEST_F(CCalibration, CachesAndPoolsTakeIt) {
  const gyre_kv_calibration both[] = {k_c, v_c};
  const gyre_kv_layer layer{.size = sizeof layer, .k = GYRE_KV_TQ4, .v = GYRE_KV_TQ4};
  gyre_kv_cache_options options{.size = sizeof options,
                                .kv_heads = kKvHeads,
                                .head_dim = kDim,
                                .capacity = 32,
                                .layers = &layer,
                                .layer_count = 1,
                                .calibration = both,
                                .calibration_count = 2};
  gyre_kv_cache* cache = nullptr;
  ASSERT_EQ(gyre_kv_cache_create(&on, &options, &cache), GYRE_OK) << gyre_last_error();
  gyre_kv_layer_info info{.size = sizeof info};
  ASSERT_EQ(gyre_kv_cache_describe(cache, 0, &info), GYRE_OK);
  const KvCache cpp(device, {.kv_heads = kKvHeads,
                             .head_dim = kDim,
                             .capacity = 32,
                             .layers = {{.k = KvFormat::tq4, .v = KvFormat::tq4}},
                             .calibration = {{k_cpp, v_cpp}}});
  EXPECT_EQ(info.calibration, cpp.describe()[0].calibration);
  EXPECT_NE(info.calibration, 0u);
  gyre_kv_cache_destroy(cache);
  options.calibration_count = 1;
  EXPECT_EQ(gyre_kv_cache_create(&on, &options, &cache), GYRE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(gyre_last_error()).find("odd count of 1"), std::string::npos);
  const gyre_kv_pool_options pool_options{.size = sizeof pool_options,
                                          .kv_heads = kKvHeads,
                                          .head_dim = kDim,
                                          .layers = &layer,
                                          .layer_count = 1,
                                          .pages = 4,
                                          .calibration = both,
                                          .calibration_count = 2};
  gyre_kv_pool* pool = nullptr;
  ASSERT_EQ(gyre_kv_pool_create(&on, &pool_options, &pool), GYRE_OK) << gyre_last_error();
  gyre_kv_pool_info held{.size = sizeof held};
  ASSERT_EQ(gyre_kv_pool_describe(pool, &held), GYRE_OK);
  EXPECT_EQ(held.calibration, pool->value.describe().calibration);
  EXPECT_NE(held.calibration, 0u);
  gyre_kv_pool_destroy(pool);
}

}  // namespace
}  // namespace gyre::test
