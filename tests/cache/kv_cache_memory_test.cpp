// A capacity is a limit: memory becomes resident when tokens come, and copies, snapshots and loads
// take what is held.
#include <cstdio>
#include <filesystem>

#include "folder.h"
#include "gyre_test.h"
#include "resident_bytes.h"

namespace gyre::test {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kKvHeads = 2, kDim = 128, kStep = 512;

TEST(KvCacheMemory, IsTakenAsTokensCome) {
  if (resident_bytes() == 0) GTEST_SKIP() << "no /proc/self/statm here";
  const Device device = Device::open("cpu", {.threads = 2});
  const KvCacheOptions options{.kv_heads = kKvHeads,
                               .head_dim = kDim,
                               .capacity = 4 * kMiB,
                               .layers = {{.tail = 128, .sink_tokens = 4}, {.window = 1000}},
                               .step_tokens = kStep};
  const uint64_t before = resident_bytes();
  KvCache cache(device, options);
  ASSERT_GT(cache.bytes(), 1500 * kMiB);
  EXPECT_LT(resident_bytes() - before, 16 * kMiB);
  const Tensor k = device.tensor(DType::f32, {kStep, kKvHeads, kDim}),
               v = device.tensor(DType::f32, {kStep, kKvHeads, kDim});
  for (const Tensor& tensor : {k, v}) {
    for (float& value : tensor.data<float>()) value = 0.5f;
  }
  Encoder encoder(device);
  const auto append = [&](uint64_t steps) {
    for (uint64_t i = 0; i < steps; ++i) {
      cache.begin_step(encoder, kStep);
      for (uint64_t layer = 0; layer < 2; ++layer) cache.append(encoder, layer, k, v);
      encoder.submit().wait();
    }
  };
  // Each head of each tensor has a place of its own; the system may give 2 MiB at a time.
  constexpr uint64_t kPlaces = 2 * 2 * kKvHeads * 2 * 2;
  append(2);
  EXPECT_LT(resident_bytes() - before, kPlaces * 2 * kMiB);
  append(98);  // 51200 tokens of 392 bytes in the layer without a window
  const uint64_t held = 51200 * 2 * (kDim + kDim / 2 + 4);
  EXPECT_LT(resident_bytes() - before, held + kPlaces * 2 * kMiB);

  const uint64_t with_one = resident_bytes();
  const KvCache copy = cache.fork(encoder);
  encoder.submit().wait();
  EXPECT_EQ(copy.length(), cache.length());
  EXPECT_LT(resident_bytes() - with_one, held + kPlaces * 2 * kMiB);

  const Folder folder;
  const std::string path = folder / "a";
  copy.save(path);
  EXPECT_LT(std::filesystem::file_size(path), held + 8 * kMiB);
  const uint64_t with_two = resident_bytes();
  KvCache loaded(device, options);
  loaded.load(path);  // by way of a second cache
  EXPECT_EQ(loaded.length(), cache.length());
  EXPECT_LT(resident_bytes() - with_two, 2 * (held + kPlaces * 2 * kMiB));
}

}  // namespace
}  // namespace gyre::test
