#include "gyre/encoder.h"

#include <thread>

#include "expect_error.h"
#include "gyre_test.h"
#include "in_threads.h"
#include "runtime/test_kernels.h"

namespace gyre::test {
namespace {

class EncoderTest : public testing::Test {
 protected:
  Tensor bytes(uint64_t count) const { return device_.tensor(DType::u8, {count}); }
  void mix(Encoder& encoder, const Tensor& from, const Tensor& to) const {
    record_mix(encoder, {.a = from, .out = to});
  }

  Device device_ = open_test_device();
};

struct ListSizes {
  size_t commands, params, args, storages;
  bool operator==(const ListSizes&) const = default;
};

ListSizes list_sizes(const Encoder& encoder) {
  Recording recording(encoder, "test");
  const CommandList& list = recording.list();
  return {list.commands.size(), list.params.size(), list.args.size(), list.storages.size()};
}

TEST_F(EncoderTest, NothingRunsBeforeSubmit) {
  const Tensor in = bytes(8), out = bytes(8);
  Encoder encoder(device_);
  mix(encoder, in, out);
  EXPECT_EQ(encoder.size(), 1u);
  EXPECT_EQ(out.data<uint8_t>()[0], 0);
  encoder.submit().wait();
  EXPECT_EQ(out.data<uint8_t>()[0], mix_value(0, 0, 0, 1));
}

TEST_F(EncoderTest, SubmitLeavesItEmptyAndReady) {
  const Tensor a = bytes(8), b = bytes(8);
  Encoder encoder(device_);
  for (int round = 0; round < 3; ++round) {
    mix(encoder, a, b);
    EXPECT_EQ(encoder.size(), 1u);
    EXPECT_EQ(encoder.barriers(), 0u) << "what was submitted is no hazard any more";
    const Fence fence = encoder.submit();
    fence.wait();
    EXPECT_TRUE(fence.done());
    EXPECT_EQ(encoder.size(), 0u);
    EXPECT_EQ(list_sizes(encoder), (ListSizes{0, 0, 0, 0}));
  }
}

TEST_F(EncoderTest, AnEmptyOneSubmits) {
  Encoder encoder(device_);
  encoder.submit().wait();
  const Graph graph = encoder.instantiate();
  EXPECT_EQ(graph.size(), 0u);
  graph.replay().wait();
}

TEST_F(EncoderTest, ClearAndDroppingDiscard) {
  const Tensor a = bytes(8), b = bytes(8);
  {
    Encoder dropped(device_);
    mix(dropped, a, b);
  }
  Encoder encoder(device_);
  mix(encoder, a, b);
  encoder.clear();
  EXPECT_EQ(encoder.size(), 0u);
  mix(encoder, b, a);
  EXPECT_EQ(encoder.barriers(), 0u);
  encoder.clear();
  encoder.submit().wait();
  EXPECT_EQ(b.data<uint8_t>()[0], 0);
}

TEST_F(EncoderTest, CountsBarriers) {
  const Tensor a = bytes(8), b = bytes(8), c = bytes(8);
  Encoder encoder(device_);
  mix(encoder, a, b);
  mix(encoder, a, c);  // both read a: together
  EXPECT_EQ(encoder.barriers(), 0u);
  record_mix(encoder, {.a = b, .b = c, .out = a});
  EXPECT_EQ(encoder.barriers(), 1u);
}

TEST_F(EncoderTest, DisjointHalvesOfOneStorageRunTogether) {
  const Tensor both = bytes(16), source = bytes(8);
  Encoder encoder(device_);
  mix(encoder, source, both.slice(0, 0, 8));
  mix(encoder, source, both.slice(0, 8, 8));
  EXPECT_EQ(encoder.barriers(), 0u);
  mix(encoder, both.slice(0, 7, 2), bytes(2));
  EXPECT_EQ(encoder.barriers(), 1u);
}

// An op that dispatches twice and then finds something wrong.
void throwing_op(Encoder& encoder, const Tensor& a, const Tensor& b) {
  Recording recording(encoder, "throwing");
  const BytesCall first{.a = a, .out = b};
  const BytesCall second{.a = b, .out = a};
  recording.dispatch(kMix, TestSpec{}, params_of(first), {&first.a, &first.b, &first.out});
  recording.dispatch(kMix, TestSpec{}, params_of(second), {&second.a, &second.b, &second.out});
  throw Error(ErrorCode::invalid_argument, "throwing: as told");
}

TEST_F(EncoderTest, AThrowingOpLeavesNoTrace) {
  const Tensor a = bytes(8), b = bytes(8);
  Encoder encoder(device_);
  mix(encoder, a, bytes(4));
  const ListSizes before = list_sizes(encoder);
  EXPECT_REFUSED(("as told"), throwing_op(encoder, a, b));
  EXPECT_EQ(list_sizes(encoder), before);
  encoder.submit().wait();
  EXPECT_EQ(b.data<uint8_t>()[0], 0);
}

TEST_F(EncoderTest, AThrowingOpLeavesNoHazards) {
  const Tensor a = bytes(8), b = bytes(8), c = bytes(8);
  Encoder encoder(device_);
  mix(encoder, a, c);
  // Its second dispatch needs a barrier, which would have hidden the first command from later ones.
  EXPECT_REFUSED(("as told"), throwing_op(encoder, a, b));
  mix(encoder, bytes(4), b);
  EXPECT_EQ(encoder.barriers(), 0u) << "b was never written";
  mix(encoder, c, bytes(4));
  EXPECT_EQ(encoder.barriers(), 1u) << "c still is";
}

TEST_F(EncoderTest, AForgottenCommitDiscards) {
  const BytesCall call{.a = bytes(4), .out = bytes(4)};
  Encoder encoder(device_);
  {
    Recording recording(encoder, "careless");
    recording.dispatch(kMix, TestSpec{}, params_of(call), {&call.a, &call.b, &call.out});
  }
  EXPECT_EQ(encoder.size(), 0u);
}

TEST_F(EncoderTest, RefusesTensorsOfAnotherDevice) {
  const Tensor foreign = open_test_device({.threads = 1}).tensor(DType::u8, {8});
  Encoder encoder(device_);
  EXPECT_REFUSED(("mix", "a", "another device"), mix(encoder, foreign, bytes(8)));
  EXPECT_REFUSED(("mix", "out", "another device"), mix(encoder, bytes(8), foreign));
  EXPECT_EQ(list_sizes(encoder), (ListSizes{0, 0, 0, 0}));
}

TEST_F(EncoderTest, RefusesToWriteReadOnlyMemory) {
  const uint8_t memory[8] = {1, 2, 3};
  const Tensor read_only = device_.wrap(static_cast<const void*>(memory), DType::u8, {8});
  Encoder encoder(device_);
  EXPECT_REFUSED(("mix", "out", "read-only"), mix(encoder, bytes(8), read_only));
  EXPECT_REFUSED(("fold", "out", "read-only"),
                 record_fold(encoder, {.a = bytes(8), .out = read_only}))
      << "read_write is a write too";
  const Tensor out = bytes(8);
  mix(encoder, read_only, out);
  encoder.submit().wait();
  EXPECT_EQ(out.data<uint8_t>()[1], mix_value(2, 0, 1, 1));
}

TEST_F(EncoderTest, ChecksTheArgumentCount) {
  const BytesCall call{.a = bytes(4), .out = bytes(4)};
  Encoder encoder(device_);
  Recording recording(encoder, "wrong");
  EXPECT_REFUSED(("wrong", "mix", "3", "got 2"),
                 recording.dispatch(kMix, TestSpec{}, params_of(call), {&call.a, &call.out}));
  EXPECT_REFUSED(("got 4"), recording.dispatch(kMix, TestSpec{}, params_of(call),
                                               {&call.a, &call.b, &call.out, &call.out}));
}

TEST_F(EncoderTest, SaysWhichKernelIsMissing) {
  const BytesCall call{.a = bytes(4), .out = bytes(4)};
  Encoder encoder(device_);
  Recording recording(encoder, "missing");
  EXPECT_ERROR(unsupported, ("absent", "cpu"),
               recording.dispatch(kAbsent, TestSpec{}, params_of(call), {}));
  EXPECT_ERROR(unsupported, ("mix", "0x63"),
               recording.dispatch(kMix, TestSpec{kMissingVariant}, params_of(call),
                                  {&call.a, &call.b, &call.out}));
}

TEST_F(EncoderTest, MovedFromIsRefused) {
  const Tensor a = bytes(4);
  Encoder first(device_);
  mix(first, a, bytes(4));
  Encoder second(std::move(first));
  EXPECT_EQ(second.size(), 1u) << "the commands move along";
  // NOLINTBEGIN(bugprone-use-after-move): that is the test
  EXPECT_REFUSED(("moved from"), first.size());
  EXPECT_REFUSED(("moved from"), first.barriers());
  EXPECT_REFUSED(("moved from"), first.submit());
  EXPECT_REFUSED(("moved from"), first.instantiate());
  EXPECT_REFUSED(("moved from"), first.clear());
  EXPECT_REFUSED(("moved from"), mix(first, a, bytes(4)));
  first = std::move(second);
  // NOLINTEND(bugprone-use-after-move)
  EXPECT_EQ(first.size(), 1u);
  first.submit().wait();
}

TEST_F(EncoderTest, NeedsADevice) {
  EXPECT_REFUSED(("encoder", "device"), Encoder encoder{device_of(nullptr)});
}

// Two threads in one encoder: every call either records or is refused, and the list stays whole.
TEST_F(EncoderTest, TwoThreadsAtOnceAreRefusedNotBroken) {
  Encoder encoder(device_);
  std::atomic<uint32_t> recorded{0};
  std::atomic<uint32_t> wrong_errors{0};
  const auto work = [&](const Tensor& in, const Tensor& out) {
    for (int i = 0; i < 2000; ++i) {
      try {
        mix(encoder, in, out);
        ++recorded;
      } catch (const Error& error) {
        const std::string text = error.what();
        if (text.find("another thread") == std::string::npos) ++wrong_errors;
      }
    }
  };
  std::thread other([&, in = bytes(4), out = bytes(4)] { work(in, out); });
  work(bytes(4), bytes(4));
  other.join();
  EXPECT_EQ(wrong_errors.load(), 0u);
  EXPECT_EQ(encoder.size(), recorded.load());
  encoder.submit().wait();
}

TEST_F(EncoderTest, ASecondThreadIsRefusedWhileAnOpRecords) {
  Encoder encoder(device_);
  Recording recording(encoder, "long");
  std::thread([&] {
    EXPECT_REFUSED(("encoder.size", "another thread"), encoder.size());
    EXPECT_REFUSED(("encoder.submit", "another thread"), encoder.submit());
    EXPECT_REFUSED(("mix", "another thread"), mix(encoder, bytes(4), bytes(4)));
  }).join();
}

TEST_F(EncoderTest, OneDeviceServesManyEncodersInManyThreads) {
  std::atomic<int> wrong{0};
  in_threads(4, [&](uint32_t t) {
    Encoder encoder(device_);
    for (uint32_t i = 0; i < 200; ++i) {
      const Tensor in = bytes(100), out = bytes(100);
      record_mix(encoder, {.a = in, .out = out, .salt = t * 7 + i, .tasks = 3});
      encoder.submit().wait();
      if (out.data<uint8_t>()[99] != mix_value(0, 0, 99, t * 7 + i)) ++wrong;
    }
  });
  EXPECT_EQ(wrong.load(), 0);
}

TEST_F(EncoderTest, RecordedMemoryStaysAlive) {
  auto owner = std::make_shared<std::vector<uint8_t>>(8, uint8_t{3});
  const std::weak_ptr<std::vector<uint8_t>> watch = owner;
  const Tensor out = bytes(8);
  Encoder encoder(device_);
  {
    void* memory = owner->data();
    const Tensor in = device_.wrap(memory, DType::u8, {8}, {}, std::move(owner));
    mix(encoder, in, out);
    mix(encoder, in, out);
  }
  ASSERT_FALSE(watch.expired());
  encoder.submit().wait();
  EXPECT_EQ(out.data<uint8_t>()[1], mix_value(3, 0, 1, 1));
  EXPECT_TRUE(watch.expired()) << "and no longer than needed";
}

// Many storages, some recorded again and again: none may be dropped, none held after the submit.
TEST_F(EncoderTest, HoldsEachOfManyStorages) {
  constexpr int kStorages = 200;
  std::vector<std::weak_ptr<std::vector<uint8_t>>> watches;
  Encoder encoder(device_);
  const Tensor out = bytes(8);
  for (int i = 0; i < kStorages; ++i) {
    auto owner = std::make_shared<std::vector<uint8_t>>(8, static_cast<uint8_t>(i));
    watches.push_back(owner);
    void* memory = owner->data();
    const Tensor in = device_.wrap(memory, DType::u8, {8}, {}, std::move(owner));
    // A throwing op takes back its own hold only, whether it came first or second.
    if (i % 3 == 0) mix(encoder, in, out);
    if (i % 2 == 0) {
      EXPECT_REFUSED(("as told"), throwing_op(encoder, in, bytes(8)));
    }
    mix(encoder, in, out);
  }
  for (const auto& watch : watches) ASSERT_FALSE(watch.expired());
  encoder.submit().wait();
  for (const auto& watch : watches) ASSERT_TRUE(watch.expired());
  EXPECT_EQ(out.data<uint8_t>()[0], mix_value(kStorages - 1, 0, 0, 1));
}

TEST(Encoder, HasNoStreamsOnTheCpu) {
  const Device device = Device::open("cpu");
  Encoder encoder(device);
  EXPECT_ERROR(unsupported, ("encoder.submit_on", "cpu", "no streams"), encoder.submit_on(1));
}

}  // namespace
}  // namespace gyre::test
