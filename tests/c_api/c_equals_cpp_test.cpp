// Each op through C and through C++, with the same inputs: the same bits. Options that C leaves 0
// must be C++'s defaults, so every op runs once without options and once with all of them.
#include <gtest/gtest.h>
#include <gyre/gyre.h>
#include <gyre/gyre_c.h>

#include <random>

#include "c_api/handles.h"
#include "tensor_bytes.h"

namespace gyre {
namespace {

constexpr uint64_t kTokens = 5, kHeads = 4, kKvHeads = 2, kDim = 64, kSlots = 16;

class CEqualsCpp : public testing::Test {
 protected:
  Tensor made(const Dims& shape, DType dtype = DType::f32) const {
    return device.tensor(dtype, shape);
  }
  Tensor random(const Dims& shape) {
    const Tensor tensor = made(shape);
    for (float& value : tensor.data<float>()) value = normal(numbers);
    return tensor;
  }
  Tensor integers(std::vector<int32_t> values) const {
    const Tensor tensor = made({values.size()}, DType::i32);
    tensor.write_from(std::span<const int32_t>(values));
    return tensor;
  }
  // A handle of C's for a tensor; freed at the end of the test.
  gyre_tensor* c(const Tensor& tensor) {
    return tensors.emplace_back(std::make_unique<gyre_tensor>(gyre_tensor{tensor})).get();
  }
  void ran(gyre_status status) {
    ASSERT_EQ(status, GYRE_OK) << gyre_last_error();
    encoder.value.submit().wait();
  }
  void same(const Tensor& by_c, const Tensor& by_cpp) {
    encoder.value.submit().wait();
    EXPECT_EQ(test::read_bytes(by_c), test::read_bytes(by_cpp));
    bool zero = true;
    for (const auto byte : test::read_bytes(by_cpp)) zero = zero && byte == decltype(byte){};
    EXPECT_FALSE(zero) << "nothing was written";
  }

  Device device = Device::open("cpu");
  gyre_encoder encoder{Encoder(device)};
  std::mt19937 numbers{1};
  std::normal_distribution<float> normal;
  std::vector<std::unique_ptr<gyre_tensor>> tensors;
};

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
    ASSERT_EQ(gyre_rope_table(std::make_unique<gyre_device>(gyre_device{device}).get(),
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
  const gyre_kv_write_options options{.size = sizeof options,
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
  const std::vector before = test::read_bytes(ka);
  const gyre_kv_write_options none{
      .size = sizeof none, .position = 0, .source_begin = 0, .tokens = 0, .has_tokens = 1};
  ran(gyre_kv_copy(&encoder, &inputs, &none));
  EXPECT_EQ(test::read_bytes(ka), before);
}

TEST_F(CEqualsCpp, CodecAndAttention) {
  const gyre_device on{device};
  const gyre_kv_shape k_shape{.size = sizeof k_shape,
                              .format = GYRE_KV_TQ8,
                              .role = GYRE_KV_ROLE_K,
                              .kv_heads = kKvHeads,
                              .capacity = kSlots,
                              .head_dim = kDim};
  gyre_kv_shape v_shape = k_shape;
  v_shape.format = GYRE_KV_TQ4, v_shape.role = GYRE_KV_ROLE_V;
  gyre_kv_buffer *ka = nullptr, *va = nullptr;
  ASSERT_EQ(gyre_kv_buffer_allocate(&on, &k_shape, &ka), GYRE_OK) << gyre_last_error();
  ASSERT_EQ(gyre_kv_buffer_allocate(&on, &v_shape, &va), GYRE_OK) << gyre_last_error();
  const KvBuffer kb = KvBuffer::allocate(device, {.format = KvFormat::tq8,
                                                  .role = KvRole::k,
                                                  .kv_heads = kKvHeads,
                                                  .capacity = kSlots,
                                                  .head_dim = kDim}),
                 vb = KvBuffer::allocate(device, {.format = KvFormat::tq4,
                                                  .role = KvRole::v,
                                                  .kv_heads = kKvHeads,
                                                  .capacity = kSlots,
                                                  .head_dim = kDim});
  const Tensor k = random({kSlots, kKvHeads, kDim}), v = random({kSlots, kKvHeads, kDim});
  const gyre_kv_quantize_inputs quantize{
      .size = sizeof quantize, .k = c(k), .k_cache = ka, .v = c(v), .v_cache = va};
  ran(gyre_kv_quantize(&encoder, &quantize, nullptr));
  kv_quantize(encoder.value, {.k = k, .k_cache = kb, .v = v, .v_cache = vb});
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

  const Tensor q = random({kTokens, kHeads, kDim}), oa = made(q.shape()), ob = made(q.shape()),
               la = made({kTokens, kHeads}), lb = made({kTokens, kHeads}), sinks = random({kHeads}),
               slopes = random({kHeads});
  gyre_attention_inputs attend{.size = sizeof attend,
                               .q = c(q),
                               .k_cache = ka,
                               .v_cache = again,
                               .out = c(oa),
                               .lse = c(la),
                               .sinks = c(sinks),
                               .slopes = c(slopes),
                               .tree = nullptr};
  const AttentionInputs cpp{
      .q = q, .k_cache = kb, .v_cache = vb, .out = ob, .lse = lb, .sinks = sinks, .slopes = slopes};
  gyre_attention_options options{.size = sizeof options, .length = kSlots};
  ran(gyre_attention(&encoder, &attend, &options));
  attention(encoder.value, cpp, {.length = kSlots});
  same(oa, ob);
  same(la, lb);
  options = {.size = sizeof options,
             .length = kSlots - 2,
             .ring_start = 3,
             .window = 6,
             .scale = 0.125f,
             .soft_cap = 2.0f,
             .not_causal = 1,
             .reserved = 0};
  const AttentionOptions cpp_options{.length = kSlots - 2,
                                     .ring_start = 3,
                                     .scale = 0.125f,
                                     .causal = false,
                                     .window = 6,
                                     .soft_cap = 2.0f};
  ran(gyre_attention(&encoder, &attend, &options));
  attention(encoder.value, cpp, cpp_options);
  same(oa, ob);
  same(la, lb);

  const Tensor pa = made(attention_partial_shape(3, q.shape(), kDim)), pb = made(pa.shape());
  const gyre_attention_partial_inputs partial{.size = sizeof partial,
                                              .q = c(q),
                                              .k_cache = ka,
                                              .v_cache = again,
                                              .partial = c(pa),
                                              .slopes = c(slopes),
                                              .tree = nullptr};
  ran(gyre_attention_partial(&encoder, &partial, &options));
  attention_partial(encoder.value,
                    {.q = q, .k_cache = kb, .v_cache = vb, .partial = pb, .slopes = slopes},
                    cpp_options);
  same(pa, pb);
  const gyre_attention_merge_inputs merge{
      .size = sizeof merge, .partial = c(pa), .out = c(oa), .lse = c(la), .sinks = c(sinks)};
  ran(gyre_attention_merge(&encoder, &merge));
  attention_merge(encoder.value, {.partial = pb, .out = ob, .lse = lb, .sinks = sinks});
  same(oa, ob);
  gyre_kv_buffer_destroy(ka);
  gyre_kv_buffer_destroy(va);
  gyre_kv_buffer_destroy(again);
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

TEST_F(CEqualsCpp, Pages) {
  const gyre_device on{device};
  const gyre_kv_page_shape shape{.size = sizeof shape,
                                 .k = 0,
                                 .v = GYRE_KV_TQ5,
                                 .kv_heads = kKvHeads,
                                 .head_dim = kDim,
                                 .v_head_dim = 32};
  const KvPageShape cpp_shape{
      .v = KvFormat::tq5, .kv_heads = kKvHeads, .head_dim = kDim, .v_head_dim = 32};
  uint64_t page_bytes = 0;
  ASSERT_EQ(gyre_kv_page_bytes(&shape, &page_bytes), GYRE_OK) << gyre_last_error();
  EXPECT_EQ(page_bytes, kv_page_bytes(cpp_shape));
  gyre_kv_pages* pages = nullptr;
  ASSERT_EQ(gyre_kv_pages_allocate(&on, &shape, 3, &pages), GYRE_OK) << gyre_last_error();
  gyre_tensor* memory = nullptr;
  ASSERT_EQ(gyre_kv_pages_bytes(pages, &memory), GYRE_OK);
  gyre_kv_pages_destroy(pages);
  ASSERT_EQ(gyre_kv_pages_create(&shape, memory, &pages), GYRE_OK);
  const KvPages cpp = KvPages::allocate(device, cpp_shape, 3);

  const Tensor k = random({kTokens, kKvHeads, kDim}), v = random({kTokens, kKvHeads, 32}),
               slots = integers({0, 1, 2, 3, 4}), more = integers({5, 6, 7, 8, 9});
  const gyre_kv_write_inputs write{
      .size = sizeof write, .k = c(k), .v = c(v), .pages = pages, .slots = c(slots)};
  ran(gyre_kv_write(&encoder, &write));
  kv_write(encoder.value, {.k = k, .v = v, .pages = cpp, .slots = slots});
  same(memory->value, cpp.bytes);

  const Tensor q = random({kTokens, kHeads, kDim}), qa = made(q.shape()), qb = made(q.shape()),
               weight = random({kDim});
  const gyre_rope_norm norm{.size = sizeof norm};
  const gyre_rope_options rope{
      .size = sizeof rope, .pairing = GYRE_ROPE_ADJACENT, .mode = GYRE_ROPE_PLAIN};
  const gyre_rope_append_options options{.size = sizeof options, .rope = &rope, .norm = &norm};
  const gyre_rope_append_inputs append{.size = sizeof append,
                                       .q = c(q),
                                       .q_out = c(qa),
                                       .k = c(k),
                                       .v = c(v),
                                       .positions = c(more),
                                       .q_weight = c(weight),
                                       .k_weight = c(weight)};
  ran(gyre_rope_append(&encoder, &append, pages, c(more), &options));
  rope_append(encoder.value,
              {.q = q,
               .q_out = qb,
               .k = k,
               .v = v,
               .positions = more,
               .q_weight = weight,
               .k_weight = weight},
              {.pages = cpp, .slots = more},
              {.rope = RopeOptions{.pairing = RopePairing::adjacent}, .norm = RopeNorm{}});
  same(memory->value, cpp.bytes);
  same(qa, qb);

  const Tensor from = integers({0}), to = integers({2});
  const gyre_kv_page_copy_inputs copy{
      .size = sizeof copy, .pages = pages, .from = c(from), .to = c(to)};
  ran(gyre_kv_page_copy(&encoder, &copy));
  kv_page_copy(encoder.value, {.pages = cpp, .from = from, .to = to});
  same(memory->value, cpp.bytes);

  const Tensor table = integers({2}).reshape({1, 1}), lengths = integers({10}),
               begin = integers({0, kTokens});
  const Tensor oa = made({kTokens, kHeads, 32}), ob = made(oa.shape());
  const gyre_paged_attention_inputs attend{.size = sizeof attend,
                                           .q = c(qa),
                                           .pages = pages,
                                           .page_table = c(table),
                                           .lengths = c(lengths),
                                           .query_begin = c(begin),
                                           .prompts = nullptr,
                                           .out = c(oa)};
  const gyre_paged_attention_options with{.size = sizeof with,
                                          .most_queries = kTokens,
                                          .most_length = 32,
                                          .window = 7,
                                          .scale = 0.125f,
                                          .soft_cap = 3.0f,
                                          .not_causal = 1};
  ran(gyre_paged_attention(&encoder, &attend, &with));
  attention(encoder.value,
            PagedAttentionInputs{.q = qb,
                                 .pages = cpp,
                                 .page_table = table,
                                 .lengths = lengths,
                                 .query_begin = begin,
                                 .out = ob},
            {.most_queries = kTokens,
             .most_length = 32,
             .scale = 0.125f,
             .causal = false,
             .window = 7,
             .soft_cap = 3.0f});
  same(oa, ob);
  gyre_tensor_destroy(memory);
  gyre_kv_pages_destroy(pages);
}

TEST_F(CEqualsCpp, Cache) {
  const gyre_device on{device};
  const gyre_kv_cache_options options{.size = sizeof options,
                                      .kv_heads = kKvHeads,
                                      .head_dim = kDim,
                                      .v_head_dim = 0,
                                      .capacity = 32};
  gyre_kv_cache* a = nullptr;
  ASSERT_EQ(gyre_kv_cache_create(&on, &options, &a), GYRE_OK) << gyre_last_error();
  KvCache b(device, {.kv_heads = kKvHeads, .head_dim = kDim, .capacity = 32});
  EXPECT_EQ(a->value.options().layers, b.options().layers);
  EXPECT_EQ(a->value.options().step_tokens, b.options().step_tokens);
  const Tensor q = random({kTokens, kHeads, kDim}), k = random({kTokens, kKvHeads, kDim}),
               v = random({kTokens, kKvHeads, kDim}), oa = made(q.shape()), ob = made(q.shape());
  ran(gyre_kv_cache_extend(a, &encoder, kTokens));
  ran(gyre_kv_cache_append(a, &encoder, 0, c(k), c(v)));
  b.extend(encoder.value, kTokens);
  b.append(encoder.value, 0, k, v);
  gyre_tensor* positions = nullptr;
  ASSERT_EQ(gyre_kv_cache_positions(a, kTokens, &positions), GYRE_OK);
  same(positions->value, b.positions(kTokens));
  gyre_tensor_destroy(positions);

  const gyre_attend_inputs inputs{.size = sizeof inputs, .q = c(q), .out = c(oa)};
  const gyre_attend_options with{
      .size = sizeof with, .window = 3, .scale = 0.5f, .soft_cap = 2.0f, .not_causal = 1};
  ran(gyre_kv_cache_attend(a, &encoder, 0, &inputs, nullptr));
  b.attend(encoder.value, 0, {.q = q, .out = ob});
  same(oa, ob);
  ran(gyre_kv_cache_attend(a, &encoder, 0, &inputs, &with));
  b.attend(encoder.value, 0, {.q = q, .out = ob},
           {.scale = 0.5f, .causal = false, .window = 3, .soft_cap = 2.0f});
  same(oa, ob);
  gyre_kv_cache_destroy(a);
}

TEST_F(CEqualsCpp, PoolDefaults) {
  const gyre_device on{device};
  const gyre_kv_pool_options options{.size = sizeof options,
                                     .kv_heads = kKvHeads,
                                     .head_dim = kDim,
                                     .v_head_dim = 0,
                                     .layers = nullptr,
                                     .layer_count = 0,
                                     .pages = 8};
  gyre_kv_pool* pool = nullptr;
  gyre_kv_batch* batch = nullptr;
  ASSERT_EQ(gyre_kv_pool_create(&on, &options, &pool), GYRE_OK) << gyre_last_error();
  ASSERT_EQ(gyre_kv_batch_create(pool, nullptr, &batch), GYRE_OK) << gyre_last_error();
  const KvPoolOptions otherwise;
  EXPECT_EQ(pool->value.options().page_tokens, otherwise.page_tokens);
  EXPECT_EQ(pool->value.options().sequences, otherwise.sequences);
  EXPECT_EQ(pool->value.options().step_tokens, otherwise.step_tokens);
  EXPECT_EQ(pool->value.options().layers, otherwise.layers);
  EXPECT_EQ(batch->value.options().max_sequences, KvBatchOptions{}.max_sequences);
  EXPECT_EQ(batch->value.options().max_tokens, KvBatchOptions{}.max_tokens);
  gyre_kv_pool_destroy(pool);
  gyre_kv_batch_destroy(batch);
}

}  // namespace
}  // namespace gyre
