// A child of fork(): the device of its parent refuses, at once; a device of its own works.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "expect_error.h"
#include "gyre/gyre.h"

namespace gyre::test {
namespace {

// What a child does with everything that its parent had. 0: as promised.
int child(const Device& device, const Graph& graph) {
  alarm(10);  // instead of a hang
  if (!is_lost([&] { device.tensor(DType::f32, {1024}); })) return 1;
  if (!is_lost([&] { graph.replay(); })) return 2;
  if (!is_lost([&] { (void)device.memory(); }) || !is_lost([&] { (void)device.kernels(); }))
    return 4;
  if (!is_lost([&] {
        Encoder encoder(device);
        kv_copy(encoder, {});
      }))
    return 3;
  {
    const Device own = Device::open("cpu", {.threads = 2});
    const Tensor a = own.tensor(DType::f32, {64, 2, 16}), b = own.tensor(DType::f32, {64, 2, 16});
    Encoder encoder(own);
    kv_copy(encoder, {.k = a, .k_cache = b});
    encoder.submit().wait();
  }
  return 0;
}

TEST(Fork, AChildIsRefusedInsteadOfHanging) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "thread sanitizer does not follow fork() of a process with threads";
#endif
  auto device = std::make_unique<Device>(Device::open("cpu", {.threads = 3}));
  auto tensor = std::make_unique<Tensor>(device->tensor(DType::f32, {256, 4, 64}));
  auto other = std::make_unique<Tensor>(device->tensor(DType::f32, {256, 4, 64}));
  std::atomic<bool> stop{false};
  // They submit, take memory and give it back: locks are held most of the time.
  std::thread memory([&] {
    while (!stop) const Tensor more = device->tensor(DType::f32, {64});
  });
  std::thread busy([&] {
    Encoder encoder(*device);
    while (!stop) {
      const Tensor more = device->tensor(DType::f32, {333});
      kv_copy(encoder, {.k = *tensor, .k_cache = *other});
      encoder.submit();
    }
  });
  Encoder encoder(*device);
  kv_copy(encoder, {.k = *tensor, .k_cache = *other});
  auto graph = std::make_unique<Graph>(encoder.instantiate());
  for (int i = 0; i < 30; ++i) {
    const pid_t pid = fork();
    if (pid == 0) {
      const int result = child(*device, *graph);
      // Destructors do not wait, either.
      graph.reset();
      tensor.reset();
      other.reset();
      device.reset();
      _exit(result);
    }
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0) << (WIFSIGNALED(status) ? "it hung" : "not refused");
  }
  stop = true;
  busy.join();
  memory.join();
  EXPECT_NO_THROW(graph->replay().wait()) << "the parent goes on";
}

}  // namespace
}  // namespace gyre::test
