// Tokens taken back from a KvCache: a step or less leaves the tail as it was, more stays
// compressed.
#include "cache/kv_cache_model.h"
#include "expect_error.h"

namespace gyre::test {
namespace {

// Tokens that left the tail stay compressed when the tail is cut away, and nothing is lost.
TEST(KvTruncate, TruncatesIntoAndBeyondTheTail) {
  CacheModel model(small({.k = KvFormat::tq8, .v = KvFormat::tq8, .tail = 20, .sink_tokens = 3}));
  model.append(100);
  for (const uint64_t dropped : {1, 5, 30, 10, 40}) {
    model.rollback(dropped);
    EXPECT_LE(model.error(0, 1), 1e-3);
    model.append(2);
    EXPECT_LE(model.error(0, 2), 1e-3);
    EXPECT_LE(model.error(0, 1, 2), 1e-6) << "the new tokens are in the tail";
    for (int i = 0; i < 10; ++i) model.append(1);
    EXPECT_LE(model.error(0, 10), 1e-3);
  }
}

// The tail's ring has room for a step beside the tail, so a step that is taken back whole, appended
// or not, leaves the tail as it was.
TEST(KvTruncate, AStepTakenBackWasNever) {
  constexpr uint64_t kTail = 20;
  const auto expect_whole = [](CacheModel& model) {
    EXPECT_LE(model.error(0, 1), 1e-3);
    EXPECT_LE(model.error(0, 1, kTail), 1e-6) << "the newest are still 16 bits";
    for (int i = 0; i < 30; ++i) model.append(1);
    EXPECT_LE(model.error(0, 1), 1e-3) << "and leave the tail later";
  };
  for (const uint64_t window : {0, 60}) {
    for (const uint64_t tokens : {1, 7, 20, 64, 99}) {
      SCOPED_TRACE(std::to_string(tokens) + " window " + std::to_string(window));
      CacheModel model(
          small({.k = KvFormat::tq8, .v = KvFormat::tq8, .window = window, .tail = kTail}));
      for (int i = 0; i < 4; ++i) model.append(23);
      for (const bool refused : {false, true}) {
        model.begin_and_take_back(tokens, refused);
        expect_whole(model);
      }
      model.append(tokens);
      model.rollback(tokens);
      model.begin_and_take_back(tokens, false);
      expect_whole(model);
    }
  }
}

// A rollback that takes back a step and tokens before it.
TEST(KvTruncate, AStepAndMoreTakenBack) {
  for (const uint64_t more : {1, 5, 19, 20, 21, 40}) {
    CacheModel model(small({.k = KvFormat::tq8, .v = KvFormat::tq8, .tail = 20, .sink_tokens = 3}));
    model.append(50);
    model.append(30);
    model.begin_and_take_back(40, false, more);
    EXPECT_LE(model.error(0, 1), 1e-3) << more;
    if (more < 20) {
      EXPECT_LE(model.error(0, 1, 20 - more), 1e-6) << more;
    }
    for (int i = 0; i < 30; ++i) model.append(1);
    EXPECT_LE(model.error(0, 1), 1e-3) << more;
  }
}

// In two parts it is as whole as in one.
TEST(KvTruncate, AStepTakenBackInParts) {
  CacheModel model(small({.k = KvFormat::tq8, .v = KvFormat::tq8, .tail = 20}));
  model.append(80);
  model.append(10);
  model.rollback(4);
  model.rollback(6);
  EXPECT_LE(model.error(0, 1, 20), 1e-6);
}

// Tokens cut deeper than one step have left the ring: they stay compressed.
TEST(KvTruncate, MoreThanAStepTakenBackStaysCompressed) {
  CacheModel model(small({.k = KvFormat::tq8, .v = KvFormat::tq8, .tail = 20}));
  for (int i = 0; i < 3; ++i) model.append(80);
  model.rollback(105);
  EXPECT_LE(model.error(0, 1, 15), 1e-6);
  EXPECT_GT(model.error(0, 1, 20), 1e-6);
  EXPECT_LE(model.error(0, 1), 1e-3);
  model.append(2);
  EXPECT_LE(model.error(0, 2), 1e-3);
}

// docs/kv_cache.md: a window counts from the longest length since clear(), also after a rollback.
TEST(KvTruncate, AWindowGoesBackAStepFromTheLongestLength) {
  const Device device = Device::open("cpu", {.threads = 1});
  const KvLayer layer{.k = KvFormat::f16, .v = KvFormat::f16, .window = 8};
  KvCache cache(
      device,
      {.kv_heads = 1, .head_dim = 16, .capacity = 256, .layers = {layer}, .step_tokens = 16});
  Encoder encoder(device);
  const auto append = [&](uint64_t tokens) {
    const Tensor rows = device.tensor(DType::f32, {tokens, 1, 16});
    cache.begin_step(encoder, tokens);
    cache.append(encoder, 0, rows, rows);
    encoder.submit().wait();
  };
  for (int i = 0; i < 4; ++i) append(16);
  cache.rollback(encoder, 16);
  append(4);
  const uint64_t ring = cache.describe()[0].slots, oldest = 64 - ring + 8 - 1;
  EXPECT_LE(oldest, 48u);
  const uint64_t too_far = cache.length() - oldest + 1;
  EXPECT_REFUSED(("kv_cache.rollback", "the window of layer 0 no longer has key"),
                 cache.rollback(encoder, too_far));
  cache.rollback(encoder, too_far - 1);
  EXPECT_EQ(cache.length(), oldest);
  cache.clear(encoder);
  append(16);
  cache.rollback(encoder, 16);  // all tokens fit the ring: anywhere
}

}  // namespace
}  // namespace gyre::test
