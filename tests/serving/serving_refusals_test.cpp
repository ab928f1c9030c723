// What a scheduler does about a refusal follows from its code: out_of_memory is worth another try
// when others have left, invalid_argument is not. And messages say what helps.
#include "cache/snapshot_fixture.h"
#include "serving/serving_fixture.h"

namespace gyre::test {
namespace {

KvPoolOptions window_pool(uint64_t window, uint64_t pages = 32) {
  KvPoolOptions options = small_pool(pages);
  options.layers = {{.k = KvFormat::f16, .v = KvFormat::f16},
                    {.k = KvFormat::f16, .v = KvFormat::f16, .window = window}};
  return options;
}

class ServingRefusals : public testing::Test {
 public:
  Device device = Device::open("cpu", {.threads = 1});
  Folder folder;
};

TEST_F(ServingRefusals, AStepThatNeverFitsIsInvalid) {
  KvPoolOptions options = window_pool(8);
  options.sequences = 1;
  options.step_tokens = 8;  // 3 pages of the window
  Server server(device, options, {.max_sequences = 4, .max_tokens = 64});
  Talk a = server.talk(), b = server.talk();
  EXPECT_REFUSED(("kv_batch.begin_step", "can never fit", "0 tokens and 40 more",
                  "5 pages of window 8", "the pool has 3"),
                 server.fill(a, some_tokens(40, 1)));
  server.fill(a, some_tokens(16, 1));
  const auto two_pages = [&] { server.fill(b, some_tokens(16, 2)); };
  EXPECT_TRUE(
      throws_error(ErrorCode::out_of_memory, {"1 pages are missing", "window 8"}, two_pages));
  a = server.talk();
  two_pages();
}

TEST_F(ServingRefusals, AFileThatNeverFitsIsInvalid) {
  Server from(device, small_pool(8)), small(device, small_pool(4)), busy(device, small_pool(5));
  Talk talk = from.talk();
  from.fill(talk, some_tokens(40, 1));
  from.pool.save(talk.sequence, folder / "sequence");
  from.pool.publish(talk.sequence, talk.tokens);
  from.pool.save_prefixes(folder / "prefixes");
  for (const char* const file : {"sequence", "prefixes"}) {
    const auto load = [&](const KvPool& to) {
      if (file == std::string("sequence")) {
        (void)to.load(folder / file);
      } else {
        to.load_prefixes(folder / file);
      }
    };
    EXPECT_REFUSED((file, "can never fit", "5 pages", "has 4"), load(small.pool));
    Talk other = busy.talk();
    busy.fill(other, some_tokens(1, 1));
    EXPECT_ERROR(out_of_memory, (file, "1 pages are missing"), load(busy.pool));
    other = busy.talk();
    load(busy.pool);
  }
}

TEST_F(ServingRefusals, AnImportThatNeverFitsIsInvalid) {
  Server from(device, small_pool(8)), to(device, small_pool(2));
  Talk talk = from.talk();
  from.fill(talk, some_tokens(24, 1));
  KvSequence made = to.pool.sequence();
  for (uint64_t page = 0; page < 2; ++page)
    to.pool.import_page(made, from.pool.export_page(talk.sequence, page));
  const std::vector<std::byte> third = from.pool.export_page(talk.sequence, 2);
  EXPECT_REFUSED(("kv_pool.import_page", "can never fit", "3 pages of all keys", "has 2"),
                 to.pool.import_page(made, third));
  EXPECT_EQ(made.length(), 16u);
}

// A query sees its own key alone, so a rolled-back sequence has no page of the window that it goes
// on in.
TEST_F(ServingRefusals, AWindowOfOneKeyIsSavedAndLoadedAfterRollback) {
  Server from(device, window_pool(1)), to(device, window_pool(1));
  Talk talk = from.talk();
  from.fill(talk, some_tokens(20, 1));
  from.fill(talk, some_tokens(1, 2));
  talk.rollback(11);  // into page 1, which the window has given up
  from.pool.save(talk.sequence, folder / "sequence");
  Talk loaded{to.pool.load(folder / "sequence"), talk.tokens};
  to.pool.save(loaded.sequence, folder / "again");
  EXPECT_EQ(bytes_of_file(folder / "again"), bytes_of_file(folder / "sequence"));
  const std::vector<int32_t> next = some_tokens(3, 3);
  EXPECT_EQ(to.run(loaded, next), from.run(talk, next));
}

TEST_F(ServingRefusals, APartlyImportedSequenceIsNotSaved) {
  Server from(device, window_pool(8)), to(device, window_pool(8));
  Talk talk = from.talk();
  from.fill(talk, some_tokens(30, 1));
  from.fill(talk, some_tokens(1, 2));  // the window has pages 2 and 3
  KvSequence made = to.pool.sequence();
  for (uint64_t page = 0; page < 4; ++page) {
    to.pool.import_page(made, from.pool.export_page(talk.sequence, page));
    if (page == 1) {
      EXPECT_REFUSED(("kv_pool.save", "window 8 no longer have key 9"),
                     to.pool.save(made, folder / "part"));
    }
  }
  to.pool.save(made, folder / "whole");
  EXPECT_EQ(to.pool.load(folder / "whole").length(), 31u);
}

// The copy of a shared page was in the list that was dropped. Where a window has lost what the
// sequence would see at the beginning of that page, rolling back cannot help.
TEST_F(ServingRefusals, ADroppedForkIsToldWhatHelps) {
  for (const uint64_t window : {4u, 0u}) {
    Server server(device, window_pool(window));
    Talk a = server.talk();
    server.fill(a, some_tokens(20, 1));
    server.fill(a, some_tokens(1, 2));  // the window has page 2 alone
    Talk fork = a.fork();
    const std::vector<int32_t> next = some_tokens(1, 3);
    const TalkStep step{fork, next};
    server.begin_step(std::span(&step, 1));
    for (uint64_t layer = 0; layer < 2; ++layer) server.append(std::span(&step, 1), layer);
    server.encoder.clear();
    const char* const advice = window != 0 ? "clear() the sequence" : "rollback() at least 6";
    const auto go_on = [&] { server.begin_step(std::span(&step, 1)); };
    EXPECT_TRUE(refused({"kv_batch.begin_step", "tokens from 16 on", "dropped", advice}, go_on));
    if (window != 0) {
      EXPECT_REFUSED(("window 4"), fork.sequence.rollback(6));
      fork.sequence.clear();
    } else {
      fork.sequence.rollback(6);
    }
    go_on();
    server.batch.rollback();
  }
}

TEST_F(ServingRefusals, MessagesNameTheOtherBatch) {
  Server server(device, small_pool());
  KvBatch other(server.pool);
  Talk talk = server.talk();
  other.begin_step(server.encoder, {{talk.sequence, 1}});
  EXPECT_REFUSED(
      ("kv_batch.begin_step", "in another batch's step", "lacks append() of layers 0 to 1"),
      server.batch.begin_step(server.encoder, {{talk.sequence, 1}}));
}

TEST_F(ServingRefusals, MessagesSayHowManyRowsARecordingTakes) {
  Server server(device, small_pool(), {.max_sequences = 4, .max_tokens = 16});
  server.batch.record();
  const Tensor rows = device.tensor(DType::f32, {17, 1, 16});
  EXPECT_REFUSED(("kv_batch.append: k must have 1 (in a recording) to 16 (max_tokens) rows"),
                 server.batch.append(server.encoder, 0, rows, rows));
}

TEST_F(ServingRefusals, MessagesNameWhatAGraphCannotRepeat) {
  Server server(device, small_pool());
  Talk talk = server.talk();
  const std::vector<std::string> parts = {"encoder.instantiate", "begins", "step",
                                          "submit it before each replay"};
  server.batch.begin_step(server.encoder, {{talk.sequence, 1}});
  EXPECT_TRUE(refused(parts, [&] { server.encoder.instantiate(); }));
  server.encoder.clear();
  KvCache cache(device, {.kv_heads = 1, .head_dim = 16, .capacity = 8});
  cache.begin_step(server.encoder, 1);
  EXPECT_TRUE(refused(parts, [&] { server.encoder.instantiate(); }));
}

TEST_F(ServingRefusals, MessagesNameTheDeviceOfTheCacheAndThePool) {
  Server server(device, small_pool());
  Talk talk = server.talk();
  Encoder elsewhere(Device::open("cpu", {.threads = 1}));
  KvCache cache(device, {.kv_heads = 1, .head_dim = 16, .capacity = 8});
  EXPECT_REFUSED(("kv_cache.begin_step: the encoder records for another device"),
                 cache.begin_step(elsewhere, 1));
  server.batch.begin_step(server.encoder, {{talk.sequence, 1}});
  server.encoder.submit().wait();
  const Tensor row = elsewhere.device().tensor(DType::f32, {1, 1, 16});
  EXPECT_REFUSED(("kv_batch.append: the encoder records for another device"),
                 server.batch.append(elsewhere, 0, row, row));
}

TEST_F(ServingRefusals, MessagesSayThatAPathIsEmpty) {
  Server server(device, small_pool());
  KvCache cache(device, {.kv_heads = 1, .head_dim = 16, .capacity = 8});
  EXPECT_REFUSED(("kv_cache.save: the path is empty"), cache.save(""));
  EXPECT_REFUSED(("kv_cache.load: the path is empty"), cache.load(""));
  EXPECT_REFUSED(("kv_pool.save: the path is empty"), server.pool.save(server.pool.sequence(), ""));
}

}  // namespace
}  // namespace gyre::test
