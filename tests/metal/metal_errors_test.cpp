// What the Metal backend says when memory, the compiler or the GPU fails.
#include <chrono>
#include <thread>

#include "expect_error.h"
#include "gyre_test.h"
#include "metal/test_kernels.h"
#include "metal_host/standin_driver.h"
#include "tensor_bytes.h"
#include "test_device.h"

namespace gyre::test {
namespace {

using namespace metal_host;

constexpr const char* kFault = "Caused GPU Address Fault Error (0000000b)";

class MetalErrors : public testing::Test {
 protected:
  void TearDown() override {
    fail_buffer_after(~uint64_t{0});
    fail_begin_after(~uint64_t{0});
    fail_commit_after(~uint64_t{0}, "");
    fail_compile("");
    set_standin_reason("");
    set_standin_max_threads(1024);
    EXPECT_TRUE(standin_violations().empty()) << standin_violations()[0];
  }
  static Tensor filled(const Device& device, uint64_t bytes, uint32_t seed) {
    Tensor tensor = device.tensor(DType::u8, {bytes});
    write_bytes(tensor, pattern_bytes(bytes, seed));
    return tensor;
  }
};

TEST_F(MetalErrors, WithoutAGpuTheReasonIsSaid) {
  set_standin_reason("the GPU is too old");
  EXPECT_FALSE(is_available("metal"));
  for (const DeviceInfo& info : devices()) {
    if (info.name != "metal") continue;
    EXPECT_EQ(info.reason, "the GPU is too old");
  }
  EXPECT_ERROR(unsupported, ("device.open", "metal", "too old"), Device::open("metal"));
  metal::set_driver_for_test(nullptr);
  EXPECT_ERROR(unsupported, ("device.open", "metal"), Device::open("metal"));
  metal::set_driver_for_test(&standin_driver());
}

TEST_F(MetalErrors, OutOfMemoryWaitsForWorkAndTrimsFirst) {
  const Device device = Device::open("metal");
  { const Tensor cached = device.tensor(DType::u8, {1 << 16}); }
  EXPECT_EQ(device.memory().cached_bytes, 1u << 16);
  fail_buffer_after(0);  // a second try succeeds
  const Tensor first = device.tensor(DType::u8, {1 << 20});
  EXPECT_EQ(read_bytes(first), Bytes(1 << 20));
  EXPECT_ERROR(out_of_memory, ("allocate", "bytes are in use"),
               device.tensor(DType::u8, {uint64_t{1} << 40}));
  EXPECT_EQ(device.memory().cached_bytes, 0u) << "what was cached may have been what is missing";
  EXPECT_EQ(device.memory().in_use_bytes, 1u << 20);
  fail_buffer_after(0);
  EXPECT_ERROR(out_of_memory, ("metal", "no memory for a buffer"), Device::open("metal"));
}

TEST_F(MetalErrors, MemoryThatWorkHoldsIsWaitedFor) {
  constexpr uint64_t kBytes = 1 << 20;
  const Device device = Device::open("metal");
  const Tensor to = device.tensor(DType::u8, {kBytes});
  Encoder encoder(device);
  record_copy(encoder, device.tensor(DType::u8, {kBytes}), to);
  set_standin_memory(kBytes);
  auto hold = std::make_unique<HoldQueues>();
  encoder.submit();
  std::thread release([held = std::move(hold)]() mutable {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    held.reset();
  });
  const Tensor large = device.tensor(DType::u8, {2 * kBytes});  // what is left, and what was copied
  release.join();
  EXPECT_EQ(read_bytes(large), Bytes(2 * kBytes));
  set_standin_memory(uint64_t{1} << 40);
}

TEST_F(MetalErrors, MemoryThatMetalDoesNotTakeIsRefused) {
  const Device device = Device::open("metal");
  std::vector<float> host(100);
  fail_buffer_after(0);
  EXPECT_ERROR(unsupported, ("device.wrap", "write_from"),
               device.wrap(host.data(), DType::f32, {100}));
  EXPECT_ERROR(unsupported, ("device.wrap", "write_from"),
               device.wrap(host.data(), DType::f32, {uint64_t{1} << 40}));
}

TEST_F(MetalErrors, ACommandBufferThatCannotBeHadLeavesTheListRecorded) {
  const Device device = Device::open("metal");
  const Tensor a = filled(device, 100, 1), b = device.tensor(DType::u8, {100});
  Encoder encoder(device);
  record_copy(encoder, a, b);
  fail_begin_after(0);
  EXPECT_ERROR(out_of_memory, ("metal", "command buffer"), encoder.submit());
  EXPECT_EQ(encoder.size(), 1u);
  encoder.submit().wait();
  EXPECT_EQ(read_bytes(b), pattern_bytes(100, 1));
}

TEST_F(MetalErrors, AFaultIsKeptByFencesAndEndsTheDevice) {
  const Device device = Device::open("metal");
  const Tensor a = filled(device, 100, 1), b = device.tensor(DType::u8, {100});
  Encoder encoder(device);
  Fence good, bad, after;
  {
    const HoldQueues hold;
    record_copy(encoder, a, b);
    good = encoder.submit();
    record_copy(encoder, a, b);
    record_mix(encoder, {.a = a, .out = b});
    fail_commit_after(0, kFault);
    bad = encoder.submit();
    record_copy(encoder, a, b);
    after = encoder.submit();
    EXPECT_FALSE(good.done() || bad.done() || after.done());
  }
  for (int i = 0; i < 2; ++i) {
    for (const Fence& fence : {bad, after}) {
      EXPECT_ERROR(
          device_lost,
          (kFault, "in one of 2 commands: copy (", "mix (", "check_each_launch", "no more work"),
          fence.wait());
      EXPECT_TRUE(fence.done());
    }
  }
  good.wait();
  const auto lost = [&](const auto& call) {
    return throws_error(ErrorCode::device_lost, {kFault}, call);
  };
  EXPECT_TRUE(lost([&] { device.wait(); }));
  EXPECT_TRUE(lost([&] { read_bytes(b); }));
  EXPECT_TRUE(lost([&] { write_bytes(b, pattern_bytes(100, 2)); }));
  record_copy(encoder, a, b);
  EXPECT_TRUE(lost([&] { encoder.submit(); }));
  const Graph graph = encoder.instantiate();
  EXPECT_TRUE(lost([&] { graph.replay(); }));
  // Another device is not concerned.
  const Device other = Device::open("metal");
  const Tensor c = filled(other, 100, 3), d = other.tensor(DType::u8, {100});
  Encoder next(other);
  record_copy(next, c, d);
  next.submit().wait();
  EXPECT_EQ(read_bytes(d), pattern_bytes(100, 3));
}

TEST_F(MetalErrors, CheckEachLaunchNamesTheCommand) {
  const Device device = Device::open("metal", {.check_each_launch = true});
  const Tensor a = filled(device, 100, 1), b = device.tensor(DType::u8, {100});
  Encoder encoder(device);
  for (const bool replayed : {false, true}) {
    record_copy(encoder, a, b);
    record_mix(encoder, {.a = b, .out = device.tensor(DType::u8, {8})});
    const StandinCounts before = standin_counts();
    if (replayed) {
      EXPECT_TRUE(encoder.instantiate().replay().done());
    } else {
      EXPECT_TRUE(encoder.submit().done());
    }
    EXPECT_EQ(standin_counts().committed - before.committed, 2u);
  }
  EXPECT_EQ(read_bytes(b), pattern_bytes(100, 1));
  record_copy(encoder, a, b);
  record_mix(encoder, {.a = b, .out = device.tensor(DType::u8, {8})});
  fail_commit_after(1, kFault);
  EXPECT_ERROR(device_lost, (kFault, " in mix (", "no more work"), encoder.submit());
}

TEST_F(MetalErrors, AFaultWhileTracingIsThrown) {
  const Device device = Device::open("metal");
  const Tensor a = filled(device, 100, 1), b = device.tensor(DType::u8, {100});
  Encoder encoder(device);
  record_copy(encoder, a, b);
  device.start_trace();
  fail_commit_after(0, kFault);
  EXPECT_ERROR(device_lost, (kFault, " in copy ("), encoder.submit());
  EXPECT_TRUE(device.stop_trace().events.empty());
}

CustomKernel own_kernel(const std::string& source, const std::string& name) {
  return CustomKernel({.name = "own",
                       .args = {{"out", Access::write}},
                       .params_bytes = 8,
                       .metal = {source, name}});
}

TEST_F(MetalErrors, CodeThatDoesNotCompileIsRemembered) {
  const Device device = Device::open("metal");
  const Tensor out = device.tensor(DType::u8, {8});
  const CustomKernel kernel = own_kernel("kernel void test_arguments(){} // one", "test_arguments");
  fail_compile("program_source:1:1: error: unknown type name 'kernal'");
  const uint64_t before = standin_counts().compiled;
  Encoder encoder(device);
  kernel(encoder, uint64_t{1}, {out}, {});
  for (int i = 0; i < 3; ++i) {
    EXPECT_ERROR(compile_failed, ("own", "unknown type name 'kernal'"), encoder.submit());
  }
  EXPECT_EQ(standin_counts().compiled, before + 1);
  EXPECT_EQ(encoder.size(), 1u) << "the list stays recorded";
  Encoder second(device);
  own_kernel("kernel void test_arguments(){} // one", "test_other")(second, uint64_t{1}, {out}, {});
  EXPECT_ERROR(compile_failed, ("kernal"), second.submit());
  EXPECT_EQ(standin_counts().compiled, before + 1) << "it is the same text";
  fail_compile("");
  EXPECT_ERROR(compile_failed, ("kernal"), encoder.instantiate());
}

TEST_F(MetalErrors, AFunctionThatIsNotInTheTextIsNamed) {
  const Device device = Device::open("metal");
  Encoder encoder(device);
  own_kernel("kernel void other() {}", "missing")(encoder, uint64_t{1},
                                                  {device.tensor(DType::u8, {8})}, {});
  EXPECT_ERROR(compile_failed, ("own", "missing"), encoder.submit());
}

TEST_F(MetalErrors, ATextIsCompiledOnceAndAKernelMadeOnce) {
  const Device device = Device::open("metal");
  const Tensor a = filled(device, 100, 1), b = device.tensor(DType::u8, {100});
  const StandinCounts before = standin_counts();
  for (int i = 0; i < 3; ++i) {
    Encoder encoder(device);
    record_mix(encoder, {.a = a, .out = b});
    record_copy(encoder, a, b);
    encoder.submit();
  }
  EXPECT_EQ(standin_counts().compiled, before.compiled + 1);
  EXPECT_EQ(standin_counts().pipelines, before.pipelines + 2);
}

// A thread that builds may hold a kernel a moment longer than those who use it.
bool pipelines_become(uint64_t count) {
  for (int i = 0; i < 5000 && standin_counts().pipelines != count; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return standin_counts().pipelines == count;
}

TEST_F(MetalErrors, CodeIsLetGoOfWhenNothingUsesIt) {
  const Device device = Device::open("metal");
  const Tensor out = device.tensor(DType::u8, {8});
  const StandinCounts before = standin_counts();
  Encoder encoder(device);
  const auto record = [&](int i) {
    own_kernel("kernel void test_arguments(){} // gone " + std::to_string(i), "test_arguments")(
        encoder, uint64_t{1}, {out}, {});
  };
  for (int i = 0; i < 100; ++i) {
    record(i);
    encoder.submit().wait();
  }
  EXPECT_LE(standin_counts().pipelines, before.pipelines + 40);
  EXPECT_LE(standin_counts().libraries, before.libraries + 40);
  device.trim();
  EXPECT_TRUE(pipelines_become(before.pipelines));
  Fence fence;
  {
    const HoldQueues hold;
    record(0);
    fence = encoder.submit();
    device.trim();
    EXPECT_EQ(standin_counts().pipelines, before.pipelines + 1) << "work in flight uses it";
  }
  fence.wait();
  EXPECT_TRUE(pipelines_become(before.pipelines));
  record(1);
  {
    const Graph graph = encoder.instantiate();
    device.trim();
    EXPECT_EQ(standin_counts().pipelines, before.pipelines + 1);
  }
  EXPECT_TRUE(pipelines_become(before.pipelines));
}

// The whole list is checked before its first command runs.
TEST_F(MetalErrors, ALaunchThatIsRefusedRunsNothingOfItsList) {
  set_standin_max_threads(256);
  const Device device = Device::open("metal");
  const Tensor a = filled(device, 100, 1), b = device.tensor(DType::u8, {100});
  Encoder encoder(device);
  for (const bool traced : {false, true}) {
    encoder.clear();
    record_copy(encoder, a, b);
    record_mix(encoder, {.out = b, .launch = {.block = 257}});
    if (traced) device.start_trace();
    EXPECT_ERROR(unsupported, ("mix", "257"), encoder.submit());
    if (traced) {
      EXPECT_TRUE(device.stop_trace().events.empty());
    }
    EXPECT_EQ(encoder.size(), 2u);
    EXPECT_EQ(read_bytes(b), Bytes(100));
  }
}

TEST_F(MetalErrors, LaunchesThatThePipelineCannotRunAreRefused) {
  set_standin_max_threads(256);
  const Device device = Device::open("metal");
  const Tensor out = device.tensor(DType::u8, {8});
  Encoder encoder(device);
  const auto run = [&](const CustomLaunch& launch) {
    encoder.clear();
    record_mix(encoder, {.out = out, .launch = launch});
    encoder.submit().wait();
  };
  run({.block = 256, .shared_bytes = 32768});
  run({.block = 1, .shared_bytes = 3});  // rounded up
  EXPECT_ERROR(unsupported, ("mix", "stand-in", "256", "257"), run({.block = 257}));
  EXPECT_ERROR(unsupported, ("mix", "threadgroup memory", "32768", "32769"),
               run({.block = 32, .shared_bytes = 32769}));
  EXPECT_ERROR(unsupported, ("threadgroup memory"), run({.block = 32, .shared_bytes = ~0u}));
  run({.block = 32});  // nothing was lost by it
}

TEST_F(MetalErrors, CodeForOtherDevicesOnlyIsRefused) {
  const Device device = Device::open("metal");
  const CustomKernel kernel({.name = "elsewhere",
                             .args = {{"out", Access::write}},
                             .params_bytes = 8,
                             .cuda = {"source", "name"}});
  EXPECT_FALSE(supports(device, kernel));
  EXPECT_TRUE(supports(device, mix_kernel()));
  EXPECT_FALSE(supports(Device::open("cpu"), mix_kernel()));
  Encoder encoder(device);
  EXPECT_ERROR(unsupported, ("elsewhere", "metal"),
               kernel(encoder, uint64_t{1}, {device.tensor(DType::u8, {8})}, {}));
  EXPECT_REFUSED(("Metal code needs both"), own_kernel("source", ""));
  EXPECT_REFUSED(("Metal code needs both"), own_kernel("", "name"));
}

}  // namespace
}  // namespace gyre::test
