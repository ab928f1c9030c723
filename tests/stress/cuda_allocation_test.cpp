// The n-th host allocation fails while the CUDA backend works, over stand-ins for the driver and
// the compiler: each call throws out_of_memory and can be made again.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "stress/allocation_programs.h"

namespace gyre::test {
namespace {

constexpr uint64_t kTokens = 4, kDim = 16;

KvCacheOptions cache_options() {
  return {.kv_heads = 1,
          .head_dim = kDim,
          .capacity = 24,
          .layers = {{.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 4},
                     {.k = KvFormat::f16, .v = KvFormat::f16}},
          .step_tokens = 8};
}

void submit(Encoder& encoder) {
  survive(encoder, [&] { encoder.submit().wait(); });
}

// Opens a device, records, submits, replays, forks, saves and loads. The stand-in's kernels do
// nothing but copy, so what comes back is what was copied.
std::vector<float> run(const std::string& folder) {
  const std::string path = folder + "/cache";
  const DeviceOptions device_options{.pool_limit_bytes = 0, .kernel_cache = "off"};
  const Device device = survive([&] { return Device::open("cuda:0", device_options); });
  const KvCacheOptions options = cache_options();
  Encoder encoder = survive([&] { return Encoder(device); });
  KvCache cache = survive([&] { return KvCache(device, options); });
  const Dims shape = {kTokens, 1, kDim};
  const Tensor k = survive([&] { return device.tensor(DType::f16, shape); });
  const Tensor copy = survive([&] { return device.tensor(DType::f16, shape); });
  const Tensor out = survive([&] { return device.tensor(DType::f16, shape); });
  const std::vector<Half> pattern(k.elements(), Half(1.5f));
  survive([&] { k.write_from(std::span<const Half>(pattern)); });
  survive(encoder, [&] { kv_copy(encoder, {.k = k, .k_cache = copy}); });
  survive(encoder, [&] { cache.extend(encoder, kTokens); });
  for (uint64_t layer = 0; layer < 2; ++layer) {
    survive(encoder, [&] { cache.append(encoder, layer, k, k); });
    survive(encoder, [&] { cache.attend(encoder, layer, {.q = k, .out = out}); });
  }
  submit(encoder);
  KvCache fork = survive(encoder, [&] { return cache.fork(encoder); });
  submit(encoder);
  survive(encoder, [&] { fork.attend(encoder, 0, {.q = k, .out = out}); });
  const Graph graph = survive(encoder, [&] { return encoder.instantiate(); });
  survive([&] { device.start_trace(); });
  survive([&] { graph.replay().wait(); });
  survive([&] { return device.stop_trace(); });
  survive([&] { fork.save(path); });
  KvCache loaded = survive([&] { return KvCache(device, options); });
  survive([&] { loaded.load(path); });
  EXPECT_EQ(loaded.length(), kTokens);
  std::vector<Half> read(k.elements());
  survive([&] { k.read_to(std::span(read)); });
  std::vector<float> values;
  for (const Half value : read) values.push_back(static_cast<float>(value));
  return values;
}

class CudaAllocation : public testing::Test {
 protected:
  void SetUp() override {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == nullptr || dlsym(driver, "gyre_fake_cuda_fail") == nullptr)
      GTEST_SKIP() << "not the fake driver";
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  const std::string folder_ =
      testing::TempDir() + "gyre_cuda_allocation_" + std::to_string(getpid());
};

TEST_F(CudaAllocation, EveryOneMayFail) {
  run(folder_);  // what is made once is there
  failing_memory().arm(~uint64_t{0}, 0);
  const std::vector<float> expected = run(folder_);
  const uint64_t count = failing_memory().count;
  ASSERT_GT(count, 300u);
  for (uint64_t at = 0; at < count; ++at) {
    failing_memory().arm(at, at % 5 == 4 ? 9 : 1);
    SCOPED_TRACE("allocation " + std::to_string(at) + " of " + std::to_string(count));
    try {
      ASSERT_EQ(run(folder_), expected);
    } catch (const std::exception& error) {
      FAIL() << error.what();
    }
  }
  std::printf("each of %llu allocations failed\n", static_cast<unsigned long long>(count));
}

}  // namespace
}  // namespace gyre::test
