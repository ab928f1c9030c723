// The protocol of a cache's steps: what is missing or out of order is refused, with its name,
// before anything runs, and the cache goes on.
#include "cache/kv_protocol_fixture.h"

namespace gyre::test {
namespace {

TEST_F(KvProtocol, AForgottenLayerIsNamed) {
  step(3);
  cache.begin_step(encoder, 2);
  append(encoder, 0, 2);
  append(encoder, 4, 2);
  encoder.submit().wait();
  const std::vector<std::string> lacks = {"the step of 2 tokens lacks append() of layers 1 to 3"};
  EXPECT_REFUSED(("kv_cache.begin_step", lacks[0]), cache.begin_step(encoder, 1));
  EXPECT_REFUSED(("kv_cache.rollback", lacks[0]), cache.rollback(encoder, 1));
  EXPECT_REFUSED(("kv_cache.save", lacks[0]), save());
  EXPECT_REFUSED(("kv_cache.fork", lacks[0]), cache.fork(encoder));
  EXPECT_EQ(encoder.size(), 0u);
  EXPECT_EQ(cache.length(), 5u);
  append(encoder, 2, 2);
  EXPECT_REFUSED(("lacks append() of layers 1, 3;"), cache.begin_step(encoder, 1));
  append(encoder, 1, 2);
  EXPECT_REFUSED(("lacks append() of layer 3;"), cache.begin_step(encoder, 1));
  append(encoder, 3, 2);
  expect_goes_on();  // the rest of the step is recorded and not yet submitted
}

TEST_F(KvProtocol, AStepThatLacksLayersIsTakenBackWhole) {
  step(3);
  cache.begin_step(encoder, 4);
  append(encoder, 2, 4);
  encoder.submit().wait();
  cache.rollback(encoder, 4);
  encoder.submit().wait();
  EXPECT_EQ(cache.length(), 3u);
  cache.begin_step(encoder, 4);
  cache.clear(encoder);
  encoder.submit().wait();
  EXPECT_EQ(cache.length(), 0u);
  expect_goes_on();
}

TEST_F(KvProtocol, ExtendTwice) {
  cache.begin_step(encoder, 2);
  EXPECT_REFUSED(("kv_cache.begin_step", "lacks append() of layers 0 to 4"),
                 cache.begin_step(encoder, 1));
  encoder.submit().wait();
  EXPECT_REFUSED(("kv_cache.begin_step", "layers 0 to 4"), cache.begin_step(encoder, 1));
  append_all(encoder, 2);
  expect_goes_on();
}

// Several steps in one list are in order. A second encoder is refused until the first is submitted.
TEST_F(KvProtocol, OneEncoderAtATime) {
  const Folder folder;
  const std::string path = folder / "a";
  step(1);
  cache.save(path);
  const auto expect_refused = [&](const char* op, const auto& call) {
    EXPECT_TRUE(refused({op, "another encoder has calls on this kv_cache that are not submitted",
                         "submit() or clear() that one first"},
                        call));
  };
  const auto expect_all_refused = [&] {
    expect_refused("kv_cache.begin_step", [&] { cache.begin_step(other, 1); });
    expect_refused("kv_cache.append", [&] { append(other, 0, 2); });
    expect_refused("kv_cache.attend", [&] { attend(other, 0, 1); });
    expect_refused("kv_cache.rollback", [&] { cache.rollback(other, 1); });
    expect_refused("kv_cache.clear", [&] { cache.clear(other); });
    expect_refused("kv_cache.fork", [&] { cache.fork(other); });
    EXPECT_EQ(other.size(), 0u);
    EXPECT_REFUSED(("kv_cache.save", "not submitted"), save());
    EXPECT_REFUSED(("kv_cache.load", "not submitted"), cache.load(path));
  };
  attend(encoder, 0, 1);
  expect_all_refused();
  for (int i = 0; i < 3; ++i) {
    record_step(encoder, 2);
    attend(encoder, 0, 2);
  }
  expect_all_refused();
  KvCache copy = cache.fork(encoder);  // after them in the same list
  expect_all_refused();
  std::swap(copy, cache);
  expect_all_refused();
  std::swap(copy, cache);
  encoder.submit().wait();
  EXPECT_EQ(copy.length(), 7u);
  record_step(other, 1);
  other.submit().wait();
  append_all(encoder, 1);  // a list that is dropped does not hold the cache, nor does a graph
  encoder.clear();
  append_all(other, 1);
  const Graph graph = other.instantiate();
  expect_goes_on();
  cache.load(path);
  EXPECT_EQ(cache.length(), 1u);
  expect_goes_on();
}

TEST_F(KvProtocol, MoreQueriesThanTokens) {
  step(8);
  cache.begin_step(encoder, 2);
  append(encoder, 0, 2);
  EXPECT_REFUSED(("kv_cache.attend", "the step has 2 tokens, got 3 queries"),
                 attend(encoder, 0, 3));
  attend(encoder, 0, 2);
  for (uint64_t layer = 1; layer < kLayers; ++layer) append(encoder, layer, 2);
  encoder.submit().wait();
  attend(encoder, 0, 3);  // may be for a step to come
  EXPECT_REFUSED(("encoder.submit", "kv_cache.attend of layer 0", "3 queries", "2 tokens"),
                 encoder.submit());
  encoder.clear();
  // A step that is ended leaves its tokens to be asked about again, as many as there are.
  cache.rollback(encoder, 0);
  attend(encoder, 0, 10);
  encoder.submit().wait();
  attend(encoder, 0, 11);
  EXPECT_REFUSED(("encoder.submit", "11 queries", "the cache 10 tokens"), encoder.submit());
  encoder.clear();
  expect_goes_on();
}

TEST_F(KvProtocol, AnAttendBeforeTheAppendOfItsLayer) {
  step(3);
  cache.begin_step(encoder, 1);
  append(encoder, 0, 1);
  attend(encoder, 1, 1);
  EXPECT_REFUSED(("encoder.submit", "kv_cache.attend of layer 1", "before the step's append()"),
                 encoder.submit());
  encoder.clear();
  cache.rollback(encoder, 1);
  encoder.submit().wait();
  expect_goes_on();
}

// Graphs are recorded before there is a step, or in one; a replay counts as their appends.
TEST_F(KvProtocol, GraphsAppendWhenTheyAreReplayed) {
  append_all(encoder, 1);
  for (uint64_t layer = 0; layer < kLayers; ++layer) attend(encoder, layer, 1);
  const Graph one = encoder.instantiate();
  append_all(encoder, 4);
  attend(encoder, 2, 4);
  const Graph four = encoder.instantiate();
  save();  // nothing is recorded
  EXPECT_REFUSED(("graph.replay", "kv_cache.append of layer 0", "begin_step() comes first"),
                 one.replay());
  for (const uint64_t tokens : {1, 4, 1, 1, 4}) {
    cache.begin_step(encoder, tokens);
    EXPECT_REFUSED(("graph.replay", "kv_cache"), (tokens == 1 ? one : four).replay())
        << "before its begin_step() is submitted";
    encoder.submit();
    EXPECT_REFUSED(("graph.replay", "kv_cache.append of layer 0 was recorded with"),
                   (tokens == 1 ? four : one).replay());
    EXPECT_REFUSED(("layers 0 to 4"), cache.begin_step(encoder, 1));
    (tokens == 1 ? one : four).replay().wait();
    (tokens == 1 ? one : four).replay().wait();  // the same tokens into the same slots
  }
  EXPECT_EQ(cache.length(), 11u);
  cache.rollback(encoder, 1);
  encoder.submit().wait();
  EXPECT_REFUSED(("graph.replay", "begin_step() comes first"), one.replay());
  expect_goes_on();
}

TEST_F(KvProtocol, AGraphPerLayer) {
  std::vector<Graph> graphs;
  for (uint64_t layer = 0; layer < kLayers; ++layer) {
    append(encoder, layer, 1);
    graphs.push_back(encoder.instantiate());
  }
  attend(encoder, 1, 1);
  const Graph asks = encoder.instantiate();
  cache.begin_step(encoder, 1);
  encoder.submit();
  graphs[0].replay().wait();
  EXPECT_REFUSED(("graph.replay", "kv_cache.attend of layer 1", "before the step's append()"),
                 asks.replay());
  graphs[1].replay();
  asks.replay().wait();
  EXPECT_REFUSED(("layers 2 to 4"), cache.begin_step(encoder, 1));
  for (uint64_t layer = 2; layer < kLayers; ++layer) graphs[layer].replay().wait();
  expect_goes_on();
}

// A list that was recorded without a step is for a graph.
TEST_F(KvProtocol, RecordedBeforeThereIsAStep) {
  append_all(encoder, 3);
  attend(encoder, 4, 3);
  EXPECT_REFUSED(("encoder.submit", "kv_cache.append of layer 0", "begin_step() comes first"),
                 encoder.submit());
  cache.begin_step(encoder, 3);
  EXPECT_REFUSED(("encoder.submit", "append of layer 0 comes before a step that is recorded"),
                 encoder.submit());
  encoder.clear();
  cache.clear(encoder);
  EXPECT_REFUSED(("kv_cache.append", "from 1 to step_tokens 100", "101"), append(encoder, 0, 101));
  EXPECT_REFUSED(("kv_cache.append", "from 1 to step_tokens 100"), append(encoder, 0, 0));
  expect_goes_on();
}

// Rings are asked about what they have lost when commands run, recorded before or not.
TEST_F(KvProtocol, AGraphThatWouldSeeLostKeys) {
  attend(encoder, 3, 1);
  const Graph asks = encoder.instantiate();
  step(100);
  step(100);
  asks.replay().wait();
  cache.rollback(encoder, 100);
  encoder.submit().wait();
  EXPECT_REFUSED(("graph.replay", "layer 3 no longer has key 60", "1 queries at length 100"),
                 asks.replay());
  attend(encoder, 3, 1, {.mask = {.window = 39}});
  encoder.submit().wait();
  expect_goes_on();
}

TEST_F(KvProtocol, WhatTheCacheDoesNotSeeIsSaid) {
  const auto end_captured = [&] { cache.end_step(KvStepEnd::captured); };
  EXPECT_TRUE(refused({"kv_cache.end_step", "begin_step() comes first"}, end_captured));
  cache.begin_step(encoder, 1);
  EXPECT_TRUE(refused({"kv_cache.end_step", "not submitted"}, end_captured));
  encoder.submit().wait();
  EXPECT_REFUSED(("layers 0 to 4"), cache.begin_step(encoder, 1));
  EXPECT_REFUSED(("kv_cache.end_step", "layers 0 to 4"), cache.end_step());
  end_captured();
  cache.end_step();  // complete already
  expect_goes_on();
}

TEST_F(KvProtocol, AStepEndsWhenEveryLayerIsAppended) {
  EXPECT_REFUSED(("kv_cache.end_step", "begin_step() comes first"), cache.end_step());
  cache.begin_step(encoder, 2);
  EXPECT_REFUSED(("kv_cache.end_step", "lacks append() of layers 0 to 4"), cache.end_step());
  append_all(encoder, 2);
  cache.end_step();
  encoder.submit().wait();
  cache.end_step();
  expect_goes_on();
}

// A cache that is gone leaves its graphs and lists usable, as their memory is theirs.
TEST_F(KvProtocol, ListsOutliveTheCache) {
  append_all(encoder, 1);
  const Graph graph = encoder.instantiate();
  append_all(encoder, 1);
  cache = KvCache(device, options());
  EXPECT_REFUSED(("begin_step() comes first"), graph.replay());
  EXPECT_REFUSED(("begin_step() comes first"), encoder.submit());
  encoder.clear();
  expect_goes_on();
}

TEST_F(KvProtocol, ScaleIsOneOverTheRootOfHeadDim) {
  CacheModel model(small({.k = KvFormat::f32, .v = KvFormat::f32}));
  model.append(20);
  const Tensor q = model.tensor(model.fresh(kHeads * kDim), {1, kHeads, kDim}),
               a = model.device.tensor(DType::f32, {1, kHeads, kValueDim}),
               b = model.device.tensor(DType::f32, {1, kHeads, kValueDim}),
               c = model.device.tensor(DType::f32, {1, kHeads, kValueDim});
  model.cache.attend(model.encoder, 0, {.q = q, .out = a});
  model.cache.attend(model.encoder, 0, {.q = q, .out = b}, {.scale = 0.125f});
  model.cache.attend(model.encoder, 0, {.q = q, .out = c}, {.scale = 0.0f});  // a scale like others
  model.encoder.submit().wait();
  EXPECT_EQ(floats_of(a), floats_of(b));
  EXPECT_NE(floats_of(a), floats_of(c));
}

}  // namespace
}  // namespace gyre::test
