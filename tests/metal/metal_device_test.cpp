// The Metal backend's host side on whatever driver there is: the stand-in on Linux, Apple's on a
// Mac.

#include "expect_error.h"
#include "gpu_rules.h"
#include "gyre_test.h"
#include "in_threads.h"
#include "metal/test_kernels.h"
#include "test_device.h"

namespace gyre::test {
namespace {

class MetalDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_available("metal")) GTEST_SKIP() << "no Metal device here";
    device_.emplace(Device::open("metal"));
  }
  const Device& device() const { return *device_; }
  Tensor filled(uint64_t bytes, uint32_t seed) const { return test::filled(device(), bytes, seed); }
  Tensor empty(uint64_t bytes) const { return device().tensor(DType::u8, {bytes}); }

  std::optional<Device> device_;
};

TEST_F(MetalDevice, DescribesItself) {
  const DeviceInfo& info = device().info();
  EXPECT_EQ(info.name, "metal");
  EXPECT_TRUE(info.available);
  EXPECT_NE(info.description.find("shared with the host"), std::string::npos) << info.description;
  EXPECT_GT(info.memory_bytes, uint64_t{1} << 30);
  EXPECT_REFUSED(("device.open", "metal:0"), Device::open("metal:0"));
  EXPECT_EQ(device().stream(), 0u);
}

TEST_F(MetalDevice, HostCopiesOfEverySize) {
  constexpr uint64_t kSizes[] = {1, 255, 256, 16384, 16385, 3333333};
  expect_host_copies(device(), kSizes);
}

TEST_F(MetalDevice, StridedHostCopiesLeaveTheGapsAlone) { expect_strided_host_copies(device()); }

TEST_F(MetalDevice, ReusedMemoryIsZero) {
  uint64_t address = 0;
  {
    const Tensor first = filled(100000, 5);
    address = first.address();
  }
  const Tensor second = empty(100000);
  EXPECT_EQ(second.address(), address) << "nothing was reused: the test shows nothing";
  EXPECT_EQ(read_bytes(second), Bytes(100000));
  EXPECT_EQ(device().memory().reuses, 1u);
}

TEST_F(MetalDevice, AGraphFollowsItsLevels) {
  expect_levels_of_a_graph(device(), 1 << 16, record_copy);
}

TEST_F(MetalDevice, AGraphMayGoWhileItRuns) {
  expect_a_graph_may_go(device(), 1 << 20, record_copy);
}

// The barrier of a command that has nothing to do holds for those behind it.
TEST_F(MetalDevice, ACommandWithNothingToDoKeepsItsBarrier) {
  constexpr CustomLaunch kNothing = {.grid = {0, 1, 1}, .block = 64};
  for (int round = 0; round < 20; ++round) {
    const Tensor a = filled(64, 1), b = empty(64), c = empty(64), d = empty(64);
    Encoder encoder(device());
    record_copy(encoder, a, b);
    record_mix(encoder, {.a = b, .out = d, .launch = kNothing});
    EXPECT_EQ(encoder.barriers(), 1u);
    record_copy(encoder, b, c);
    EXPECT_EQ(encoder.barriers(), 1u);
    encoder.submit();
    EXPECT_EQ(read_bytes(c), pattern_bytes(64, 1));
    EXPECT_EQ(read_bytes(d), Bytes(64));
  }
}

TEST_F(MetalDevice, NothingToDoIsDone) {
  Encoder encoder(device());
  EXPECT_TRUE(encoder.submit().done());
  record_mix(encoder, {.out = empty(8), .launch = {.grid = {1, 0, 1}}});
  const Graph graph = encoder.instantiate();
  EXPECT_TRUE(graph.replay().done());
}

TEST_F(MetalDevice, TellsKernelsWhatIsThereAndAligned) {
  const Tensor memory = filled(256, 7);
  const Bytes all = pattern_bytes(256, 7);
  const auto run = [&](const Tensor& a, const Tensor& b) {
    const Tensor out = empty(8);
    Encoder encoder(device());
    arguments_kernel()(encoder, uint64_t{77}, {out, a, b}, {.grid = {1, 1, 1}, .block = 32});
    encoder.submit();
    return read_bytes(out);
  };
  const auto expected = [](uint32_t word, std::byte a, std::byte b) {
    Bytes bytes(8);
    for (uint32_t i = 0; i < 4; ++i) bytes[i] = static_cast<std::byte>(word >> (8 * i));
    bytes[4] = a;
    bytes[5] = b;
    return bytes;
  };
  constexpr std::byte kSalt{77};
  const Tensor at16 = memory.slice(0, 16, 8), at17 = memory.slice(0, 17, 8);
  EXPECT_EQ(run({}, {}), expected(0x00070001, kSalt, kSalt));
  EXPECT_EQ(run(at16, {}), expected(0x00070003, all[16], kSalt));
  EXPECT_EQ(run({}, at17), expected(0x00030005, kSalt, all[17]));
  EXPECT_EQ(run(at17, at16), expected(0x00050007, all[17], all[16]));
}

TEST_F(MetalDevice, WrapsMemoryOfTheHost) {
  // Two tensors over the same bytes, on odd addresses: one begins inside the other and ends in it.
  auto host = std::make_shared<std::vector<uint8_t>>(100000);
  for (size_t i = 0; i < host->size(); ++i) (*host)[i] = static_cast<uint8_t>(i * 7);
  const std::weak_ptr<std::vector<uint8_t>> alive = host;
  const std::vector<uint8_t> before = *host;
  uint8_t* const data = host->data();
  const Tensor out = empty(50000);
  Fence fence;
  {
    const Tensor large = device().wrap(data + 1, DType::u8, {90000}, {}, host);
    const Tensor small = device().wrap(static_cast<const uint8_t*>(data) + 30001, DType::u8, {100});
    Encoder encoder(device());
    record_copy(encoder, large.slice(0, 40000, 50000), out);  // begins behind the small one
    record_copy(encoder, small, large.slice(0, 0, 100));
    EXPECT_REFUSED(("read-only"), record_copy(encoder, large.slice(0, 0, 100), small));
    fence = encoder.submit();
    host.reset();
  }
  fence.wait();
  EXPECT_TRUE(alive.expired()) << "work that is done holds nothing";
  const Bytes bytes = read_bytes(out);
  for (size_t i = 0; i < bytes.size(); ++i)
    ASSERT_EQ(static_cast<uint8_t>(bytes[i]), before[1 + 40000 + i]) << i;
}

TEST_F(MetalDevice, ReadsAndWritesWrappedMemoryInOrder) {
  std::vector<uint8_t> host(1000);
  const Tensor wrapped = device().wrap(host.data(), DType::u8, {1000}), from = filled(1000, 2);
  Encoder encoder(device());
  record_copy(encoder, from, wrapped);
  encoder.submit();
  EXPECT_EQ(read_bytes(wrapped), pattern_bytes(1000, 2)) << "a read waits for the work";
  write_bytes(wrapped, pattern_bytes(1000, 3));
  EXPECT_EQ(host[10], static_cast<uint8_t>(pattern_bytes(1000, 3)[10]));
  const Tensor none = device().wrap(static_cast<void*>(nullptr), DType::u8, {0});
  EXPECT_EQ(none.elements(), 0u);
}

TEST_F(MetalDevice, WaitsForAllThatWasSubmitted) {
  expect_wait_for_all(device(), 1 << 16, record_copy);
}

TEST_F(MetalDevice, TracesCommandsOfSubmitsAndReplays) {
  const Trace trace = expect_traced_copies(device(), "copy", record_copy);
  for (size_t i = 1; i < trace.events.size(); ++i)
    EXPECT_GE(trace.events[i].begin_ns(),
              trace.events[i - 1].begin_ns() + trace.events[i - 1].duration_ns());
}

TEST_F(MetalDevice, ServesSeveralThreads) { expect_threads_served(device(), record_copy); }

// One submission, waited for by several threads at once while others retire it.
TEST_F(MetalDevice, AFenceIsSharedByThreads) {
  const Tensor from = filled(1 << 16, 1), to = empty(1 << 16);
  for (int round = 0; round < 50; ++round) {
    Encoder encoder(device());
    record_copy(encoder, from, to);
    const Fence fence = encoder.submit();
    in_threads(3, [&](size_t i) {
      if (i == 0) device().wait();
      fence.wait();
      EXPECT_TRUE(fence.done());
    });
  }
}

TEST_F(MetalDevice, FencesAndTensorsOutliveTheDevice) {
  expect_fences_and_tensors_outlive("metal", record_copy);
}

TEST_F(MetalDevice, SeveralDevicesDoNotMix) {
  const Device other = Device::open("metal");
  const Tensor here = filled(64, 1), there = other.tensor(DType::u8, {64});
  Encoder encoder(device());
  EXPECT_REFUSED(("another device"), record_copy(encoder, here, there));
}

}  // namespace
}  // namespace gyre::test
