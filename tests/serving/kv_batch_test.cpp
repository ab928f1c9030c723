// The order of calls, and a full pool: what is refused says what is missing and changes nothing.
#include "runtime/internals.h"
#include "runtime/require.h"
#include "serving/pool_state.h"
#include "serving/serving_fixture.h"

namespace gyre::test {
namespace {

std::vector<const KvPoolState::Store*> stores_of(const KvPoolState::Layer& layer) {
  std::vector<const KvPoolState::Store*> made = {&*layer.body};
  if (layer.tail) made.push_back(&*layer.tail);
  if (layer.sink_tokens) made.push_back(&*layer.sink_tokens);
  return made;
}

class KvBatchTest : public testing::Test {
 public:
  static std::vector<uint64_t> counts(const KvPool& pool) {
    const KvPoolInfo info = pool.describe();
    std::vector<uint64_t> made = {info.sequences, info.prefixes};
    for (const KvGroupInfo& group : info.groups)
      made.insert(made.end(), {group.used, group.shared, group.cached, group.free});
    return made;
  }
  // Refused with these words, and the pool is as it was.
  template <class Call>
  void fails(const std::vector<std::string>& parts, const Call& call,
             ErrorCode code = ErrorCode::invalid_argument) {
    const std::vector<uint64_t> before = counts(server.pool);
    const uint32_t size = server.encoder.size();
    EXPECT_TRUE(throws_error(code, parts, call));
    EXPECT_EQ(counts(server.pool), before);
    EXPECT_EQ(server.encoder.size(), size);
  }
  void append(uint64_t layer) { batch.append(encoder, layer, k, k); }
  void step(KvSequence& sequence, uint64_t tokens) {
    batch.begin_step(encoder, {{sequence, tokens}});
    append(0);
    append(1);
    encoder.submit().wait();
  }

  Device device = Device::open("cpu", {.threads = 1});
  Server server{
      device, small_pool(8), {.max_sequences = 3, .max_tokens = 20, .max_query_length = 18}};
  Encoder& encoder = server.encoder;
  KvBatch& batch = server.batch;
  KvSequence a = server.pool.sequence(), b = server.pool.sequence();
  Tensor k = device.tensor(DType::f32, {20, 1, 16}), out = device.tensor(DType::f32, {20, 1, 16});
};

TEST_F(KvBatchTest, BoundsOfAStep) {
  KvSequence c = server.pool.sequence(), d = server.pool.sequence();
  fails({"kv_batch.begin_step", "from 1 to 3 sequences, got 0"},
        [&] { batch.begin_step(encoder, std::span<const KvStep>{}); });
  fails({"from 1 to 3 sequences, got 4"}, [&] {
    batch.begin_step(encoder, {{a, 1}, {b, 1}, {c, 1}, {d, 1}});
  });
  fails({"max_query_length 18", "got 0"}, [&] { batch.begin_step(encoder, {{a, 0}}); });
  fails({"max_query_length 18", "got 19"}, [&] { batch.begin_step(encoder, {{a, 19}}); });
  fails({"max_tokens 20", "got 21"}, [&] { batch.begin_step(encoder, {{a, 18}, {b, 3}}); });
  fails({"twice"}, [&] { batch.begin_step(encoder, {{a, 1}, {b, 1}, {a, 1}}); });
  const KvPool other(device, small_pool());
  KvSequence foreign = other.sequence();
  fails({"another pool"}, [&] { batch.begin_step(encoder, {{a, 1}, {foreign, 1}}); });
  const KvSequence moved = std::move(d);
  fails({"moved from"}, [&] { batch.begin_step(encoder, {{d, 1}}); });
  Encoder elsewhere(Device::open("cpu", {.threads = 1}));
  fails({"another device"}, [&] { batch.begin_step(elsewhere, {{a, 1}}); });
  EXPECT_EQ(a.length(), 0u);
  batch.begin_step(encoder, {{a, 2}, {b, 18}});
  EXPECT_EQ(batch.tokens(), 20u);
  EXPECT_EQ(a.length(), 2u);
  EXPECT_EQ(b.length(), 18u);
}

TEST_F(KvBatchTest, MaxLength) {
  KvBatch short_batch(server.pool, {.max_sequences = 2, .max_tokens = 20, .max_kv_length = 10});
  fails({"kv_batch.begin_step", "can never fit", "max_kv_length is 10"}, [&] {
    short_batch.begin_step(encoder, {{a, 11}});
  });
  short_batch.begin_step(encoder, {{a, 10}});
}

TEST_F(KvBatchTest, OptionsOfABatch) {
  const auto refuses = [&](const std::vector<std::string>& parts, const KvBatchOptions& options) {
    EXPECT_TRUE(refused(parts, [&] { const KvBatch made(server.pool, options); }));
  };
  refuses({"max_sequences", "got 0"}, {.max_sequences = 0});
  refuses({"max_tokens", "got 0"}, {.max_tokens = 0});
  refuses({"max_query_length", "got 9"}, {.max_tokens = 8, .max_query_length = 9});
  refuses({"holds 64 tokens", "max_kv_length is 65"}, {.max_kv_length = 65});
}

TEST_F(KvBatchTest, AFullPoolNamesTheMissingPages) {
  step(a, 18);
  step(a, 18);  // 36 tokens in 5 of 8 pages
  KvSequence fork = a.fork();
  fails(
      {"kv_batch.begin_step", "1 pages are missing", "needs 4 of group \"all keys\"",
       "3 of 8 are free"},
      [&] {
        batch.begin_step(encoder, {{b, 17}, {a, 1}});
      },
      ErrorCode::out_of_memory);
  EXPECT_EQ(b.length(), 0u);
  EXPECT_EQ(a.length(), 36u);
  batch.begin_step(encoder, {{b, 16}, {a, 1}});  // what fits still does
  EXPECT_EQ(b.length(), 16u);
}

// What falls off a window makes room for the step, but not what others still hold.
TEST_F(KvBatchTest, SharedPagesOfAWindowMakeNoRoom) {
  KvPoolOptions options = small_pool(4);
  options.layers = {{.k = KvFormat::f16, .v = KvFormat::f16, .window = 8}};
  const KvPool pool(device, options);
  KvBatch windowed(pool, {.max_sequences = 1, .max_tokens = 20});
  KvSequence first = pool.sequence(), other = pool.sequence();
  for (KvSequence* sequence : {&first, &other}) {
    windowed.begin_step(encoder, {{*sequence, 16}});
    windowed.append(encoder, 0, k, k);
    encoder.submit().wait();
  }
  KvSequence fork = first.fork();
  fails(
      {"1 pages are missing", "needs 1 of group \"window 8\"", "0 of 4"},
      [&] {
        windowed.begin_step(encoder, {{first, 1}});
      },
      ErrorCode::out_of_memory);
  fork.clear();
  windowed.begin_step(encoder, {{first, 1}});
}

TEST_F(KvBatchTest, TheOrderOfAStep) {
  fails({"kv_batch.append", "begin_step() comes first"}, [&] { append(0); });
  fails({"kv_batch.attend", "begin_step() comes first"},
        [&] { batch.attend(encoder, 0, {.q = k, .out = out}); });
  fails({"kv_batch.positions", "begin_step() comes first"}, [&] { batch.positions(); });
  batch.begin_step(encoder, {{a, 3}, {b, 1}});
  EXPECT_EQ(batch.positions().shape(), Dims({4}));
  fails({"kv_batch.begin_step", "lacks append() of layers 0 to 1"}, [&] {
    batch.begin_step(encoder, {{a, 1}});
  });
  fails({"kv_batch.attend", "layer 0 was not appended"},
        [&] { batch.attend(encoder, 0, {.q = k, .out = out}); });
  append(0);
  batch.attend(encoder, 0, {.q = k, .out = out});
  fails({"kv_batch.append", "layer 0 was appended in this step already"}, [&] { append(0); });
  fails({"kv_batch.begin_step", "lacks append() of layer 1"}, [&] {
    batch.begin_step(encoder, {{a, 1}});
  });
  fails({"kv_batch.append", "2 layers, got layer 2"}, [&] { append(2); });
  for (const KvSequence* const s : {&a, &b}) {
    fails({"kv_sequence.fork", "lacks append() of layer 1"}, [&] { (void)s->fork(); });
    fails({"kv_pool.publish", "lacks append() of layer 1"}, [&] { server.pool.publish(*s, {}); });
  }
  fails({"kv_sequence.rollback", "lacks append() of layer 1"}, [&] { a.rollback(1); });
  fails({"kv_sequence.clear", "lacks append() of layer 1"}, [&] { b.clear(); });
  fails({"kv_batch.end_step", "lacks append() of layer 1"}, [&] { batch.end_step(); });
  fails({"kv_batch.record", "lacks append() of layer 1"}, [&] { batch.record(); });
  KvBatch second(server.pool, {});
  fails({"kv_batch.begin_step", "lacks append() of layer 1"}, [&] {
    second.begin_step(encoder, {{b, 1}});
  });
  append(1);
  const KvSequence fork = a.fork();
  a.rollback(1);
  batch.begin_step(encoder, {{a, 1}});
}

TEST_F(KvBatchTest, RowsOfTheStep) {
  batch.begin_step(encoder, {{a, 5}});
  const Tensor few = k.slice(0, 0, 4), many = device.tensor(DType::f32, {21, 1, 16});
  fails({"kv_batch.append", "must have 5 (the step's tokens)"},
        [&] { batch.append(encoder, 0, few, few); });
  fails({"kv_batch.append", "to 20 (max_tokens) rows"},
        [&] { batch.append(encoder, 0, many, many); });
  fails({"kv_batch.append: k is undefined"}, [&] { batch.append(encoder, 0, {}, few); });
  const Tensor flat = device.tensor(DType::f32, {5, 16});
  fails({"kv_batch.append: k must have rank 3, got [5, 16]"},
        [&] { batch.append(encoder, 0, flat, few); });
  fails({"kv_batch.positions", "max_tokens 20"}, [&] { batch.positions(21); });
  fails({"kv_write"}, [&] { batch.append(encoder, 0, k, few); });
  append(0);
  fails({"kv_batch.attend", "must have 5 (the step's tokens)"},
        [&] { batch.attend(encoder, 0, {.q = few, .out = few}); });
  Tensor scratch = device.tensor(DType::u8, {64});
  fails({"kv_batch.attend", "scratch must be an undefined tensor", "u8 [64]"},
        [&] { batch.attend(encoder, 0, {.q = k, .out = k, .scratch = &scratch}); });
  fails({"kv_batch.attend", "tree_mask"},
        [&] { batch.attend(encoder, 0, {.q = k, .out = out}, {.mask = {.tree_mask = k}}); });
  fails({"kv_batch.attend", "out"}, [&] { batch.attend(encoder, 0, {.q = k, .out = few}); });
}

TEST_F(KvBatchTest, AWindowIsAtMostTheLayers) {
  KvPoolOptions options = small_pool();
  options.layers = {{.k = KvFormat::f16, .v = KvFormat::f16, .window = 4}};
  const KvPool pool(device, options);
  KvBatch windowed(pool, {});
  KvSequence sequence = pool.sequence();
  windowed.begin_step(encoder, {{sequence, 20}});
  windowed.append(encoder, 0, k, k);
  windowed.attend(encoder, 0, {.q = k, .out = out}, {.mask = {.window = 3}});
  fails({"kv_batch.attend", "layer 0 keeps a window of 4", "5"},
        [&] { windowed.attend(encoder, 0, {.q = k, .out = out}, {.mask = {.window = 5}}); });
}

// This is refused of every layer, whatever kinds of pages it has, with a basis and without.
TEST_F(KvBatchTest, WhatIsWrittenSharesNoMemoryWithWhatIsRead) {
  Tensor one = device.tensor(DType::f32, {1, 16, 16});
  for (uint64_t i = 0; i < 16; ++i) one.data<float>()[i * 17] = 1;
  const KvCalibration identity{.transform = {.matrix = one, .inverse = one}};
  KvLayer plain{.k = KvFormat::tq8, .v = KvFormat::tq4}, tail = plain, sink_tokens = plain,
                                                         both = plain;
  tail.tail = both.tail = 8;
  sink_tokens.sink_tokens = both.sink_tokens = 4;
  const Tensor lse = device.tensor(DType::f32, {20, 1});
  const auto one_of = [](const Tensor& t) { return t.reshape({t.elements()}).slice(0, 3, 1); };
  const Tensor in_out = one_of(out), in_lse = one_of(lse);
  for (const KvLayer& layer : {plain, tail, sink_tokens, both}) {
    for (const bool has_transform : {false, true}) {
      KvPoolOptions options = small_pool();
      options.layers = {layer};
      if (has_transform) options.calibration = {{identity, identity}};
      const KvPool pool(device, options);
      KvBatch with(pool, {});
      KvSequence sequence = pool.sequence();
      with.begin_step(encoder, {{sequence, 20}});
      with.append(encoder, 0, k, k);
      const auto shares = [&](const std::string& what, const AttendInputs& in,
                              const AttentionMask& mask = {}) {
        SCOPED_TRACE(
            join(what, " with a tail of ", layer.tail, " and sink_tokens of ", layer.sink_tokens));
        fails({"kv_batch.attend", what}, [&] { with.attend(encoder, 0, in, {.mask = mask}); });
      };
      shares("out shares memory", {.q = k, .out = k});
      shares("out shares memory", {.q = k, .out = out}, {.sink_logits = in_out});
      shares("out shares memory", {.q = k, .out = out}, {.alibi_slopes = in_out});
      shares("lse shares memory", {.q = k, .out = out, .lse = lse}, {.sink_logits = in_lse});
      shares("lse shares memory", {.q = k, .out = out, .lse = lse}, {.alibi_slopes = in_lse});
      shares("lse shares memory",
             {.q = k, .out = out, .lse = k.reshape({320}).slice(0, 5, 20).reshape({20, 1})});
      for (const KvPoolState::Store* const store : stores_of(Internals::state(pool).layers[0])) {
        const auto at = reinterpret_cast<float*>(store->pages.bytes.address());
        shares("out shares memory", {.q = k, .out = device.wrap(at, DType::f32, {20, 1, 16})});
        shares("lse shares memory",
               {.q = k, .out = out, .lse = device.wrap(at, DType::f32, {20, 1})});
      }
      with.attend(encoder, 0, {.q = k, .out = out, .lse = lse});
      encoder.submit().wait();
    }
  }
}

TEST_F(KvBatchTest, RecordingForAGraph) {
  batch.record();
  EXPECT_EQ(batch.positions().shape(), Dims({20}));
  fails({"kv_batch.record", "recording is open"}, [&] { batch.record(); });
  fails({"kv_batch.begin_step", "recording is open"}, [&] { batch.begin_step(encoder, {{a, 1}}); });
  fails({"kv_batch.end_step", "recording lacks append() of layers 0 to 1"},
        [&] { batch.end_step(); });
  append(0);
  append(1);
  batch.end_step();
  const Graph graph = encoder.instantiate();
  for (uint64_t i = 1; i <= 3; ++i) {
    batch.begin_step(encoder, {{a, 2}, {b, 1}});
    encoder.submit();
    fails({"kv_sequence.fork", "end_step()"}, [&] { (void)a.fork(); });
    graph.replay().wait();
    batch.end_step();
    EXPECT_EQ(a.fork().length(), 2 * i);
  }
  fails({"kv_batch.end_step", "no step was begun"}, [&] { batch.end_step(); });
}

TEST_F(KvBatchTest, AStepCannotEndWithoutItsLayers) {
  batch.begin_step(encoder, {{a, 1}});
  fails({"kv_batch.end_step", "lacks append() of layers 0 to 1"}, [&] { batch.end_step(); });
}

// Nor one that no graph has appended whole, though one was recorded.
TEST_F(KvBatchTest, AStepEndsWhenItsLayersWereReplayed) {
  batch.record();
  append(0);
  const Graph lower = encoder.instantiate();
  append(1);
  const Graph upper = encoder.instantiate();
  batch.end_step();
  for (int i = 0; i < 2; ++i) {
    batch.begin_step(encoder, {{a, 1}});
    encoder.submit();
    fails({"kv_batch.end_step", "lacks append() of layers 0 to 1"}, [&] { batch.end_step(); });
    lower.replay().wait();
    fails({"kv_batch.end_step", "lacks append() of layer 1"}, [&] { batch.end_step(); });
    upper.replay().wait();
    batch.end_step();
  }
  EXPECT_EQ(a.fork().length(), 2u);
}

TEST_F(KvBatchTest, AGraphThatIsNotSeen) {
  const auto end_captured = [&] { batch.end_step(KvStepEnd::captured); };
  fails({"kv_batch.end_step", "begin_step() comes first"}, end_captured);
  batch.begin_step(encoder, {{a, 1}});
  fails({"kv_batch.end_step", "not submitted"}, end_captured);
  encoder.submit();
  fails({"kv_batch.end_step", "lacks append() of layers 0 to 1"}, [&] { batch.end_step(); });
  end_captured();
  fails({"kv_batch.end_step", "no step waits for a captured graph", "begin_step() comes first"},
        end_captured);
  EXPECT_EQ(a.fork().length(), 1u);
}

// The tokens stay; what the windows let go of for the step is gone.
TEST_F(KvBatchTest, CancelWithAWindow) {
  KvPoolOptions options = small_pool();
  options.layers = {{.k = KvFormat::f16, .v = KvFormat::f16, .window = 20}};
  const KvPool pool(device, options);
  KvBatch windowed(pool, {});
  KvSequence sequence = pool.sequence();
  for (int i = 0; i < 2; ++i) {
    windowed.begin_step(encoder, {{sequence, 20}});
    windowed.append(encoder, 0, k, k);
    encoder.submit().wait();
  }
  sequence.fork().rollback(20);
  windowed.begin_step(encoder, {{sequence, 1}});
  windowed.rollback();
  encoder.clear();
  EXPECT_EQ(sequence.length(), 40u);
  EXPECT_REFUSED(("kv_sequence.rollback", "window 20 no longer have key 1"), sequence.rollback(20));
  windowed.begin_step(encoder, {{sequence, 1}});
}

TEST_F(KvBatchTest, BeginIsNotForGraphs) {
  batch.begin_step(encoder, {{a, 1}});
  EXPECT_REFUSED(("encoder.instantiate", "words_write"), encoder.instantiate());
}

TEST_F(KvBatchTest, CancelTakesAStepBack) {
  step(a, 12);
  KvSequence fork = a.fork();
  const std::vector<uint64_t> before = counts(server.pool);
  batch.begin_step(encoder, {{a, 9}, {b, 9}});
  append(0);
  batch.rollback();
  encoder.clear();
  EXPECT_EQ(counts(server.pool), before);
  EXPECT_EQ(a.length(), 12u);
  EXPECT_EQ(b.length(), 0u);
  fails({"kv_batch.rollback", "no step was begun"}, [&] { batch.rollback(); });
  step(a, 1);
  fails({"kv_batch.rollback", "complete"}, [&] { batch.rollback(); });
  batch.record();
  append(0);
  batch.rollback();
  encoder.clear();
  step(a, 1);
}

TEST_F(KvBatchTest, ASequenceDroppedInItsStepIsFreedAfterIt) {
  {
    KvSequence gone = server.pool.sequence();
    batch.begin_step(encoder, {{gone, 3}});
    append(0);
  }
  EXPECT_EQ(server.pool.describe().groups[0].used, 1u);
  append(1);
  EXPECT_EQ(server.pool.describe().groups[0].used, 0u);
}

TEST_F(KvBatchTest, ABatchThatGoesCancelsItsStep) {
  {
    KvBatch gone(server.pool, {});
    gone.begin_step(encoder, {{a, 3}});
    EXPECT_EQ(a.length(), 3u);
  }
  EXPECT_EQ(a.length(), 0u);
  (void)a.fork();
}

}  // namespace
}  // namespace gyre::test
