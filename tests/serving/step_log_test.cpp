// The steps of a pool: one encoder at a time, and lists that are dropped leave the next step as if
// they had never been.
#include <filesystem>
#include <optional>

#include "serving/steps_fixture.h"

namespace gyre::test {
namespace {

std::string temporary(const char* name) {
  return (std::filesystem::temp_directory_path() / name).string();
}

using StepLogTest = StepsTest;

// A page that one step gives back may be one that the next takes: lists would have to run in order.
TEST_P(StepLogTest, OneEncoderAtATime) {
  const KvPoolOptions& o = GetParam();
  const Tensor q = device.tensor(DType::f32, {1, o.kv_heads, o.head_dim});
  const auto expect_refused = [&](const char* op, const auto& call) {
    EXPECT_TRUE(refused({op, "another encoder has calls on this kv_pool that are not submitted",
                         "submit() or clear() that one first"},
                        call));
    EXPECT_EQ(second.size(), 0u);
  };
  one.begin_step(first, {{a, 1}});
  expect_refused("kv_batch.begin_step", [&] { two.begin_step(second, {{b, 1}}); });
  expect_refused("kv_batch.append", [&] { append(one, second, 0, 1); });
  append(one, first, 0, 1);
  expect_refused("kv_batch.attend", [&] {
    one.attend(second, 0, {.q = q, .out = device.tensor(DType::f32, q.shape())});
  });
  EXPECT_EQ(b.length(), 0u);
  step(two, first, b);  // another batch, the same encoder
  for (uint64_t i = 1; i < layers; ++i) append(one, first, i, 1);
  first.submit().wait();
  step(two, second, b);
  second.clear();  // a list that is dropped does not hold the pool, nor does a graph
  b.rollback(1);
  one.record();
  append_all(one, first, 1);
  expect_refused("kv_batch.begin_step", [&] { two.begin_step(second, {{b, 1}}); });
  const Graph graph = first.instantiate();
  one.end_step();
  step(two, second, b);
  second.submit().wait();
}

TEST_P(StepLogTest, WhatIsNotSubmittedIsNotSaved) {
  const std::string path = temporary("gyre_step_log_test.pool");
  const std::vector<int32_t> tokens = some_tokens(40, 1);
  step(one, first, a, 40);
  EXPECT_REFUSED(("kv_pool.save", "tokens from 0 on", "not submitted; submit() comes first"),
                 pool.save(a, path));
  EXPECT_REFUSED(("kv_pool.export_page", "not submitted"), pool.export_page(a, 0));
  EXPECT_REFUSED(("kv_pool.publish", "not submitted"), pool.publish(a, tokens));
  KvSequence fork = a.fork();
  EXPECT_REFUSED(("kv_pool.save", "not submitted"), pool.save(fork, path));
  pool.save(b, path);  // nothing of it is recorded
  EXPECT_REFUSED(("kv_pool.load", "recorded in an encoder"), pool.load(path));
  pool.save_prefixes(path);
  EXPECT_REFUSED(("kv_pool.load_prefixes", "recorded in an encoder"), pool.load_prefixes(path));
  first.submit().wait();
  pool.publish(a, tokens);
  pool.save(fork, path);
  const std::vector<std::byte> page = pool.export_page(a, 0);
  two.begin_step(second, {{a, 1}});
  EXPECT_REFUSED(("kv_pool.import_page", "recorded in an encoder"), pool.import_page(b, page));
  two.rollback();
  second.clear();
  pool.import_page(b, page);
  EXPECT_EQ(pool.load(path).length(), 40u);
  std::filesystem::remove(path);
}

TEST_P(StepLogTest, WhatWasDroppedIsTruncated) {
  run_step(one, a, 8);
  step(one, first, a, 3);
  first.clear();
  const auto all_refuse = [&](KvSequence& sequence) {
    EXPECT_REFUSED(("kv_batch.begin_step", "from 8 on", "dropped", "there are 11"),
                   one.begin_step(first, {{sequence, 1}}));
    EXPECT_REFUSED(("kv_sequence.fork", "dropped"), (void)sequence.fork());
    EXPECT_REFUSED(("kv_pool.publish", "dropped"), pool.publish(sequence, {}));
    EXPECT_REFUSED(("kv_pool.export_page", "dropped"), pool.export_page(sequence, 0));
  };
  all_refuse(a);
  a.rollback(1);
  EXPECT_REFUSED(("kv_batch.begin_step", "there are 10"), one.begin_step(first, {{a, 1}}));
  a.rollback(2);
  KvSequence fork = a.fork();
  run_step(one, a);
}

// Forks of a step that is not submitted share its fate.
TEST_P(StepLogTest, ForksOfADroppedStep) {
  step(one, first, a, 3);
  KvSequence fork = a.fork();
  step(one, first, a);
  first.clear();
  EXPECT_REFUSED(("from 0 on"), one.begin_step(first, {{fork, 1}}));
  EXPECT_REFUSED(("from 0 on"), one.begin_step(first, {{a, 1}}));
  fork.clear();
  a.clear();
  one.begin_step(first, {{fork, 1}, {a, 1}});
}

// A cancelled step was never there, so nothing follows it.
TEST_P(StepLogTest, ACancelledStepInAList) {
  one.begin_step(first, {{a, 1}});
  step(two, first, b);
  one.rollback();
  first.submit().wait();
  run_step(one, a);
  pool.publish(b, {});
}

// The device's tables still are those of the step before.
TEST_P(StepLogTest, ADroppedStepWasNeverThere) {
  const std::vector<int32_t> tokens = some_tokens(60, 3);
  Server plain(device, GetParam());
  Talk talk = server.talk(), expected = plain.talk(), other = server.talk(), fresh = plain.talk();
  const auto part = [&](size_t from, size_t count) {
    return std::span(tokens).subspan(from, count);
  };
  plain.run(expected, part(0, 20), true);
  server.run(talk, part(0, 20), true);
  for (int i = 0; i < 2; ++i) {
    const std::vector<TalkStep> lost = {{other, part(0, 9)}, {talk, part(20, 13)}};
    server.begin_step(lost);
    for (uint64_t layer = 0; layer < layers; ++layer) server.append(lost, layer);
    first.clear();
    talk.sequence.rollback(13);
    other.sequence.clear();
  }
  EXPECT_EQ(server.run(talk, part(20, 13)), plain.run(expected, part(20, 13)));
  EXPECT_EQ(server.run(other, part(0, 9), true), plain.run(fresh, part(0, 9), true));
}

TEST_P(StepLogTest, AGraphRunsInAStepOnly) {
  one.record();
  append_all(one, first, 1);
  one.end_step();
  EXPECT_REFUSED(("encoder.submit", "for any step", "none is begun"), first.submit());
  const Graph graph = first.instantiate();
  const auto replay_refused = [&](const char* why) {
    EXPECT_REFUSED(("graph.replay", "kv_batch.append", why), graph.replay());
  };
  replay_refused("none is begun: begin_step() comes first");
  one.begin_step(first, {{a, 1}});
  replay_refused("recorded and not submitted: submit() that first");
  first.submit();
  graph.replay().wait();
  graph.replay().wait();  // writes the same once more
  one.end_step();
  replay_refused("none is begun");  // its pages may be somebody else's by now
  one.begin_step(first, {{a, 1}});
  one.rollback();
  first.submit();
  replay_refused("none is begun");
}

// Recorded in a step, kept as a graph: that step's alone.
TEST_P(StepLogTest, AStepInAGraph) {
  begin_and_submit(1);
  append_all(one, first, 1);
  const Graph graph = first.instantiate();
  EXPECT_REFUSED(("kv_pool.publish", "not replayed"), pool.publish(a, {}));
  graph.replay().wait();
  pool.publish(a, {});
  run_step(one, a);
  EXPECT_REFUSED(("graph.replay", "over"), graph.replay());
}

// Until it is replayed its tokens are not there, and once its pages may be others' it is not
// replayed again.
TEST_P(StepLogTest, AStepInAGraphThatDoesNotRun) {
  const std::vector<std::string> words = {"from 0 on are in a graph that was not replayed"};
  begin_and_submit(1);
  std::vector<Graph> graphs;
  for (uint64_t i = 0; i < layers; ++i) {
    append(one, second, i, 1);
    if (i + 2 >= layers) graphs.push_back(second.instantiate());  // the last one by itself
  }
  for (Graph& graph : graphs) {
    EXPECT_TRUE(refused(words, [&] { one.begin_step(first, {{a, 1}}); }));
    EXPECT_TRUE(refused(words, [&] { (void)a.fork(); }));
    EXPECT_TRUE(refused(words, [&] { pool.publish(a, {}); }));
    graph.replay().wait();
    graph.replay().wait();  // writes the same once more
  }
  pool.publish(a, {});
  a.clear();
  run_step(two, b);
  for (Graph& graph : graphs) {
    EXPECT_REFUSED(("graph.replay", "another step was begun"), graph.replay());
  }
}

TEST_P(StepLogTest, AnAttendBeforeTheAppendOfItsLayer) {
  const KvPoolOptions& o = GetParam();
  const Tensor q = device.tensor(DType::f32, {1, o.kv_heads, o.head_dim});
  const AttendInputs in{.q = q, .out = device.tensor(DType::f32, q.shape())};
  const auto expect_refused = [&](const auto& run) {
    EXPECT_TRUE(refused({"kv_batch.attend of layer 0 comes before the step's append()"}, run));
  };
  begin_and_submit(1);
  append(one, first, 0, 1);
  first.clear();
  EXPECT_REFUSED(("kv_batch.attend", "layer 0 was not appended"), one.attend(first, 0, in));
  append_all(one, first, 1);  // again
  const Graph once = first.instantiate();
  one.attend(second, 0, in);
  expect_refused([&] { second.submit(); });
  once.replay();
  second.submit().wait();
  one.record();
  append_all(one, first, 1);
  const Graph appends = first.instantiate();
  one.attend(second, 0, in);
  const Graph attends = second.instantiate();
  one.end_step();
  begin_and_submit(1);
  expect_refused([&] { attends.replay(); });
  appends.replay();
  attends.replay().wait();
  one.end_step();
}

TEST_P(StepLogTest, ARecordingThatDoesNotFitTheStep) {
  one.record();
  append_all(one, first, 2);
  const Graph graph = first.instantiate();
  one.end_step();
  begin_and_submit(3);
  EXPECT_REFUSED(("graph.replay", "recorded with 2 rows, the step has 3 tokens"), graph.replay());
  one.rollback();
  begin_and_submit(1);
  graph.replay().wait();
  one.end_step();
  one.record();  // its own list may be captured, an older graph may not run
  EXPECT_REFUSED(("graph.replay", "none is begun"), graph.replay());
  append_all(one, first, 1);
  one.end_step();
  first.clear();
}

// A fork's tokens in the page that it shares are in its own once the copy has run.
TEST_P(StepLogTest, ADroppedStepOfAFork) {
  const std::vector<int32_t> tokens = some_tokens(30, 3);
  const auto part = [&](size_t from, size_t count) {
    return std::span(tokens).subspan(from, count);
  };
  Server plain(device, GetParam());
  Talk expected = plain.talk(), origin = server.talk();
  plain.run(expected, part(0, 13), true);
  server.run(origin, part(0, 13), true);
  KvSequence fork = origin.sequence.fork();
  step(one, first, fork);
  fork.rollback(1);
  EXPECT_REFUSED(("kv_pool.export_page", "from 8 on", "not submitted"), pool.export_page(fork, 0));
  first.clear();
  EXPECT_REFUSED(("kv_batch.begin_step", "from 8 on", "dropped"),
                 one.begin_step(first, {{fork, 1}}));
  fork.rollback(5);
  run_step(one, fork);
  EXPECT_EQ(server.run(origin, part(13, 9)), plain.run(expected, part(13, 9)));
}

TEST_P(StepLogTest, ListsOutliveTheirPool) {
  std::optional<Encoder> left;
  {
    const KvPool gone(device, GetParam());
    KvBatch batch(gone, {});
    KvSequence sequence = gone.sequence();
    left.emplace(device);
    step(batch, *left, sequence);
  }
  left->submit().wait();
}

// Lists that a batch recorded run without it, graphs for any step do not.
TEST_P(StepLogTest, ABatchThatIsGone) {
  auto gone = std::make_unique<KvBatch>(pool, KvBatchOptions{.max_sequences = 1, .max_tokens = 8});
  gone->record();
  append_all(*gone, first, 1);
  gone->end_step();
  const Graph graph = first.instantiate();
  step(*gone, first, a);
  gone.reset();
  first.submit().wait();
  EXPECT_EQ(a.length(), 1u);
  EXPECT_REFUSED(("graph.replay", "none is begun"), graph.replay());
  run_step(one, a);
}

// A graph of one step is closed when a sequence of that step gives its pages back.
TEST_P(StepLogTest, AStepInAGraphWhoseSequenceWasTruncated) {
  begin_and_submit(1);
  append_all(one, first, 1);
  const Graph graph = first.instantiate();
  a.clear();
  EXPECT_REFUSED(("graph.replay", "a sequence rolled back since"), graph.replay());
}

INSTANTIATE_TEST_SUITE_P(Pools, StepLogTest,
                         testing::Values(small_pool(), mixed_pool(), layered_pool()));

}  // namespace
}  // namespace gyre::test
