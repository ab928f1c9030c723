// Devices that are closed with work in flight, memory that work holds, children of fork().
#include <thread>

#include "child_process.h"
#include "expect_error.h"
#include "gyre_test.h"
#include "metal/test_kernels.h"
#include "metal_host/standin_driver.h"
#include "tensor_bytes.h"

namespace gyre::test {
namespace {

using namespace metal_host;

TEST(MetalLife, MemoryComesBackWhenItsWorkIsDone) {
  const Device device = Device::open("metal");
  const Tensor to = device.tensor(DType::u8, {1 << 16});
  Encoder encoder(device);
  std::weak_ptr<Storage> scratch;
  Fence fence;
  {
    const HoldQueues hold;
    {
      const Tensor from = device.tensor(DType::u8, {1 << 16});
      write_bytes(from, pattern_bytes(1 << 16, 4));
      scratch = storage_of(from);
      record_copy(encoder, from, to);
      fence = encoder.submit();
    }
    EXPECT_FALSE(scratch.expired()) << "submitted work holds it";
    const Tensor other = device.tensor(DType::u8, {1 << 16});
    EXPECT_EQ(device.memory().reuses, 0u) << "memory in use was handed out";
  }
  fence.wait();
  EXPECT_TRUE(scratch.expired());
  EXPECT_EQ(read_bytes(to), pattern_bytes(1 << 16, 4));
  const Tensor next = device.tensor(DType::u8, {1 << 16});
  EXPECT_EQ(device.memory().reuses, 1u);
  EXPECT_EQ(read_bytes(next), Bytes(1 << 16));
}

// Memory of finished work is had again without a wait.
TEST(MetalLife, SteadyStateTakesNoNewMemory) {
  const Device device = Device::open("metal");
  const Tensor to = device.tensor(DType::u8, {5000});
  for (int i = 0; i < 50; ++i) {
    const Tensor from = device.tensor(DType::u8, {5000});
    Encoder encoder(device);
    record_copy(encoder, from, to);
    const Fence fence = encoder.submit();
    while (!fence.done()) std::this_thread::yield();
  }
  EXPECT_EQ(device.memory().system_allocations, 2u);
}

TEST(MetalLife, ADeviceIsClosedWithWorkInFlight) {
  const StandinCounts before = standin_counts();
  {
    std::vector<Fence> fences;
    std::thread release;
    {
      const Device device = Device::open("metal");
      const Tensor a = device.tensor(DType::u8, {4096}), b = device.tensor(DType::u8, {4096});
      Encoder encoder(device);
      record_copy(encoder, a, b);
      const Graph graph = encoder.instantiate();
      auto hold = std::make_unique<HoldQueues>();
      for (int i = 0; i < 10; ++i) {
        record_copy(encoder, a, b);
        fences.push_back(encoder.submit());
        fences.push_back(graph.replay());
      }
      EXPECT_FALSE(fences.front().done());
      release = std::thread([held = std::move(hold)]() mutable {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        held.reset();
      });
    }
    for (const Fence& fence : fences) {
      EXPECT_TRUE(fence.done()) << "closing waits for the work";
      fence.wait();
    }
    release.join();
  }
  const StandinCounts after = standin_counts();
  EXPECT_EQ(after.buffers, before.buffers);
  EXPECT_EQ(after.queues, before.queues);
  EXPECT_EQ(after.libraries, before.libraries);
  EXPECT_EQ(after.pipelines, before.pipelines);
  EXPECT_EQ(after.commands, before.commands);
  EXPECT_TRUE(standin_violations().empty()) << standin_violations()[0];
}

// What a child does with everything that its parent had. 0: as promised.
int child(const Device& device, const Graph& graph, const Fence& fence, const Tensor& tensor) {
  if (!is_lost([&] { device.tensor(DType::f32, {1024}); })) return 1;
  if (!is_lost([&] { graph.replay(); })) return 2;
  if (!is_lost([&] { read_bytes(tensor); })) return 3;
  if (!is_lost([&] { device.wait(); })) return 4;
  if (!fence.done() && !is_lost([&] { fence.wait(); })) return 5;
  if (!is_lost([&] {
        Encoder encoder(device);
        record_copy(encoder, tensor, tensor);
      }))
    return 6;
  return 0;
}

TEST(MetalLife, AChildOfForkIsRefusedInsteadOfHanging) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "thread sanitizer does not follow fork() of a process with threads";
#endif
  auto device = std::make_unique<Device>(Device::open("metal"));
  auto a = std::make_unique<Tensor>(device->tensor(DType::u8, {4096}));
  auto b = std::make_unique<Tensor>(device->tensor(DType::u8, {4096}));
  auto wrapped = std::make_unique<Tensor>(device->wrap(address_of(*a), DType::u8, {100}));
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) {
      Encoder own(*device);
      const Tensor more = device->tensor(DType::u8, {333});
      record_copy(own, *a, *b);
      own.submit();
    }
  });
  auto encoder = std::make_unique<Encoder>(*device);
  record_copy(*encoder, *a, *b);
  auto graph = std::make_unique<Graph>(encoder->instantiate());
  for (int i = 0; i < 30; ++i) {
    if (i == 20) {  // from now on nobody else holds the device: the child closes it
      stop = true;
      busy.join();
    }
    record_copy(*encoder, *a, *b);
    auto fence = std::make_unique<Fence>(encoder->submit());
    expect_child([&] {
      const int result = child(*device, *graph, *fence, *b);
      // Destructors do not wait, either.
      fence.reset();
      graph.reset();
      encoder.reset();
      wrapped.reset();
      a.reset();
      b.reset();
      device.reset();
      return result;
    });
  }
}

}  // namespace
}  // namespace gyre::test
