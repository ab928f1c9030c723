// Lists that are dropped: what was recorded in them is not there, and the cache knows.
#include "cache/kv_protocol_fixture.h"

namespace gyre::test {
namespace {

// What a cleared or destroyed encoder held was never recorded.
TEST_F(KvProtocol, DroppedLists) {
  cache.extend(encoder, 2);
  encoder.submit().wait();
  append_all(encoder, 2);
  encoder.clear();
  EXPECT_TRUE(refused({"lacks append() of layers 0 to 4"}, [&] { cache.extend(encoder, 1); }));
  {
    Encoder short_lived(device);
    append_all(short_lived, 2);
  }
  EXPECT_TRUE(refused({"lacks append() of layers 0 to 4"}, [&] { cache.extend(encoder, 1); }));
  append_all(encoder, 2);
  encoder.submit().wait();
  save();
  cache.extend(encoder, 2);
  append_all(encoder, 2);
  encoder.clear();  // with the extend: the host has begun it, the device has not
  const std::vector<std::string> gone = {"tokens from 2 on were recorded and dropped"};
  EXPECT_TRUE(refused(gone, [&] { append(encoder, 0, 2); }));
  EXPECT_TRUE(refused(gone, [&] { cache.extend(encoder, 1); }));
  cache.truncate(encoder, 2);
  encoder.submit().wait();
  EXPECT_EQ(cache.length(), 2u);
  expect_goes_on();
}

// Two steps in a list that is dropped: without the second the first is missing still.
TEST_F(KvProtocol, StepsThatWereDroppedAreNotThere) {
  step(3);
  for (const uint64_t tokens : {2, 4}) {
    cache.extend(encoder, tokens);
    append_all(encoder, tokens);
  }
  encoder.clear();
  const std::vector<std::string> gone = {"tokens from 3 on were recorded and dropped"};
  for (const uint64_t tokens : {0, 1, 4, 5}) {
    EXPECT_TRUE(refused(gone, [&] { cache.truncate(encoder, tokens); })) << tokens;
  }
  EXPECT_TRUE(refused(gone, [&] { cache.extend(encoder, 1); }));
  EXPECT_TRUE(refused(gone, [&] { append(encoder, 0, 4); }));
  EXPECT_TRUE(refused(gone, [&] { cache.fork(encoder); }));
  EXPECT_TRUE(refused(gone, [&] { save(); }));
  attend(encoder, 0, 1);
  EXPECT_TRUE(refused({"encoder.submit"}, [&] { encoder.submit(); }));
  encoder.clear();
  cache.truncate(encoder, 6);
  EXPECT_EQ(cache.length(), 3u);
  encoder.submit().wait();
  expect_goes_on();
}

// What a list that is dropped takes back was there before, and is there again.
TEST_F(KvProtocol, ADroppedTruncateLosesNothing) {
  step(5);
  cache.truncate(encoder, 2);
  encoder.clear();
  EXPECT_EQ(cache.length(), 3u);
  expect_goes_on();
  cache.clear(encoder);
  encoder.clear();
  expect_goes_on();
}

}  // namespace
}  // namespace gyre::test
