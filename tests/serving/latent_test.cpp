// Latent layers of KvCache and KvPool: steps, replays, forks, prefixes and files, against attention
// in double precision over the rows as they are stored.
#include <filesystem>

#include "expect_error.h"
#include "folder.h"
#include "serving/latent_story.h"

namespace gyre::test {
namespace {

TEST_F(LatentTest, StepsOfACache) {
  for (const auto& [k, v] : {std::pair{KvFormat::tq4, KvFormat::tq8},
                             {KvFormat::tq6, KvFormat::bf16},
                             {KvFormat::bf16, KvFormat::bf16}}) {
    const bool near = describe(k).compressed;
    const KvLayer layer = latent_layer(k, v, near ? kTail : 0, near ? kSinks : 0);
    const Story story(device, layer, 120, 7);
    KvCache cache(device, {.capacity = 130, .layers = {layer}, .step_tokens = 80});
    EXPECT_LT(run_step(encoder, cache, story, 0, 70), max_error(device, layer));
    uint64_t first = 70;
    for (const uint64_t tokens : {1u, 1u, 5u, 1u, 20u, 1u}) {
      EXPECT_LT(run_step(encoder, cache, story, first, tokens), max_error(device, layer)) << first;
      first += tokens;
    }
    KvCache fork = cache.fork(encoder);
    EXPECT_LT(run_step(encoder, fork, story, first, 3), max_error(device, layer));
    EXPECT_LT(run_step(encoder, cache, story, first, 1), max_error(device, layer));
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
    eager.append(encoder, 0, story.latent.given.slice(0, at, 1),
                 story.rotary.given.slice(0, at, 1));
    eager.attend(encoder, 0, {.q = story.q.slice(0, at, 1), .out = wanted}, {.scale = kScale});
    encoder.submit().wait();
    copy_floats(story.latent.given.slice(0, at, 1), k);
    copy_floats(story.rotary.given.slice(0, at, 1), v);
    copy_floats(story.q.slice(0, at, 1), q);
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
  const Folder folder;
  cache.save(folder / "a");
  EXPECT_TRUE(inspect_snapshot(folder / "a").options.layers[0].latent);
  KvCache loaded(device, options);
  loaded.load(folder / "a");
  EXPECT_LT(run_step(encoder, loaded, story, 48, 2), max_error(device, layer));
  KvCacheOptions plain = options;
  plain.layers[0].latent = false;
  KvCache other(device, plain);
  EXPECT_ERROR(invalid_argument, ("latent of layer 0 is 1 in the snapshot and 0 in the cache"),
               other.load(folder / "a"));
}

TEST_F(LatentTest, APoolOfSequences) {
  const KvLayer layer = latent_layer(KvFormat::tq4, KvFormat::tq8, kTail, kSinks);
  const KvPoolOptions options{.layers = {layer}, .pages = 64, .page_tokens = 16, .sequences = 8};
  KvPool pool(device, options);
  KvBatch batch(pool, {.max_sequences = 4, .max_tokens = 128});
  const Story one(device, layer, 100, 1), two(device, layer, 100, 2);
  KvSequence a = pool.sequence(), b = pool.sequence();
  EXPECT_LT(run_batch(encoder, batch, {{a, one, 0, 64}, {b, two, 0, 33}}),
            max_error(device, layer));
  EXPECT_LT(run_batch(encoder, batch, {{a, one, 64, 1}, {b, two, 33, 4}}),
            max_error(device, layer));
  KvSequence fork = a.fork();
  EXPECT_LT(run_batch(encoder, batch, {{a, one, 65, 3}, {b, two, 37, 1}, {fork, one, 65, 1}}),
            max_error(device, layer));
  // A prefix that the index knows.
  std::vector<int32_t> tokens(64);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i);
  KvSequence prompt = pool.sequence();
  EXPECT_LT(run_batch(encoder, batch, {{prompt, one, 0, 64}}), max_error(device, layer));
  pool.publish(prompt, tokens);
  KvSequence matched = pool.match(tokens);
  ASSERT_EQ(matched.length(), 64u);
  EXPECT_LT(run_batch(encoder, batch, {{matched, one, 64, 2}}), max_error(device, layer));
  // A file, which a pool that is not latent refuses.
  const Folder folder;
  pool.save(matched, folder / "a");
  KvSequence loaded = pool.load(folder / "a");
  EXPECT_LT(run_batch(encoder, batch, {{loaded, one, 66, 2}}), max_error(device, layer));
  KvPoolOptions plain = options;
  plain.layers[0].latent = false;
  const KvPool other(device, plain);
  EXPECT_ERROR(io, ("is of a pool with other layers"), other.load(folder / "a"));
}

TEST_F(LatentTest, Refusals) {
  KvLayer two_heads = latent_layer(KvFormat::tq4, KvFormat::tq8, 0, 0);
  two_heads.kv_heads = 2;
  EXPECT_ERROR(invalid_argument,
               ("kv_cache: layer 0: latent attention has one KV head", "got kv_heads 2"),
               KvCache(device, {.capacity = 8, .layers = {two_heads}}));
  const KvLayer layer = latent_layer(KvFormat::tq4, KvFormat::tq8, 0, 0);
  KvCache cache(device, {.capacity = 8, .layers = {layer}});
  const Tensor k = device.tensor(DType::f32, {1, 1, kLatent}),
               v = device.tensor(DType::f32, {1, 1, kRotary}),
               q = device.tensor(DType::f32, {1, kHeads, kLatent + kRotary}),
               out = device.tensor(DType::f32, {1, kHeads, kLatent});
  cache.begin_step(encoder, 1);
  EXPECT_ERROR(invalid_argument, ("kv_cache.rope_append: layer 0 is latent: its k is not rotated"),
               cache.rope_append(encoder, 0, {.k = k, .v = v}, {.rope = RopeOptions{}}));
  cache.append(encoder, 0, k, v);
  EXPECT_ERROR(invalid_argument,
               ("kv_cache.attend: the softmax scale of latent attention has no default: give it"),
               cache.attend(encoder, 0, {.q = q, .out = out}));
  encoder.submit().wait();
}

}  // namespace
}  // namespace gyre::test
