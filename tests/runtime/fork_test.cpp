// A child of fork(): the device of its parent refuses, at once; a device of its own works.
#include <atomic>
#include <thread>

#include "child_process.h"
#include "expect_error.h"
#include "folder.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

// What a child does with everything that its parent had. 0: as promised.
int child(const Device& device, const Graph& graph) {
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

// What has memory of a device, and files of it. On the CPU a child has a copy of that memory, of
// whatever its parent was in the middle of.
struct Held {
  explicit Held(const Device& device)
      : cache(device, {.kv_heads = 1, .head_dim = 16, .capacity = 8}),
        pool(device, {.kv_heads = 1, .head_dim = 16, .pages = 4, .page_tokens = 8}),
        sequence(pool.sequence()),
        tensor(device.tensor(DType::f32, {8, 1, 16})) {
    Encoder encoder(device);
    KvBatch batch(pool, {.max_sequences = 1, .max_tokens = 8});
    batch.begin_step(encoder, {{.sequence = sequence, .tokens = 8}});
    batch.append(encoder, 0, tensor, tensor);
    encoder.submit().wait();
    page = pool.export_page(sequence, 0);
    cache.save(path);
    pool.save(empty, sequence_path);
    pool.save_prefixes(prefixes_path);
  }
  KvCache cache;
  KvPool pool;
  KvSequence sequence, empty = pool.sequence();
  Tensor tensor;
  std::vector<std::byte> page;
  const Folder folder;
  const std::string path = folder / "a", sequence_path = path + "s", prefixes_path = path + "p",
                    made = path + "m";
};

// The number of the first call that is not refused; 0: all are.
int first_not_refused(Held& held) {
  std::vector<float> values(held.tensor.elements());
  const std::function<void()> calls[] = {
      [&] { held.cache.save(held.made); },
      [&] { held.cache.load(held.path); },
      [&] { held.tensor.read_to(std::span(values)); },
      [&] { held.tensor.write_from(std::span<const float>(values)); },
      [&] { held.pool.save(held.empty, held.made); },
      [&] { (void)held.pool.load(held.sequence_path); },
      [&] { held.pool.save_prefixes(held.made); },
      [&] { held.pool.load_prefixes(held.prefixes_path); },
      [&] { (void)held.pool.export_page(held.sequence, 0); },
      [&] { held.pool.import_page(held.empty, held.page); },
  };
  int number = 0;
  for (const auto& call : calls) {
    ++number;
    if (!is_lost(call)) return number;
  }
  return 0;
}

TEST(Fork, CachesPoolsAndTensorsAreRefusedInAChild) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "thread sanitizer does not follow fork() of a process with threads";
#endif
  Held held(Device::open("cpu", {.threads = 2}));
  expect_child([&] { return first_not_refused(held); });
  EXPECT_NE(access(held.made.c_str(), F_OK), 0) << "a file was written";
  EXPECT_EQ(first_not_refused(held), 1) << "in the parent they are not refused";
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
    expect_child([&] {
      const int result = child(*device, *graph);
      // Destructors do not wait, either.
      graph.reset();
      tensor.reset();
      other.reset();
      device.reset();
      return result;
    });
  }
  stop = true;
  busy.join();
  memory.join();
  EXPECT_NO_THROW(graph->replay().wait()) << "the parent goes on";
}

}  // namespace
}  // namespace gyre::test
