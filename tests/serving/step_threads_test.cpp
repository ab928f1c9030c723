// Two threads on one pool: each call works as a whole or is refused.
#include <filesystem>
#include <functional>
#include <thread>

#include "runtime/internals.h"
#include "serving/pool_state.h"
#include "serving/steps_fixture.h"
#include "steps/log.h"

namespace gyre::test {
namespace {

using StepThreadsTest = StepsTest;

TEST_P(StepThreadsTest, TwoThreadsInOnePool) {
  const auto work = [&](uint32_t seed) {
    KvBatch batch(pool, {.max_sequences = 4, .max_tokens = 40});
    Encoder encoder(device);
    const std::vector<int32_t> tokens = some_tokens(17, seed % 2);
    for (int i = 0; i < 300; ++i) {
      try {
        KvSequence sequence = pool.match(tokens);
        step(batch, encoder, sequence, 17 - sequence.length());
        encoder.submit().wait();
        pool.publish(sequence, tokens);
        const KvSequence fork = sequence.fork();
      } catch (const Error&) {
        encoder.clear();
        EXPECT_NO_THROW(batch = KvBatch(pool, {.max_sequences = 4, .max_tokens = 40}));
      }
    }
  };
  std::thread other(work, 1);
  work(2);
  other.join();
  pool.forget();
  expect_no_page_used(pool);
}

// Each call that reads or changes pages, while this thread is inside one.
TEST_P(StepThreadsTest, EveryCallRefusesASecondThread) {
  const std::string path =
      (std::filesystem::temp_directory_path() / "gyre_second_thread.pool").string();
  const std::vector<int32_t> tokens = some_tokens(16, 1);
  run_step(one, a, 16);
  pool.publish(a, tokens);
  pool.save(a, path);
  const std::vector<std::byte> page = pool.export_page(a, 0);
  const KvLayer& l = pool.layers()[0];
  const Tensor k = device.tensor(DType::f32, {1, l.kv_heads, l.head_dim});
  const Tensor v = device.tensor(DType::f32, {1, l.kv_heads, l.v_head_dim});
  const AttendInputs attend{.q = k, .out = device.tensor(DType::f32, k.shape())};
  const RopeAppendInputs rope{.q = k, .q_out = k, .k = k, .v = v};
  const std::vector<std::pair<const char*, std::function<void()>>> calls = {
      {"kv_pool.describe", [&] { (void)pool.describe(); }},
      {"kv_pool.sequence", [&] { (void)pool.sequence(); }},
      {"kv_pool.publish", [&] { pool.publish(a, tokens); }},
      {"kv_pool.match", [&] { (void)pool.match(tokens); }},
      {"kv_pool.forget", [&] { pool.forget(); }},
      {"kv_pool.export_page", [&] { (void)pool.export_page(a, 0); }},
      {"kv_pool.import_page", [&] { pool.import_page(b, page); }},
      {"kv_pool.save", [&] { pool.save(a, path); }},
      {"kv_pool.load", [&] { (void)pool.load(path); }},
      {"kv_pool.save_prefixes", [&] { pool.save_prefixes(path); }},
      {"kv_pool.load_prefixes", [&] { (void)pool.load_prefixes(path); }},
      {"kv_sequence.fork", [&] { (void)a.fork(); }},
      {"kv_sequence.rollback", [&] { a.rollback(1); }},
      {"kv_sequence.clear", [&] { a.clear(); }},
      {"kv_batch.begin_step",
       [&] {
         two.begin_step(second, {{b, 1}});
       }},
      {"kv_batch.append", [&] { two.append(second, 0, k, v); }},
      {"kv_batch.rope_append", [&] { two.rope_append(second, 0, rope); }},
      {"kv_batch.attend", [&] { two.attend(second, 0, attend); }},
      {"kv_batch.record", [&] { two.record(); }},
      {"kv_batch.end_step", [&] { two.end_step(); }},
      {"kv_batch.rollback", [&] { two.rollback(); }},
  };
  const uint64_t sequences = pool.describe().sequences;
  std::thread last;
  {
    const StepsUse use(*Internals::state(pool).steps, "test");
    std::thread([&] {
      for (const auto& [op, call] : calls)
        EXPECT_TRUE(refused({op, "the kv_pool is in use by another thread"}, call)) << op;
    }).join();
    EXPECT_EQ(pool.describe().sequences, sequences);  // calls of one thread nest
    last = std::thread([&] { const KvSequence dropped = std::move(b); });  // waits
  }
  last.join();
  EXPECT_EQ(pool.describe().sequences, sequences - 1);
  EXPECT_EQ(second.size(), 0u);
  EXPECT_EQ(a.length(), 16u);
  std::filesystem::remove(path);
}

INSTANTIATE_TEST_SUITE_P(Pools, StepThreadsTest,
                         testing::Values(small_pool(), mixed_pool(), layered_pool()));

}  // namespace
}  // namespace gyre::test
