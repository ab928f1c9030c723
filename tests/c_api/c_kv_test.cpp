#include "c_api/c_equals_cpp.h"

namespace gyre::test {
namespace {

// Pages of C's and of C++'s hold the same tokens.
class CPages : public CEqualsCpp {
 protected:
  void SetUp() override {
    gyre_kv_pages* allocated = nullptr;
    ASSERT_EQ(gyre_kv_pages_allocate(&on, &shape, 3, &allocated), GYRE_OK) << gyre_last_error();
    ASSERT_EQ(gyre_kv_pages_bytes(allocated, &memory), GYRE_OK);
    gyre_kv_pages_destroy(allocated);
    ASSERT_EQ(gyre_kv_pages_create(&shape, memory, &pages), GYRE_OK);
    const gyre_kv_write_inputs write{
        .size = sizeof write, .k = c(k), .v = c(v), .pages = pages, .slots = c(slots)};
    ran(gyre_kv_write(&encoder, &write));
    kv_write(encoder.value, {.k = k, .v = v, .pages = cpp, .slots = slots});
    same(memory->value, cpp.bytes);
  }
  void TearDown() override {
    gyre_tensor_destroy(memory);
    gyre_kv_pages_destroy(pages);
  }

  const gyre_kv_page_shape shape{.size = sizeof shape,
                                 .k = 0,
                                 .v = GYRE_KV_TQ5,
                                 .kv_heads = kKvHeads,
                                 .head_dim = kDim,
                                 .v_head_dim = 32};
  const KvPageShape cpp_shape{
      .v = KvFormat::tq5, .kv_heads = kKvHeads, .head_dim = kDim, .v_head_dim = 32};
  gyre_kv_pages* pages = nullptr;
  gyre_tensor* memory = nullptr;
  const KvPages cpp = KvPages::allocate(device, cpp_shape, 3);
  const Tensor k = random({kTokens, kKvHeads, kDim}), v = random({kTokens, kKvHeads, 32}),
               q = random({kTokens, kHeads, kDim}), slots = integers({0, 1, 2, 3, 4});
};

TEST_F(CPages, Bytes) {
  uint64_t page_bytes = 0;
  ASSERT_EQ(gyre_kv_page_bytes(&shape, &page_bytes), GYRE_OK) << gyre_last_error();
  EXPECT_EQ(page_bytes, kv_page_bytes(cpp_shape));
}

TEST_F(CPages, RopeAppend) {
  const Tensor more = integers({5, 6, 7, 8, 9}), qa = made(q.shape()), qb = made(q.shape()),
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
  const gyre_kv_slots to{.size = sizeof to, .pages = pages, .slots = c(more)};
  ran(gyre_rope_append(&encoder, &append, &to, &options));
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
}

TEST_F(CPages, Copy) {
  const Tensor from = integers({0}), to = integers({2});
  const gyre_kv_page_copy_inputs copy{
      .size = sizeof copy, .pages = pages, .from = c(from), .to = c(to)};
  ran(gyre_kv_page_copy(&encoder, &copy));
  kv_page_copy(encoder.value, {.pages = cpp, .from = from, .to = to});
  same(memory->value, cpp.bytes);
}

TEST_F(CPages, Attention) {
  const Tensor table = integers({0}).reshape({1, 1}), lengths = integers({kTokens}),
               begin = integers({0, kTokens});
  const Tensor oa = made({kTokens, kHeads, 32}), ob = made(oa.shape());
  const gyre_paged_attention_inputs attend{.size = sizeof attend,
                                           .q = c(q),
                                           .pages = pages,
                                           .page_table = c(table),
                                           .kv_lengths = c(lengths),
                                           .cu_seqlens_q = c(begin),
                                           .is_prefill = nullptr,
                                           .out = c(oa)};
  const gyre_attention_mask mask{
      .size = sizeof mask, .window = 3, .soft_cap = 3.0f, .not_causal = 1};
  const gyre_paged_attention_options with{.size = sizeof with,
                                          .max_query_length = kTokens,
                                          .max_kv_length = 32,
                                          .mask = &mask,
                                          .scale = 0.125f};
  ran(gyre_paged_attention(&encoder, &attend, &with));
  attention(encoder.value,
            PagedAttentionInputs{.q = q,
                                 .pages = cpp,
                                 .page_table = table,
                                 .kv_lengths = lengths,
                                 .cu_seqlens_q = begin,
                                 .out = ob},
            {.max_query_length = kTokens,
             .max_kv_length = 32,
             .scale = 0.125f,
             .mask = {.causal = false, .window = 3, .soft_cap = 3.0f}});
  same(oa, ob);
}

TEST_F(CEqualsCpp, Cache) {
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
  ran(gyre_kv_cache_begin_step(a, &encoder, kTokens));
  ran(gyre_kv_cache_append(a, &encoder, 0, c(k), c(v)));
  b.begin_step(encoder.value, kTokens);
  b.append(encoder.value, 0, k, v);
  gyre_tensor* positions = nullptr;
  ASSERT_EQ(gyre_kv_cache_positions(a, kTokens, &positions), GYRE_OK);
  same(positions->value, b.positions(kTokens));
  gyre_tensor_destroy(positions);

  const gyre_attend_inputs inputs{.size = sizeof inputs, .q = c(q), .out = c(oa)};
  const gyre_attention_mask mask{
      .size = sizeof mask, .window = 3, .soft_cap = 2.0f, .not_causal = 1};
  const gyre_attend_options with{.size = sizeof with, .mask = &mask, .scale = 0.5f};
  ran(gyre_kv_cache_attend(a, &encoder, 0, &inputs, nullptr));
  b.attend(encoder.value, 0, {.q = q, .out = ob});
  same(oa, ob);
  ran(gyre_kv_cache_attend(a, &encoder, 0, &inputs, &with));
  b.attend(encoder.value, 0, {.q = q, .out = ob},
           {.scale = 0.5f, .mask = {.causal = false, .window = 3, .soft_cap = 2.0f}});
  same(oa, ob);
  gyre_kv_cache_destroy(a);
}

TEST_F(CEqualsCpp, LayersThatDifferAndShare) {
  gyre_kv_layer layers[3] = {
      {.size = sizeof layers[0]},
      {.size = sizeof layers[0], .window = 6, .kv_heads = 1, .head_dim = 128, .v_head_dim = 16},
      {.size = sizeof layers[0], .kv_shared_layer_index = 1, .is_kv_shared_layer = 1}};
  const std::vector<KvLayer> same_layers = {
      {},
      {.window = 6, .kv_heads = 1, .head_dim = 128, .v_head_dim = 16},
      {.kv_shared_layer_index = 1}};
  const gyre_kv_cache_options options{.size = sizeof options,
                                      .kv_heads = kKvHeads,
                                      .head_dim = kDim,
                                      .capacity = 32,
                                      .layers = layers,
                                      .layer_count = 3};
  gyre_kv_cache* cache = nullptr;
  ASSERT_EQ(gyre_kv_cache_create(&on, &options, &cache), GYRE_OK) << gyre_last_error();
  const KvCache b(device,
                  {.kv_heads = kKvHeads, .head_dim = kDim, .capacity = 32, .layers = same_layers});
  EXPECT_EQ(cache->value.layers(), b.layers());
  for (uint64_t i = 0; i < 3; ++i) {
    gyre_kv_layer_info info{.size = sizeof info};
    ASSERT_EQ(gyre_kv_cache_describe(cache, i, &info), GYRE_OK);
    EXPECT_EQ(info.kv_heads, i == 0 ? kKvHeads : 1);
    EXPECT_EQ(info.head_dim, i == 0 ? kDim : 128);
    EXPECT_EQ(info.v_head_dim, i == 0 ? kDim : 16);
    EXPECT_EQ(info.is_kv_shared_layer, i == 2 ? 1 : 0);
    EXPECT_EQ(info.kv_shared_layer_index, i == 2 ? 1u : 0u);
    EXPECT_EQ(info.bytes == 0, i == 2);
  }
  const gyre_kv_pool_options pool_options{.size = sizeof pool_options,
                                          .kv_heads = kKvHeads,
                                          .head_dim = kDim,
                                          .layers = layers,
                                          .layer_count = 3,
                                          .pages = 8};
  gyre_kv_pool* pool = nullptr;
  ASSERT_EQ(gyre_kv_pool_create(&on, &pool_options, &pool), GYRE_OK) << gyre_last_error();
  EXPECT_EQ(pool->value.layers(), b.layers());
  gyre_kv_cache* none = nullptr;
  layers[2].is_kv_shared_layer = 0;
  EXPECT_NE(gyre_kv_cache_create(&on, &options, &none), GYRE_OK);
  EXPECT_NE(std::string(gyre_last_error()).find("kv_shared_layer_index is 1"), std::string::npos);

  const gyre_kv_policy policy{.size = sizeof policy, .kv_shared_layers = 1};
  ASSERT_EQ(gyre_kv_layers(3, &policy, layers), GYRE_OK) << gyre_last_error();
  EXPECT_EQ(layers[2].is_kv_shared_layer, 1);
  EXPECT_EQ(layers[2].kv_shared_layer_index, 1u);
  gyre_kv_cache_destroy(cache);
  gyre_kv_pool_destroy(pool);
}

TEST_F(CEqualsCpp, PoolDefaults) {
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

// A few tokens as decoding does them, then as prompts.
TEST_F(CEqualsCpp, PoolSteps) {
  const KvPool pool(device, {.kv_heads = kKvHeads, .head_dim = kDim, .pages = 8});
  gyre_kv_pool by_c{{.value = pool}};
  gyre_kv_sequence a{{.value = pool.sequence()}};
  KvSequence b = pool.sequence();
  gyre_kv_batch* batch = nullptr;
  ASSERT_EQ(gyre_kv_batch_create(&by_c, nullptr, &batch), GYRE_OK) << gyre_last_error();
  KvBatch cpp(pool);
  for (const bool prompt : {true, false, true}) {
    const Tensor q = random({kTokens, kHeads, kDim}), k = random({kTokens, kKvHeads, kDim}),
                 v = random({kTokens, kKvHeads, kDim}), oa = made(q.shape()), ob = made(q.shape());
    const gyre_kv_step step{
        .size = sizeof step, .sequence = &a, .tokens = kTokens, .is_prefill = prompt};
    const gyre_attend_inputs inputs{.size = sizeof inputs, .q = c(q), .out = c(oa)};
    ran(gyre_kv_batch_begin_step(batch, &encoder, &step, 1));
    ran(gyre_kv_batch_append(batch, &encoder, 0, c(k), c(v)));
    ran(gyre_kv_batch_attend(batch, &encoder, 0, &inputs, nullptr));
    cpp.begin_step(encoder.value, {{.sequence = b, .tokens = kTokens, .is_prefill = prompt}});
    cpp.append(encoder.value, 0, k, v);
    cpp.attend(encoder.value, 0, {.q = q, .out = ob});
    same(oa, ob);
  }
  gyre_kv_batch_destroy(batch);
}

}  // namespace
}  // namespace gyre::test
