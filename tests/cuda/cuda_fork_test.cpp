// A child of fork(): what it has of its parent's CUDA devices refuses, and goes without a wait and
// without a call of the driver, at which the fake one aborts.
#include <atomic>
#include <chrono>
#include <thread>

#include "child_process.h"
#include "expect_error.h"
#include "gyre_test.h"
#include "test_device.h"

namespace gyre::test {
namespace {

// What a program has while it decodes.
struct World {
  Device device = Device::open("cuda:0", {.kernel_cache = "off"});
  Tensor from = device.tensor(DType::f16, {64, 2, 16}), to = device.tensor(DType::f16, {64, 2, 16});
  Encoder encoder{device};
  std::optional<Graph> graph;
  std::vector<Fence> fences;

  World() {
    record();
    graph = encoder.instantiate();
    record();
    fences.push_back(encoder.submit());
    fences.push_back(graph->replay());
    record();
    device.trim();  // lists and graphs alone hold the custom kernels
  }
  void record() {
    kv_copy(encoder, {.k = from, .k_cache = to});
    const CustomKernel kernel({.name = "nothing",
                               .args = {{"x", Access::read_write}},
                               .params_bytes = 8,
                               .cuda = {"struct Params { unsigned long long n; };"
                                        "struct Args { unsigned long long at[16]; };"
                                        "__global__ void nothing(const Params, const Args) {}",
                                        "nothing"}});
    kernel(encoder, uint64_t{0}, {to}, {});
  }
};

class CudaFork : public testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "thread sanitizer does not follow fork() of a process with threads";
#endif
    if (!is_available("cuda:0")) GTEST_SKIP() << "no CUDA device here";
  }
};

TEST_F(CudaFork, AChildIsRefusedAndLetsGoWithoutAWait) {
  auto world = std::make_unique<World>();
  std::atomic<bool> stop{false};
  // They submit, take memory and give it back: locks are held most of the time.
  std::thread memory([&] {
    while (!stop) const Tensor more = world->device.tensor(DType::f32, {64});
  });
  std::thread busy([&] {
    Encoder encoder(world->device);
    while (!stop) {
      kv_copy(encoder, {.k = world->from, .k_cache = world->to});
      encoder.submit();
    }
  });
  for (int i = 0; i < 20; ++i) {
    expect_child([&] {
      std::vector<Half> values(world->to.elements());
      if (!is_lost([&] { world->device.tensor(DType::f32, {64}); })) return 1;
      if (!is_lost([&] { world->device.wait(); })) return 2;
      if (!is_lost([&] { world->graph->replay(); })) return 3;
      if (!is_lost([&] { world->encoder.submit(); })) return 4;
      if (!is_lost([&] { world->to.read_to(std::span(values)); })) return 5;
      if (!is_lost([&] { world->to.write_from(std::span<const Half>(values)); })) return 6;
      for (const Fence& fence : world->fences) {
        if (!fence.done() && !is_lost([&] { fence.wait(); })) return 7;
      }
      world.reset();
      return 0;
    });
  }
  stop = true;
  busy.join();
  memory.join();
  EXPECT_NO_THROW(world->graph->replay().wait()) << "the parent goes on";
}

// Nobody else holds the device: all of it goes.
TEST_F(CudaFork, ADeviceGoesInAChild) {
  auto world = std::make_unique<World>();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the builders wait for work
  expect_child([&] {
    world.reset();
    return 0;
  });
}

// The stream and the context go with the last of these.
TEST_F(CudaFork, WhatOutlivedItsDeviceGoesInAChild) {
  Tensor tensor;
  std::vector<Fence> fences;
  {
    World world;
    tensor = world.to;
    fences = std::move(world.fences);
  }
  expect_child([&] {
    fences.clear();
    tensor = {};
    return 0;
  });
}

TEST_F(CudaFork, AnOfflineDeviceGoesInAChild) {
  auto device = std::make_unique<Device>(Device::open("cuda:sm_90", {.kernel_cache = "off"}));
  const ModelShape shape{.heads = 4,
                         .kv_heads = 2,
                         .head_dim = 64,
                         .layers = {{.k = KvFormat::f16, .v = KvFormat::f16}},
                         .context = 256};
  prepare(*device, shape);
  expect_child([&] {
    if (!is_lost([&] { prepare(*device, shape); })) return 1;
    device.reset();
    return 0;
  });
}

}  // namespace
}  // namespace gyre::test
