// Errors of the driver: out of memory at the n-th call is gyre::Error and the call can be made
// again; an error that ends all work makes every later call throw device_lost. With the fake
// driver, call by call; on a GPU, a kernel that traps.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <thread>

#include "cuda/driver.h"
#include "cuda/fake_controls.h"
#include "expect_error.h"
#include "folder.h"
#include "gyre_test.h"
#include "tensor_bytes.h"
#include "test_device.h"

namespace gyre::test {
namespace {

// How a call that failed is dealt with.
struct Attempts {
  ErrorCode expected = ErrorCode::out_of_memory;
  uint64_t failed = 0;
  uint64_t kernels = 0;  // that enter() ran
  uint64_t early = 0;    // work that had not ended when what it uses was let go

  template <class Call>
  decltype(auto) operator()(const Call& call) {
    for (int i = 0;; ++i) {
      try {
        return call();
      } catch (const Error& error) {
        if (error.code() != expected || expected == ErrorCode::device_lost || i == 3) throw;
        ++failed;
      }
    }
  }
  // A submit or a replay: however often it is tried, its list runs once.
  template <class Call>
  Fence enter(const Call& call) {
    const uint64_t before = fake().kernels_run();
    const Fence fence = (*this)(call);
    kernels += fake().kernels_run() - before;
    return fence;
  }
};

// Lists of two commands over memory whose owner must outlive them. Nobody waits for them, until the
// next list enters.
void record_wrapped(Attempts& again, Encoder& encoder, const Tensor& memory, const Tensor& to) {
  const std::shared_ptr<void> owner(&again, [](Attempts* of) { of->early += fake().unseen(); });
  const Tensor wrapped = again([&] {
    return encoder.device().wrap(address_of(memory), DType::f16, memory.shape(), {}, owner);
  });
  again([&] { kv_copy(encoder, {.k = wrapped, .k_cache = to}); });
  again([&] { kv_copy(encoder, {.k = wrapped, .k_cache = to}); });
}

// Opens a device, copies by submit and replay, and reads back what it copied.
Bytes run(Attempts& again) {
  const Device device =
      again([] { return Device::open("cuda:0", {.pool_limit_bytes = 0, .kernel_cache = "off"}); });
  Encoder encoder(device);
  KvCache cache = again([&] {
    return KvCache(device, {.kv_heads = 1,
                            .head_dim = 16,
                            .capacity = 16,
                            .layers = {{.k = KvFormat::f16, .v = KvFormat::f16}},
                            .step_tokens = 4});
  });
  const Tensor k = again([&] { return device.tensor(DType::f16, {2, 1, 16}); });
  const Bytes pattern = pattern_bytes(k.bytes(), 3);
  again([&] { write_bytes(k, pattern); });
  again([&] { cache.begin_step(encoder, 2); });
  again([&] { cache.append(encoder, 0, k, k); });
  const auto submit = [&] { return encoder.submit(); };
  again.enter(submit).wait();
  const Tensor to = again([&] { return device.tensor(DType::f16, {2, 1, 16}); });
  for (int i = 0; i < 2; ++i) {
    record_wrapped(again, encoder, k, to);
    again.enter(submit);
    record_wrapped(again, encoder, k, to);
    again.enter([&] { return encoder.submit_on(foreign_stream()); });
  }
  KvCache copy = again([&] { return cache.fork(encoder); });
  again.enter(submit).wait();
  const Tensor out = again([&] { return device.tensor(DType::f16, {2, 1, 16}); });
  again([&] { copy.attend(encoder, 0, {.q = k, .out = out}); });
  const Graph graph = again([&] { return encoder.instantiate(); });
  again.enter([&] { return graph.replay(); }).wait();
  again([&] { device.start_trace(); });
  again.enter([&] { return graph.replay(); }).wait();
  record_wrapped(again, encoder, k, to);
  again.enter(submit);
  const Trace trace = again([&] { return device.stop_trace(); });
  EXPECT_EQ(trace.events.size() + trace.dropped, graph.size() + 2u);
  EXPECT_EQ(copy.length(), 2u);
  again([&] { device.wait(); });
  return again([&] { return read_bytes(k); });
}

class CudaFaults : public testing::Test {
 protected:
  void SetUp() override {
    if (fake().fail == nullptr || !is_available("cuda:0")) GTEST_SKIP() << "not the fake driver";
    foreign_stream();
  }
  void TearDown() override {
    if (fake().fail != nullptr) fake().fail(0, 0, cuda::kCuSuccess);
  }
};

TEST_F(CudaFaults, OutOfMemoryAtEveryCallCanBeTriedAgain) {
  Attempts none;
  fake().fail(0, 0, cuda::kCuSuccess);
  const Bytes expected = run(none);
  const uint64_t calls = fake().calls();
  ASSERT_GE(calls, 20u);
  for (uint64_t n = 1; n <= calls; ++n) {
    Attempts again;
    fake().fail(n, 1, cuda::kCuOutOfMemory);
    ASSERT_NO_THROW(ASSERT_EQ(run(again), expected)) << "call " << n << " of " << calls;
    EXPECT_LE(again.failed, 1u) << "call " << n;
    EXPECT_EQ(again.kernels, none.kernels) << "call " << n << ": a list ran twice, or not at all";
    EXPECT_EQ(again.early, 0u) << "call " << n << ": memory was let go while work used it";
  }
  std::cout << calls << " driver calls failed for want of memory, one in each run\n";
}

TEST_F(CudaFaults, ALostDeviceStaysLostUntilItIsOpenedAgain) {
  Attempts none;
  fake().fail(0, 0, cuda::kCuSuccess);
  const Bytes expected = run(none);
  const uint64_t calls = fake().calls();
  for (uint64_t n = 1; n <= calls; ++n) {
    Attempts lost{.expected = ErrorCode::device_lost};
    fake().fail(n, 1, cuda::kCuLaunchFailed);
    EXPECT_TRUE(throws_error(ErrorCode::device_lost, {}, [&] { run(lost); }))
        << "call " << n << " of " << calls;
    fake().fail(0, 0, cuda::kCuSuccess);
    ASSERT_NO_THROW(ASSERT_EQ(run(none), expected)) << "after call " << n;
  }
}

// The staging memory is the next call's, too: a copy that fails behind its launch is waited for.
TEST_F(CudaFaults, ACopyThatFailsLeavesNoneInFlight) {
  const Device device = Device::open("cuda:0", {.kernel_cache = "off"});
  const Tensor a = device.tensor(DType::f16, {2, 1, 16});
  std::vector<Half> values(a.elements());
  device.wait();
  for (const bool write : {false, true}) {
    const auto copy = [&] {
      write ? a.write_from(std::span<const Half>(values)) : a.read_to(std::span(values));
    };
    copy();  // staging memory and events are there
    ASSERT_EQ(fake().unseen(), 0u);
    for (uint64_t n = 1; n <= 2; ++n) {  // the copy, its event
      fake().fail(n, 1, cuda::kCuOutOfMemory);
      EXPECT_TRUE(throws_error(ErrorCode::out_of_memory, {"cuda:0"}, copy)) << write << n;
      EXPECT_EQ(fake().unseen(), 0u) << write << n;
    }
    copy();
  }
}

// A list that was launched and whose wait fails, for want of memory, too, has run or will.
TEST_F(CudaFaults, ALoadWhoseWaitFailsIsNotRead) {
  const Device device = Device::open("cuda:0", {.kernel_cache = "off"});
  KvCache cache(device, {.kv_heads = 1, .head_dim = 16, .capacity = 8});
  Encoder encoder(device);
  const Tensor k = device.tensor(DType::f16, {1, 1, 16});
  cache.begin_step(encoder, 1);
  cache.append(encoder, 0, k, k);
  encoder.submit().wait();
  const Folder folder;
  const auto load = [&] { cache.load(folder / "a"); };
  const auto save = [&] { cache.save(folder / "a"); };
  save();
  const uint64_t before = fake().kernels_run();
  fake().fail_wait(cuda::kCuOutOfMemory);
  EXPECT_TRUE(throws_error(ErrorCode::out_of_memory, {"cuda:0"}, load));
  EXPECT_GT(fake().kernels_run(), before);
  EXPECT_TRUE(throws_error(ErrorCode::invalid_argument, {"load ended in the middle"}, save));
  load();
  EXPECT_NO_THROW(save());
}

// One launch is tried again at once; if that fails, too, a list of which nothing has run is left to
// the caller, and one of which a part has run must not be run again.
TEST_F(CudaFaults, AListThatCannotGoOnEndsTheDevice) {
  const Device device = Device::open("cuda:0", {.kernel_cache = "off"});
  const Tensor a = device.tensor(DType::f16, {2, 1, 16}), b = device.tensor(DType::f16, {2, 1, 16});
  Encoder encoder(device);
  const auto record = [&] {
    kv_copy(encoder, {.k = a, .k_cache = b});
    kv_copy(encoder, {.k = b, .k_cache = a});
  };
  const auto submit = [&] { encoder.submit().wait(); };
  record();
  submit();  // kernels and an event are there: the calls that follow are launches
  record();
  const uint64_t before = fake().kernels_run();
  fake().fail(1, 1, cuda::kCuInvalidValue);
  EXPECT_TRUE(throws_error(ErrorCode::unsupported, {"cuda:0", "kv_copy"}, submit));
  fake().fail(1, 2, cuda::kCuOutOfMemory);
  EXPECT_TRUE(throws_error(ErrorCode::out_of_memory, {"cuda:0", "kv_copy"}, submit));
  EXPECT_EQ(fake().kernels_run(), before);
  EXPECT_EQ(encoder.size(), 2u);
  submit();
  EXPECT_EQ(fake().kernels_run(), before + 2);
  record();
  fake().fail(2, 2, cuda::kCuOutOfMemory);
  EXPECT_TRUE(
      throws_error(ErrorCode::device_lost, {"cuda:0", "in kv_copy", "no more work"}, submit));
  EXPECT_EQ(fake().unseen(), 0u);
  EXPECT_TRUE(throws_error(ErrorCode::device_lost, {"in kv_copy"}, submit));
  EXPECT_ERROR(device_lost, ("in kv_copy"), device.wait());
  EXPECT_EQ(fake().kernels_run(), before + 3);
}

// A driver that refuses a launch in the middle, for whatever reason, leaves a list half run.
TEST_F(CudaFaults, AListThatIsRefusedInTheMiddleEndsTheDevice) {
  const Device device = Device::open("cuda:0", {.kernel_cache = "off"});
  const Tensor a = device.tensor(DType::f16, {2, 1, 16}), b = device.tensor(DType::f16, {2, 1, 16});
  Encoder encoder(device);
  for (const bool fails : {false, true}) {
    kv_copy(encoder, {.k = a, .k_cache = b});
    kv_copy(encoder, {.k = b, .k_cache = a});
    if (fails) break;
    encoder.submit().wait();
  }
  fake().fail(2, 1, cuda::kCuInvalidValue);
  EXPECT_ERROR(device_lost, ("cuda:0", "in kv_copy", "no more work"), encoder.submit());
  EXPECT_EQ(fake().unseen(), 0u) << "what was launched may use what the caller holds";
}

CustomKernel custom_kernel(const std::string& name) {
  return CustomKernel({.name = name,
                       .args = {{"x", Access::read_write}},
                       .params_bytes = 8,
                       .cuda = {"__global__ void " + name + "() {}", name}});
}

// Launches are checked, all of them, before the first.
TEST_F(CudaFaults, AGeometryThatCannotBeRunsNothingOfItsList) {
  const Device device = Device::open("cuda:0", {.kernel_cache = "off"});
  const Tensor x = device.tensor(DType::f32, {32});
  const CustomKernel wide = custom_kernel("wide"), narrow = custom_kernel("narrow");
  Encoder encoder(device);
  const auto record = [&](const CustomLaunch& launch) {
    encoder.clear();
    wide(encoder, uint64_t{0}, {x}, {.block = 1024});
    narrow(encoder, uint64_t{0}, {x}, launch);
  };
  record({.block = 64, .shared_bytes = 1 << 17});
  encoder.submit().wait();
  const uint64_t before = fake().kernels_run();
  const std::vector<std::pair<CustomLaunch, std::vector<std::string>>> bad = {
      {{.block = 65}, {"narrow", "cuda:0", "threads", "at most 64", "asks for 65"}},
      {{.block = 64, .shared_bytes = (1 << 17) + 1}, {"narrow", "shared memory", "131073"}}};
  for (const auto& [launch, words] : bad) {
    record(launch);
    const auto is_refused = [&](const auto& call) {
      return throws_error(ErrorCode::unsupported, words, call);
    };
    EXPECT_TRUE(is_refused([&] { encoder.submit(); }));
    EXPECT_TRUE(is_refused([&] { encoder.submit_on(foreign_stream()); }));
    EXPECT_TRUE(is_refused([&] { encoder.instantiate(); }));
    device.start_trace();
    EXPECT_TRUE(is_refused([&] { encoder.submit(); }));
    EXPECT_TRUE(device.stop_trace().events.empty());
    EXPECT_EQ(encoder.size(), 2u) << "the list stays recorded";
  }
  EXPECT_EQ(fake().kernels_run(), before);
  record({.block = 64});
  encoder.submit().wait();
  EXPECT_EQ(fake().kernels_run(), before + 2);
}

// They do not wait for what is ahead: they begin when it has ended. What follows them waits.
TEST_F(CudaFaults, CustomKernelsDoNotBeginEarly) {
  const Device device = Device::open("cuda:0", {.kernel_cache = "off"});
  const Tensor a = device.tensor(DType::f16, {2, 1, 16}), b = device.tensor(DType::f16, {2, 1, 16});
  const CustomKernel own = custom_kernel("own");
  Encoder encoder(device);
  kv_copy(encoder, {.k = a, .k_cache = b});
  own(encoder, uint64_t{0}, {a}, {.block = 32});
  kv_copy(encoder, {.k = a, .k_cache = b});
  encoder.submit().wait();
  EXPECT_EQ(fake().overlaps() & 7, 1u);
}

// A thread that builds may hold a kernel a moment longer than those who use it.
testing::AssertionResult modules_become(int64_t count) {
  for (int i = 0; i < 5000 && fake().modules() != count; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (fake().modules() == count) return testing::AssertionSuccess();
  return testing::AssertionFailure() << fake().modules() << " are loaded, expected " << count;
}

TEST_F(CudaFaults, CustomKernelsAreUnloadedWhenNothingUsesThem) {
  const Device device = Device::open("cuda:0", {.kernel_cache = "off"});
  const Tensor x = device.tensor(DType::f32, {32});
  const int64_t before = fake().modules();
  const uint64_t early = fake().early_unloads();
  Encoder encoder(device);
  const auto record = [&](int i) {
    custom_kernel("gone" + std::to_string(i))(encoder, uint64_t{0}, {x}, {});
  };
  for (int i = 0; i < 200; ++i) {
    record(i);
    encoder.submit().wait();
  }
  EXPECT_LE(fake().modules() - before, 40) << "of 200";
  device.trim();
  EXPECT_TRUE(modules_become(before));
  // Held by a list, by work in flight, by a graph and its replay.
  record(1);
  device.trim();
  const Fence fence = encoder.submit();
  device.trim();
  EXPECT_EQ(fake().modules(), before + 1);
  fence.wait();
  EXPECT_TRUE(modules_become(before));
  {
    record(2);
    const Graph graph = encoder.instantiate();
    device.trim();
    graph.replay();
    EXPECT_EQ(fake().modules(), before + 1);
  }
  EXPECT_EQ(fake().modules(), before + 1) << "its replay is in flight";
  device.wait();
  EXPECT_TRUE(modules_become(before));
  EXPECT_EQ(fake().early_unloads(), early);
}

// Returns what is wrong. The process has lost its device afterwards.
std::string trap() {
  const Device device = Device::open("cuda:0", {.kernel_cache = "off"});
  const CustomKernel kernel({.name = "trap",
                             .args = {{"x", Access::read_write}},
                             .params_bytes = 8,
                             .cuda = {"struct Params { unsigned long long n; };"
                                      "struct Args { unsigned long long at[16]; };"
                                      "__global__ void trap(const Params, const Args) {"
                                      "  asm volatile(\"trap;\"); }",
                                      "trap"}});
  const Tensor x = device.tensor(DType::f32, {32});
  Encoder encoder(device);
  kernel(encoder, uint64_t{0}, {x}, {});
  std::string wrong;
  const auto expect = [&](const testing::AssertionResult& result) {
    if (!result) wrong += std::string(result.message()) + "; ";
  };
  expect(throws_error(ErrorCode::device_lost, {"trap"}, [&] { encoder.submit().wait(); }));
  expect(throws_error(ErrorCode::device_lost, {}, [&] { read_bytes(x); }));
  expect(throws_error(ErrorCode::device_lost, {}, [&] { device.tensor(DType::u8, {64}); }));
  expect(throws_error(ErrorCode::device_lost, {}, [&] { device.wait(); }));
  return wrong;
}

// In a process of its own: what a kernel broke stays broken for its process.
TEST(CudaTrap, LaterCallsThrowDeviceLost) {
  if (fake().fail != nullptr || !is_available("cuda:0")) GTEST_SKIP() << "no CUDA device here";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const std::string wrong = trap();
        std::cerr << wrong;
        std::exit(wrong.empty() ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace gyre::test
