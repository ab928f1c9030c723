// Errors of the driver: out of memory at the n-th call is gyre::Error and the call can be made
// again; an error that ends all work makes every later call throw device_lost. With the fake
// driver, call by call; on a GPU, a kernel that traps.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <functional>
#include <iostream>

#include "cuda/driver.h"
#include "expect_error.h"
#include "gyre/gyre.h"
#include "tensor_bytes.h"

namespace gyre::test {
namespace {

struct Fake {
  void (*fail)(uint64_t nth, int result) = nullptr;
  uint64_t (*calls)() = nullptr;
};

Fake fake() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) return {};
  return {reinterpret_cast<void (*)(uint64_t, int)>(dlsym(library, "gyre_fake_cuda_fail")),
          reinterpret_cast<uint64_t (*)()>(dlsym(library, "gyre_fake_cuda_calls"))};
}

bool has_gpu() {
  for (const DeviceInfo& info : devices()) {
    if (info.name == "cuda:0") return info.available;
  }
  return false;
}

// How a call that failed is dealt with.
struct Attempts {
  ErrorCode expected = ErrorCode::out_of_memory;
  uint64_t failed = 0;

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
};

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
  again([&] { cache.extend(encoder, 2); });
  again([&] { cache.append(encoder, 0, k, k); });
  again([&] { encoder.submit().wait(); });
  KvCache copy = again([&] { return cache.fork(encoder); });
  again([&] { encoder.submit().wait(); });
  const Tensor out = again([&] { return device.tensor(DType::f16, {2, 1, 16}); });
  again([&] { copy.attend(encoder, 0, {.q = k, .out = out}); });
  const Graph graph = again([&] { return encoder.instantiate(); });
  again([&] { graph.replay().wait(); });
  EXPECT_EQ(copy.length(), 2u);
  return again([&] { return read_bytes(k); });
}

class CudaFaults : public testing::Test {
 protected:
  void SetUp() override {
    if (fake_.fail == nullptr || !has_gpu()) GTEST_SKIP() << "not the fake driver";
  }
  void TearDown() override {
    if (fake_.fail != nullptr) fake_.fail(0, cuda::kCuSuccess);
  }
  Fake fake_ = fake();
};

TEST_F(CudaFaults, OutOfMemoryAtEveryCallCanBeTriedAgain) {
  Attempts none;
  fake_.fail(0, cuda::kCuSuccess);
  const Bytes expected = run(none);
  const uint64_t calls = fake_.calls();
  ASSERT_GE(calls, 20u);
  for (uint64_t n = 1; n <= calls; ++n) {
    Attempts again;
    fake_.fail(n, cuda::kCuOutOfMemory);
    ASSERT_NO_THROW(ASSERT_EQ(run(again), expected)) << "call " << n << " of " << calls;
    EXPECT_LE(again.failed, 1u) << "call " << n;
  }
  std::cout << calls << " driver calls failed for want of memory, one in each run\n";
}

TEST_F(CudaFaults, ALostDeviceStaysLostUntilItIsOpenedAgain) {
  Attempts none;
  fake_.fail(0, cuda::kCuSuccess);
  const Bytes expected = run(none);
  const uint64_t calls = fake_.calls();
  for (uint64_t n = 1; n <= calls; ++n) {
    Attempts lost{.expected = ErrorCode::device_lost};
    fake_.fail(n, cuda::kCuLaunchFailed);
    EXPECT_TRUE(throws_error(ErrorCode::device_lost, {}, [&] { run(lost); }))
        << "call " << n << " of " << calls;
    fake_.fail(0, cuda::kCuSuccess);
    ASSERT_NO_THROW(ASSERT_EQ(run(none), expected)) << "after call " << n;
  }
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
  if (fake().fail != nullptr || !has_gpu()) GTEST_SKIP() << "no CUDA device here";
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
