// The CUDA backend on a GPU; skipped where there is none.
#include <cstdlib>
#include <iostream>

#include "abi/kernels.h"
#include "cuda/fake_controls.h"
#include "cuda/foreign_stream.h"
#include "expect_error.h"
#include "gpu_rules.h"
#include "gyre_test.h"
#include "runtime/recorder.h"
#include "test_device.h"

namespace gyre::test {
namespace {

void copy_bytes(Encoder& encoder, const Tensor& from, const Tensor& to, uint64_t bytes) {
  Recording recording(encoder, "copy");
  recording.dispatch(kBytesCopy, abi::BytesCopySpec{}, abi::BytesCopyParams{bytes, 1, 0, 0},
                     {&from, &to});
  recording.commit();
}

void copy_all(Encoder& encoder, const Tensor& from, const Tensor& to) {
  copy_bytes(encoder, from, to, from.bytes());
}

class CudaDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_available("cuda:0")) GTEST_SKIP() << "no CUDA device here";
    device_ = Device::open("cuda");
  }
  const Device& device() const { return device_; }
  Tensor filled(uint64_t bytes, uint32_t seed) const { return test::filled(device_, bytes, seed); }

 private:
  Device device_ = device_of(nullptr);
};

TEST_F(CudaDevice, DescribesItself) {
  const DeviceInfo& info = device().info();
  EXPECT_EQ(info.name, "cuda:0");
  EXPECT_NE(info.description.find("compute capability"), std::string::npos) << info.description;
  EXPECT_GT(info.compute_units, 0u);
  EXPECT_GT(info.memory_bytes, uint64_t{1} << 30);
  EXPECT_ERROR(unsupported, ("cuda:99", "there are"), Device::open("cuda:99"));
}

TEST_F(CudaDevice, HostCopiesOfEverySize) {
  // Around the halves of the staging memory, and odd.
  constexpr uint64_t kSizes[] = {1, 255, 4 << 20, (4 << 20) + 1, (8 << 20) - 3, 33333333};
  expect_host_copies(device(), kSizes);
}

TEST_F(CudaDevice, StridedHostCopiesLeaveTheGapsAlone) { expect_strided_host_copies(device()); }

TEST_F(CudaDevice, ReusedMemoryIsZeroAndWaitsForItsLastUser) {
  const Tensor from = filled(64 << 20, 5), to = device().tensor(DType::u8, {64 << 20});
  Encoder encoder(device());
  uint64_t address = 0;
  {
    const Tensor scratch = device().tensor(DType::u8, {64 << 20});
    address = storage_of(scratch)->address();
    copy_bytes(encoder, from, scratch, from.bytes());
    copy_bytes(encoder, scratch, to, from.bytes());
  }
  const Fence fence = encoder.submit();  // the list was the last to hold the scratch memory
  const Tensor next = device().tensor(DType::u8, {64 << 20});
  EXPECT_EQ(storage_of(next)->address(), address) << "nothing was reused: the test shows nothing";
  EXPECT_EQ(read_bytes(next), Bytes(64 << 20));
  fence.wait();
  EXPECT_TRUE(fence.done());
  EXPECT_EQ(read_bytes(to), pattern_bytes(64 << 20, 5));
}

TEST_F(CudaDevice, AGraphFollowsItsLevels) {
  expect_levels_of_a_graph(device(), 1 << 20, copy_all);
}

TEST_F(CudaDevice, AGraphMayGoWhileItRuns) { expect_a_graph_may_go(device(), 32 << 20, copy_all); }

TEST_F(CudaDevice, WrapsItsOwnMemoryOnly) {
  std::vector<float> host(8);
  EXPECT_ERROR(unsupported, ("device.wrap", "cuda:0", "write_from"),
               device().wrap(host.data(), DType::f32, {8}));
  const Tensor memory = filled(1024, 4);
  auto owner = std::make_shared<int>(1);
  const std::weak_ptr<int> alive = owner;
  Fence fence;
  const Tensor to = device().tensor(DType::u8, {1000});
  {
    auto* const address = static_cast<uint8_t*>(address_of(memory));
    const Tensor wrapped = device().wrap(address + 8, DType::u8, {1000}, {}, std::move(owner));
    Encoder encoder(device());
    copy_bytes(encoder, wrapped, to, 1000);
    fence = encoder.submit();
  }
  fence.wait();
  EXPECT_TRUE(alive.expired());
  const Bytes all = pattern_bytes(1024, 4);
  EXPECT_EQ(read_bytes(to), Bytes(all.begin() + 8, all.begin() + 1008));
}

TEST_F(CudaDevice, WaitsForAllThatWasSubmitted) {
  EXPECT_NE(device().stream(), 0u);
  expect_wait_for_all(device(), 1 << 20, copy_all);
}

TEST_F(CudaDevice, SubmitsOntoAStreamOfTheCallers) {
  const ForeignStream foreign;
  constexpr uint64_t kBytes = 1 << 20;
  const Tensor a = filled(kBytes, 5), b = device().tensor(DType::u8, {kBytes}),
               c = device().tensor(DType::u8, {kBytes}), d = device().tensor(DType::u8, {kBytes});
  Encoder encoder(device());
  // Own stream, the caller's, own stream again: each follows the one before.
  for (int i = 0; i < 20; ++i) {
    copy_bytes(encoder, a, b, kBytes);
    encoder.submit();
    copy_bytes(encoder, b, c, kBytes);
    const Fence fence = encoder.submit_on(foreign.handle());
    copy_bytes(encoder, c, d, kBytes);
    encoder.submit();
    fence.wait();
    EXPECT_TRUE(fence.done());
  }
  device().wait();
  EXPECT_EQ(read_bytes(d), pattern_bytes(kBytes, 5));
}

// Memory that a caller's allocator reuses in the order of its stream is not held there: what a
// forward pass takes and gives back would otherwise add up until the work is done.
TEST_F(CudaDevice, LetsGoOfMemoryThatItsOwnerFreesInStreamOrder) {
  const ForeignStream foreign;
  constexpr uint64_t kBytes = 1 << 20;
  const Tensor memory = filled(kBytes, 6), to = device().tensor(DType::u8, {kBytes});
  Encoder encoder(device());
  const auto holds = [&](OwnerRelease release, bool on_callers_stream) {
    auto owner = std::make_shared<int>(1);
    const std::weak_ptr<int> alive = owner;
    copy_bytes(
        encoder,
        device().wrap(address_of(memory), DType::u8, {kBytes}, {}, std::move(owner), release), to,
        kBytes);
    EXPECT_FALSE(alive.expired()) << "a recorded list holds it";
    const Fence fence = on_callers_stream ? encoder.submit_on(foreign.handle()) : encoder.submit();
    const bool held = !alive.expired();
    device().wait();
    EXPECT_TRUE(alive.expired());
    return held;
  };
  EXPECT_TRUE(holds(OwnerRelease::when_done, true));
  EXPECT_FALSE(holds(OwnerRelease::in_stream_order, true));
  EXPECT_TRUE(holds(OwnerRelease::in_stream_order, false)) << "the owner does not know our stream";
  EXPECT_EQ(read_bytes(to), pattern_bytes(kBytes, 6));
}

TEST_F(CudaDevice, IsCapturedByAGraphOfTheCallers) {
  const ForeignStream foreign;
  constexpr uint64_t kBytes = 1 << 20;
  const Tensor a = filled(kBytes, 1), b = device().tensor(DType::u8, {kBytes});
  Encoder encoder(device());
  std::weak_ptr<Storage> scratch;
  Fence fence;
  {
    const Tensor between = device().tensor(DType::u8, {kBytes});
    scratch = storage_of(between);
    copy_bytes(encoder, a, between, kBytes);
    copy_bytes(encoder, between, b, kBytes);
    device().wait();
    foreign.begin_capture();
    fence = encoder.submit_on(foreign.handle());
  }
  {
    const CapturedGraph graph(foreign);
    EXPECT_EQ(read_bytes(b), Bytes(kBytes)) << "nothing has run yet";
    EXPECT_FALSE(scratch.expired()) << "the fence holds what the graph uses";
    for (const uint32_t seed : {7u, 8u}) {
      write_bytes(a, pattern_bytes(kBytes, seed));
      graph.run();
      EXPECT_EQ(read_bytes(b), pattern_bytes(kBytes, seed));
    }
  }
  fence = {};
  EXPECT_TRUE(scratch.expired());
}

class CudaEarlyReads : public CudaDevice {
 protected:
  void SetUp() override {
    CudaDevice::SetUp();
    if (!IsSkipped() && fake().early_args == nullptr) GTEST_SKIP() << "the driver is real";
  }
  Tensor target() const { return device().tensor(DType::u8, {64}); }
};

// A copy has two arguments: from, to.
TEST_F(CudaEarlyReads, OfWhatTheNodeAheadDoesNotWrite) {
  const Tensor a = filled(64, 1), b = target(), c = target(), d = target();
  Encoder encoder(device());
  copy_all(encoder, a, b);
  copy_all(encoder, b, c);  // reads what the first one writes
  copy_all(encoder, a, c);  // writes what the second one writes
  copy_all(encoder, c, d);
  copy_all(encoder, b, d);
  const Graph graph = encoder.instantiate();
  constexpr uint32_t kFrom = 1, kTo = 2, kBoth = 3;
  EXPECT_EQ(fake().early_args(0) & kBoth, kBoth);
  EXPECT_EQ(fake().early_args(1) & kBoth, kTo);
  EXPECT_EQ(fake().early_args(2) & kBoth, kFrom);
  EXPECT_EQ(fake().early_args(3) & kBoth, kTo);
  EXPECT_EQ(fake().early_args(4) & kBoth, kFrom);
}

// Two commands without a barrier between them: edges behind them are full, nothing of them runs.
TEST_F(CudaEarlyReads, OfEverythingBehindSeveralNodes) {
  const Tensor a = filled(64, 1), b = target(), c = target(), d = target();
  Encoder encoder(device());
  copy_all(encoder, a, b);
  copy_all(encoder, a, c);
  copy_all(encoder, b, d);
  const Graph graph = encoder.instantiate();
  for (uint64_t node = 0; node < 3; ++node) EXPECT_EQ(fake().early_args(node) & 3, 3u) << node;
}

// In a graph that a caller captures, a list may begin before the kernel ahead of it has ended, if
// it waits for it itself. What that kernel writes is known where it is a list's of the same device.
TEST_F(CudaEarlyReads, OfListsThatACallerCaptures) {
  const ForeignStream foreign;
  const Device somebody = Device::open("cuda:0");
  const Tensor a = filled(64, 1), b = target(), c = target();
  const Tensor theirs = somebody.tensor(DType::u8, {64});
  Encoder encoder(device()), other(somebody);
  copy_all(encoder, a, b);  // compiled before the capture
  copy_all(other, theirs, theirs);
  encoder.submit().wait(), other.submit().wait();
  foreign.begin_capture();
  copy_all(encoder, a, b);
  encoder.submit_on(foreign.handle());
  copy_all(encoder, b, c);
  encoder.submit_on(foreign.handle());
  copy_all(other, theirs, theirs);
  other.submit_on(foreign.handle());
  copy_all(encoder, a, b);
  copy_all(encoder, a, c);
  copy_all(encoder, b, c);
  encoder.submit_on(foreign.handle());
  const CapturedGraph graph(foreign);
  constexpr uint32_t kFrom = 1, kTo = 2, kBoth = 3, kProgrammatic = 1u << 31,
                     kAll = kBoth | kProgrammatic;
  EXPECT_EQ(fake().early_args(0) & kAll, kBoth) << "nothing is ahead of the first";
  EXPECT_EQ(fake().early_args(1) & kAll, kTo | kProgrammatic) << "b is what the one ahead writes";
  EXPECT_EQ(fake().early_args(2) & kAll, kProgrammatic) << "somebody's kernel is ahead";
  EXPECT_EQ(fake().early_args(3) & kAll, kProgrammatic);
  EXPECT_EQ(fake().early_args(4) & kAll, kBoth | kProgrammatic);
  EXPECT_EQ(fake().early_args(5) & kAll, kFrom | kProgrammatic) << "c is what the one ahead writes";
}

// What other than a kernel is ahead, or another capture whose nodes have the same handles.
TEST_F(CudaEarlyReads, OfListsBehindWhatIsNoKernelOfTheirs) {
  const ForeignStream foreign;
  const Device somebody = Device::open("cuda:0");
  const Tensor a = filled(64, 1), b = target(), theirs = somebody.tensor(DType::u8, {64});
  Encoder encoder(device()), other(somebody);
  constexpr uint32_t kBoth = 3, kProgrammatic = 1u << 31, kAll = kBoth | kProgrammatic;
  foreign.begin_capture();
  copy_all(encoder, a, b);
  encoder.submit_on(foreign.handle());
  foreign.zero(address_of(b), 64);
  copy_all(encoder, a, b);
  encoder.submit_on(foreign.handle());
  {
    const CapturedGraph graph(foreign);
    EXPECT_EQ(fake().early_args(2) & kAll, kBoth) << "it begins when the memory is set";
  }
  foreign.begin_capture();
  for (int i = 0; i < 3; ++i) {
    copy_all(other, theirs, theirs);
    other.submit_on(foreign.handle());
  }
  copy_all(encoder, a, b);
  encoder.submit_on(foreign.handle());
  const CapturedGraph graph(foreign);
  EXPECT_EQ(fake().early_args(3) & kAll, kProgrammatic) << "the third node is somebody's here";
}

// Between lists there are events; what is timed or checked runs alone.
TEST_F(CudaEarlyReads, LaunchesOfOneListMayOverlap) {
  const auto overlaps = [](const Device& device, bool on_callers_stream) {
    const ForeignStream foreign;
    const Tensor a = device.tensor(DType::u8, {64}), b = device.tensor(DType::u8, {64});
    Encoder encoder(device);
    for (int i = 0; i < 3; ++i) copy_all(encoder, a, b);
    (on_callers_stream ? encoder.submit_on(foreign.handle()) : encoder.submit()).wait();
    return fake().overlaps() & 7;
  };
  EXPECT_EQ(overlaps(device(), false), 3u);
  EXPECT_EQ(overlaps(device(), true), 3u);
  EXPECT_EQ(overlaps(Device::open("cuda:0", {.check_each_launch = true}), false), 0u);
  device().start_trace();
  EXPECT_EQ(overlaps(device(), false), 0u);
  device().stop_trace();
}

TEST_F(CudaDevice, TracesCommandsOfSubmitsAndReplays) {
  expect_traced_copies(device(), "bytes_copy", copy_all);
}

TEST_F(CudaDevice, ServesSeveralThreads) { expect_threads_served(device(), copy_all); }

TEST_F(CudaDevice, FencesAndTensorsOutliveTheDevice) {
  expect_fences_and_tensors_outlive("cuda:0", copy_all);
}

// Last: the process's GPU context does not survive it while anybody holds a device.
// Returns what is wrong. The process has lost its device afterwards.
std::string provoke_error(bool each) {
  const Device device = Device::open("cuda:0", {.check_each_launch = each});
  const Tensor from = device.tensor(DType::u8, {256}), to = device.tensor(DType::u8, {256});
  Encoder encoder(device);
  copy_bytes(encoder, from, to, 256);
  copy_bytes(encoder, from, to, uint64_t{1} << 44);  // far beyond any memory
  std::vector<std::string> parts = {"cuda:0", "bytes_copy (bytes=17592186044416)"};
  parts.emplace_back(each ? "in bytes_copy" : "one of 2 commands");
  Fence fence;
  std::string wrong;
  const auto expect = [&](const testing::AssertionResult& result) {
    if (!result) wrong += std::string(result.message()) + "; ";
  };
  expect(throws_error(ErrorCode::device_lost, parts, [&] {
    fence = encoder.submit();
    fence.wait();
  }));
  if (!each) expect(throws_error(ErrorCode::device_lost, parts, [&] { fence.wait(); }));
  expect(throws_error(ErrorCode::device_lost, {}, [&] { read_bytes(to); }));
  expect(throws_error(ErrorCode::device_lost, {}, [&] { device.tensor(DType::u8, {64}); }));
  return wrong;
}

// In processes of their own: what a kernel broke stays broken for its process.
class CudaErrors : public testing::TestWithParam<bool> {};

TEST_P(CudaErrors, AreKeptAndNameTheCommand) {
  if (!is_available("cuda:0")) GTEST_SKIP() << "no CUDA device here";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const std::string wrong = provoke_error(GetParam());
        std::cerr << wrong;
        std::exit(wrong.empty() ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

INSTANTIATE_TEST_SUITE_P(All, CudaErrors, testing::Bool(), [](const auto& each) {
  return each.param ? "CheckedEach" : "CheckedAtTheEnd";
});

}  // namespace
}  // namespace gyre::test
