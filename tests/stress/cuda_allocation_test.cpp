// The n-th host allocation fails while the CUDA backend works, over stand-ins for the driver and
// the compiler: each call throws out_of_memory and can be made again.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "cuda/fake_controls.h"
#include "stress/allocation_programs.h"
#include "tensor_bytes.h"

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

// What a run did, to be compared with one in which nothing failed.
struct Outcome {
  std::vector<float> values;
  uint64_t kernels = 0;  // of submits and replays: a list that ran twice shows

  // A submit or a replay.
  template <class Call>
  void enter(const Call& call) {
    const uint64_t before = fake().kernels_run();
    survive([&] { return call(); }).wait();
    kernels += fake().kernels_run() - before;
  }
  bool operator==(const Outcome&) const = default;
};

Device open_device() {
  const DeviceOptions options{.pool_limit_bytes = 0, .kernel_cache = "off"};
  return survive([&] { return Device::open("cuda:0", options); });
}

// A kernel of the caller's over memory of the caller's, on a stream of the caller's.
void run_foreign(const Device& device, Encoder& encoder, const Tensor& memory, Outcome& outcome) {
  const Dims shape = memory.shape();
  const Tensor wrapped =
      survive([&] { return device.wrap(address_of(memory), DType::f16, shape); });
  const CustomCode code{.name = "nothing",
                        .args = {{"x", Access::read_write}},
                        .params_bytes = 8,
                        .cuda = {"__global__ void nothing()", "nothing"}};
  const CustomKernel kernel = surviving_kernel(code);
  const uint64_t params = 0;
  survive(encoder, [&] {
    kernel.record(encoder, std::as_bytes(std::span(&params, 1)), {&wrapped, 1}, {});
  });
  survive(encoder, [&] { hadamard(encoder, {.x = wrapped, .out = wrapped}); });
  outcome.enter([&] { return encoder.submit_on(foreign_stream()); });
}

// Opens a device, prepares, records, submits, replays, forks, saves and loads. The stand-in's
// kernels do nothing but copy, so what comes back is what was copied.
Outcome run(const std::string& folder) {
  Outcome outcome;
  const std::string path = folder + "/cache";
  const Device device = open_device();
  const KvCacheOptions options = cache_options();
  Encoder encoder = survive([&] { return Encoder(device); });
  const auto submit = [&] { return encoder.submit(); };
  KvCache cache = survive([&] { return KvCache(device, options); });
  const Dims shape = {kTokens, 1, kDim};
  const Tensor k = survive([&] { return device.tensor(DType::f16, shape); });
  const Tensor copy = survive([&] { return device.tensor(DType::f16, shape); });
  const Tensor out = survive([&] { return device.tensor(DType::f16, shape); });
  const std::vector<Half> pattern(k.elements(), Half(1.5f));
  survive([&] { k.write_from(std::span<const Half>(pattern)); });
  survive(encoder, [&] { kv_copy(encoder, {.k = k, .k_cache = copy}); });
  survive(encoder, [&] { cache.begin_step(encoder, kTokens); });
  for (uint64_t layer = 0; layer < 2; ++layer) {
    survive(encoder, [&] { cache.append(encoder, layer, k, k); });
    survive(encoder, [&] { cache.attend(encoder, layer, {.q = k, .out = out}); });
  }
  outcome.enter(submit);
  KvCache fork = survive(encoder, [&] { return cache.fork(encoder); });
  outcome.enter(submit);
  survive(encoder, [&] { fork.attend(encoder, 0, {.q = k, .out = out}); });
  const Graph graph = survive(encoder, [&] { return encoder.instantiate(); });
  outcome.enter([&] { return graph.replay(); });
  run_foreign(device, encoder, copy, outcome);
  survive([&] { device.start_trace(); });
  outcome.enter([&] { return graph.replay(); });
  survive(encoder, [&] { hadamard(encoder, {.x = copy, .out = copy}); });
  survive(encoder, [&] { hadamard(encoder, {.x = copy, .out = copy}); });
  outcome.enter(submit);
  const Trace trace = survive([&] { return device.stop_trace(); });
  EXPECT_EQ(trace.events.size() + trace.dropped, graph.size() + 2u);
  survive([&] { fork.save(path); });
  KvCache loaded = survive([&] { return KvCache(device, options); });
  survive([&] { loaded.load(path); });
  EXPECT_EQ(loaded.length(), kTokens);
  std::vector<Half> read(k.elements());
  survive([&] { k.read_to(std::span(read)); });
  for (const Half value : read) outcome.values.push_back(static_cast<float>(value));
  return outcome;
}

// Builds ahead, several at a time.
Outcome run_prepare(const std::string& /*folder*/) {
  const Device device = open_device();
  const ModelShape shape{.heads = 1,
                         .kv_heads = 1,
                         .head_dim = kDim,
                         .layers = {{.k = KvFormat::f16, .v = KvFormat::f16}},
                         .context = 64,
                         .step_tokens = 1,
                         .use_batch = false};
  survive([&] { return prepare(device, shape); });
  for (const PreparedKernel& kernel : survive([&] { return prepare(device, shape); }))
    EXPECT_FALSE(kernel.compiled) << kernel.name << " was there";
  return {};
}

class CudaAllocation : public testing::Test {
 protected:
  void SetUp() override {
    if (fake().kernels_run == nullptr) GTEST_SKIP() << "not the fake driver";
    foreign_stream();
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void fail_each(Outcome (*program)(const std::string&), uint64_t stride);

  const std::string folder_ =
      testing::TempDir() + "gyre_cuda_allocation_" + std::to_string(getpid());
};

void CudaAllocation::fail_each(Outcome (*program)(const std::string&), uint64_t stride) {
  program(folder_);  // what is made once is there
  failing_memory().arm(~uint64_t{0}, 0);
  const Outcome expected = program(folder_);
  const uint64_t count = failing_memory().count;
  uint64_t tried = 0, hit = 0;
  for (uint64_t at = 0; at < count; at += stride) {
    failing_memory().arm(at, at % 5 == 4 ? 9 : 1);
    SCOPED_TRACE("allocation " + std::to_string(at) + " of " + std::to_string(count));
    try {
      ASSERT_TRUE(program(folder_) == expected) << "other values, or a list that ran twice";
    } catch (const std::exception& error) {
      FAIL() << error.what();
    }
    ++tried;
    if (failing_memory().failed != 0) ++hit;
  }
  // Threads that build allocate too: the last ones may come after the last call, and not count.
  EXPECT_GE(hit * 100, tried * 97) << hit << " of " << tried << " failed";
  ASSERT_GT(tried, 100u);
  std::printf("%llu of %llu allocations failed\n", static_cast<unsigned long long>(hit),
              static_cast<unsigned long long>(count));
}

TEST_F(CudaAllocation, EveryOneMayFail) { fail_each(run, 1); }
TEST_F(CudaAllocation, EveryThirdOfABuildMayFail) { fail_each(run_prepare, 3); }

// The GPU is found to be lost by whoever waits, also where there is no memory to say how.
TEST_F(CudaAllocation, ALossNeedsNoMemory) {
  constexpr uint64_t kMax = 200;
  uint64_t at = 0;
  for (bool failed = true; failed; ++at) {
    ASSERT_LT(at, kMax);
    const Device device = open_device();
    const Tensor x = device.tensor(DType::f16, {1, 1, kDim});
    Encoder encoder(device);
    hadamard(encoder, {.x = x, .out = x});
    const Fence fence = encoder.submit();
    fake().break_gpu(cuda::kCuLaunchFailed);
    failing_memory().arm(at, 100);
    const auto is_lost = [&](const auto& call) {
      try {
        failing_memory().on = true;
        call();
      } catch (const Error& error) {
        failing_memory().on = false;
        return error.code() == ErrorCode::device_lost;
      } catch (...) {
        failing_memory().on = false;
      }
      return false;
    };
    EXPECT_TRUE(is_lost([&] { device.wait(); })) << at;
    EXPECT_TRUE(is_lost([&] { fence.wait(); })) << at;
    failed = failing_memory().failed != 0;
  }
  EXPECT_GT(at, 5u) << "nothing failed: the test shows nothing";
}

}  // namespace
}  // namespace gyre::test
