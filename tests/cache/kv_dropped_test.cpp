// Lists that are dropped: what was recorded in them is not there, and the cache knows.
#include "cache/kv_protocol_fixture.h"

namespace gyre::test {
namespace {

// What a cleared or destroyed encoder held was never recorded.
TEST_F(KvProtocol, DroppedLists) {
  cache.begin_step(encoder, 2);
  encoder.submit().wait();
  append_all(encoder, 2);
  encoder.clear();
  EXPECT_REFUSED(("lacks append() of layers 0 to 4"), cache.begin_step(encoder, 1));
  {
    Encoder short_lived(device);
    append_all(short_lived, 2);
  }
  EXPECT_REFUSED(("lacks append() of layers 0 to 4"), cache.begin_step(encoder, 1));
  append_all(encoder, 2);
  encoder.submit().wait();
  save();
  record_step(encoder, 2);
  encoder.clear();  // with the begin_step: the host has begun it, the device has not
  const std::vector<std::string> gone = {"tokens from 2 on were recorded and dropped"};
  EXPECT_TRUE(refused(gone, [&] { append(encoder, 0, 2); }));
  EXPECT_TRUE(refused(gone, [&] { cache.begin_step(encoder, 1); }));
  cache.rollback(encoder, 2);
  encoder.submit().wait();
  EXPECT_EQ(cache.length(), 2u);
  expect_goes_on();
}

// Two steps in a list that is dropped: without the second the first is missing still.
TEST_F(KvProtocol, StepsThatWereDroppedAreNotThere) {
  step(3);
  for (const uint64_t tokens : {2, 4}) {
    record_step(encoder, tokens);
  }
  encoder.clear();
  const std::vector<std::string> gone = {"tokens from 3 on were recorded and dropped"};
  for (const uint64_t tokens : {0, 1, 4, 5}) {
    EXPECT_TRUE(refused(gone, [&] { cache.rollback(encoder, tokens); })) << tokens;
  }
  EXPECT_TRUE(refused(gone, [&] { cache.begin_step(encoder, 1); }));
  EXPECT_TRUE(refused(gone, [&] { append(encoder, 0, 4); }));
  EXPECT_TRUE(refused(gone, [&] { cache.fork(encoder); }));
  EXPECT_TRUE(refused(gone, [&] { save(); }));
  EXPECT_TRUE(refused(gone, [&] { attend(encoder, 0, 1); }));
  cache.rollback(encoder, 6);
  EXPECT_EQ(cache.length(), 3u);
  encoder.submit().wait();
  expect_goes_on();
}

// What a list that is dropped takes back was there before, and is there again.
TEST_F(KvProtocol, ADroppedTruncateLosesNothing) {
  step(5);
  cache.rollback(encoder, 2);
  encoder.clear();
  EXPECT_EQ(cache.length(), 3u);
  expect_goes_on();
  cache.clear(encoder);
  encoder.clear();
  expect_goes_on();
}

// A copy that never ran holds nothing, whatever its origin held.
TEST_F(KvProtocol, ADroppedForkIsNotThere) {
  step(5);
  cache.rollback(encoder, 2);  // no step that would lack its append
  encoder.submit().wait();
  const auto expect_refused = [&](KvCache& copy, const std::vector<std::string>& words) {
    EXPECT_TRUE(refused(words, [&] { save(copy); }));
    EXPECT_TRUE(refused(words, [&] { copy.fork(encoder); }));
    EXPECT_TRUE(refused(words, [&] { copy.begin_step(encoder, 1); }));
  };
  KvCache dropped = cache.fork(encoder);
  encoder.clear();
  expect_refused(dropped, {"tokens from 0 on were recorded and dropped"});
  dropped.clear(encoder);
  std::swap(dropped, cache);
  expect_goes_on();
  std::swap(dropped, cache);
  const KvCache copy = cache.fork(encoder), copy_of_copy = copy.fork(encoder);
  EXPECT_REFUSED(("encoder.instantiate", "kv_extend"), encoder.instantiate());
  EXPECT_REFUSED(("not submitted"), save(copy));
  encoder.submit().wait();
  save(copy);
  save(copy_of_copy);
  expect_goes_on();
}

// In the order of one list a fork copies what is there by then.
TEST_F(KvProtocol, AForkBetweenSteps) {
  record_step(encoder, 1);
  const KvCache between = cache.fork(encoder);
  step(2);
  EXPECT_EQ(between.length() + 2, cache.length());
  save(between);
  expect_goes_on();
}

// Values are their tokens' numbers, keys are 0: the answer is the mean of what is seen.
TEST(KvDropped, AForkAfterADroppedTruncateIsAsLongAsItSays) {
  const Device device = Device::open("cpu", {.threads = 1});
  Encoder encoder(device);
  KvCache cache(device, {.kv_heads = 1,
                         .head_dim = 16,
                         .capacity = 64,
                         .layers = {{.k = KvFormat::f32, .v = KvFormat::f32}},
                         .step_tokens = 16});
  const Tensor k = device.tensor(DType::f32, {10, 1, 16}),
               v = device.tensor(DType::f32, {10, 1, 16});
  for (size_t i = 0; i < 160; ++i) v.data<float>()[i] = static_cast<float>(i / 16);
  cache.begin_step(encoder, 10);
  cache.append(encoder, 0, k, v);
  encoder.submit();
  cache.rollback(encoder, 3);
  encoder.clear();
  KvCache copy = cache.fork(encoder);
  const Tensor q = device.tensor(DType::f32, {1, 1, 16}),
               out = device.tensor(DType::f32, {1, 1, 16});
  copy.attend(encoder, 0, {.q = q, .out = out});
  encoder.submit();
  EXPECT_EQ(copy.length(), 7u);
  EXPECT_FLOAT_EQ(out.data<const float>()[0], 3.0f);
}

// The step that runs lacks what was dropped, however far the list had gone on.
TEST_F(KvProtocol, DroppedAppendsOfTheStepThatRuns) {
  const std::vector<std::string> gone = {"tokens from 3 on were recorded and dropped"};
  const auto expect_lost = [&](const auto& go_on) {
    cache.begin_step(encoder, 2);
    encoder.submit();
    append_all(other, 2);
    go_on();
    other.clear();
    EXPECT_TRUE(refused(gone, [&] { save(); }));
    EXPECT_TRUE(refused(gone, [&] { cache.begin_step(encoder, 1); }));
    EXPECT_TRUE(refused(gone, [&] { cache.fork(encoder); }));
    cache.rollback(encoder, cache.length() - 3);
    encoder.submit().wait();
  };
  step(3);
  expect_lost([&] { record_step(other, 1); });
  expect_lost([&] { cache.rollback(other, 1); });
  expect_lost([&] { cache.rollback(other, 0); });
  EXPECT_EQ(cache.length(), 3u);
  expect_goes_on();
}

}  // namespace
}  // namespace gyre::test
