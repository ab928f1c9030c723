#include "gyre/graph.h"

#include "expect_error.h"
#include "gyre_test.h"
#include "in_threads.h"
#include "runtime/test_kernels.h"

namespace gyre::test {
namespace {

class GraphTest : public testing::Test {
 protected:
  Tensor bytes(uint64_t count) const { return device_.tensor(DType::u8, {count}); }

  // counter[i] = fold_value(counter[i], 0, i, 1) at every replay
  Graph counting_graph(const Tensor& counter) const {
    Encoder encoder(device_);
    record_fold(encoder, {.out = counter, .tasks = 4});
    return encoder.instantiate();
  }
  static uint8_t counted(uint64_t i, int replays) {
    uint8_t value = 0;
    for (int r = 0; r < replays; ++r) value = fold_value(value, 0, i, 1);
    return value;
  }

  Device device_ = open_test_device({.threads = 3});
};

TEST_F(GraphTest, ReplaysTheSameList) {
  const Tensor counter = bytes(64);
  const Graph graph = counting_graph(counter);
  EXPECT_EQ(graph.size(), 1u);
  EXPECT_EQ(counter.data<uint8_t>()[0], 0) << "instantiate runs nothing";
  for (int replay = 1; replay <= 5; ++replay) {
    const Fence fence = graph.replay();
    fence.wait();
    EXPECT_TRUE(fence.done());
    for (uint64_t i = 0; i < 64; ++i) ASSERT_EQ(counter.data<uint8_t>()[i], counted(i, replay));
  }
}

TEST_F(GraphTest, ReadsMemoryAtEveryReplay) {
  const Tensor in = bytes(4), out = bytes(4);
  Encoder encoder(device_);
  record_mix(encoder, {.a = in, .out = out});
  const Graph graph = encoder.instantiate();
  for (const uint8_t value : {uint8_t{5}, uint8_t{9}}) {
    in.data<uint8_t>()[2] = value;
    graph.replay().wait();
    EXPECT_EQ(out.data<uint8_t>()[2], mix_value(value, 0, 2, 1));
  }
}

TEST_F(GraphTest, LeavesTheEncoderEmptyAndApart) {
  const Tensor counter = bytes(8);
  Encoder encoder(device_);
  record_fold(encoder, {.out = counter});
  const Graph graph = encoder.instantiate();
  EXPECT_EQ(encoder.size(), 0u);
  record_fold(encoder, {.out = counter});
  EXPECT_EQ(encoder.barriers(), 0u);
  encoder.clear();
  EXPECT_EQ(graph.size(), 1u) << "what the encoder does later is not the graph's";
  graph.replay().wait();
  EXPECT_EQ(counter.data<uint8_t>()[3], counted(3, 1));
}

TEST_F(GraphTest, HoldsItsMemory) {
  auto owner = std::make_shared<std::vector<uint8_t>>(16);
  const std::weak_ptr<std::vector<uint8_t>> watch = owner;
  {
    void* memory = owner->data();
    const Graph graph = counting_graph(device_.wrap(memory, DType::u8, {16}, {}, std::move(owner)));
    ASSERT_FALSE(watch.expired());
    graph.replay().wait();
    EXPECT_EQ(watch.lock()->at(7), counted(7, 1));
  }
  EXPECT_TRUE(watch.expired());
}

TEST_F(GraphTest, HoldsItsDevice) {
  std::vector<uint8_t> memory(16);
  const auto make = [&] {
    const Device device = open_test_device({.threads = 2});
    Encoder encoder(device);
    record_fold(encoder, {.out = device.wrap(memory.data(), DType::u8, {16}), .tasks = 2});
    return encoder.instantiate();
  };
  const Graph graph = make();
  graph.replay().wait();
  EXPECT_EQ(memory[9], counted(9, 1));
}

TEST_F(GraphTest, TensorsOutliveTheDevice) {
  Tensor tensor;
  {
    const Device device = Device::open("cpu", {.threads = 2});
    tensor = device.tensor(DType::u8, {100});
  }
  tensor.data<uint8_t>()[99] = 1;
  EXPECT_EQ(tensor.slice(0, 99, 1).data<uint8_t>()[0], 1);
}

TEST_F(GraphTest, SeveralThreadsReplayOneGraph) {
  constexpr int kThreads = 4;
  constexpr int kReplays = 100;
  const Tensor counter = bytes(64);
  const Graph graph = counting_graph(counter);
  in_threads(kThreads, [&](size_t) {
    for (int r = 0; r < kReplays; ++r) graph.replay().wait();
  });
  for (uint64_t i = 0; i < 64; ++i) {
    ASSERT_EQ(counter.data<uint8_t>()[i], counted(i, kThreads * kReplays))
        << "one replay at a time";
  }
}

TEST_F(GraphTest, Moves) {
  const Tensor counter = bytes(8);
  Graph first = counting_graph(counter);
  Graph second(std::move(first));
  // NOLINTBEGIN(bugprone-use-after-move): that is the test
  EXPECT_REFUSED(("graph.replay", "moved from"), first.replay());
  EXPECT_REFUSED(("graph.size", "moved from"), first.size());
  // NOLINTEND(bugprone-use-after-move)
  first = std::move(second);
  first.replay().wait();
  EXPECT_EQ(counter.data<uint8_t>()[1], counted(1, 1));
  // The old device of the target goes only after the old graph.
  first = [&] {
    const Device other = open_test_device({.threads = 2});
    Encoder encoder(other);
    return encoder.instantiate();
  }();
  EXPECT_EQ(first.size(), 0u);
}

class FailedWork final : public FenceState {
 public:
  void wait() override { throw Error(ErrorCode::device_lost, "the device fell over"); }
  bool done() const override { return true; }
};

TEST(Fence, KeepsWhatWentWrong) {
  const Fence fence = Internals::fence(std::make_shared<FailedWork>());
  for (int i = 0; i < 2; ++i) {
    EXPECT_ERROR(device_lost, ("fell over"), fence.wait());
  }
  EXPECT_TRUE(fence.done());
}

TEST(Fence, ADefaultOneIsComplete) {
  const Fence fence;
  EXPECT_TRUE(fence.done());
  fence.wait();
}

}  // namespace
}  // namespace gyre::test
