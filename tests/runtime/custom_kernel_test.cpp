#include "gyre/custom_kernel.h"

#include <atomic>
#include <cstring>

#include "expect_error.h"
#include "gyre_test.h"
#include "numbers.h"
#include "run_now.h"
#include "test_device.h"

namespace gyre::test {
namespace {

struct ScaleParams {
  uint64_t count;
  float factor;
};

// out = factor x + (bias, if it is there)
void scale_task(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const ScaleParams*>(params);
  const auto at = [&](uint32_t i) { return reinterpret_cast<float*>(args[i]); };
  for (uint64_t i = task; i < p.count; i += tasks)
    at(1)[i] = p.factor * at(0)[i] + (args[2] != 0 ? at(2)[i] : 0.0f);
}

constexpr const char* kScaleCuda = R"(
struct Params { unsigned long long count; float factor; };
struct Args { unsigned long long at[16]; };
template <class T>
__global__ void scale(const Params p, const Args args) {
  const T* x = reinterpret_cast<const T*>(args.at[0]);
  T* out = reinterpret_cast<T*>(args.at[1]);
  const T* bias = reinterpret_cast<const T*>(args.at[2]);
  for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count;
       i += gridDim.x * blockDim.x)
    out[i] = p.factor * x[i] + (bias != nullptr ? bias[i] : 0.0f);
}
)";

CustomCode scale_code(const std::string& name = "scale") {
  return {.name = name,
          .args = {{"x", Access::read}, {"out", Access::write}, {"bias", Access::read}},
          .params_bytes = sizeof(ScaleParams),
          .cpu = scale_task,
          .cuda = {kScaleCuda, "scale<float>"}};
}

constexpr uint64_t kCount = 1000;
constexpr CustomLaunch kLaunch = {.tasks = 7, .grid = {3, 1, 1}, .block = 96};

class CustomKernelTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!is_available(GetParam())) GTEST_SKIP() << "no CUDA device here";
    device_.emplace(Device::open(GetParam()));
  }
  const Device& device() const { return *device_; }
  Tensor floats(const std::vector<float>& values) const {
    return tensor_of(device(), values, {values.size()});
  }
  Tensor counted() const {
    std::vector<float> values(kCount);
    for (uint64_t i = 0; i < kCount; ++i) values[i] = static_cast<float>(i);
    return floats(values);
  }
  // Whether all are factor i + bias.
  static testing::AssertionResult are(const Tensor& tensor, float factor, float bias = 0) {
    const std::vector<float> values = floats_of(tensor);
    for (uint64_t i = 0; i < kCount; ++i) {
      if (values[i] != factor * static_cast<float>(i) + bias)
        return testing::AssertionFailure() << "[" << i << "] is " << values[i];
    }
    return testing::AssertionSuccess();
  }

 private:
  std::optional<Device> device_;
};

TEST_P(CustomKernelTest, RunsBetweenOtherCommands) {
  const CustomKernel scale(scale_code());
  EXPECT_TRUE(supports(device(), scale));
  const Tensor x = counted(), a = floats(std::vector<float>(kCount)), b = counted();
  const Tensor copied = device().tensor(DType::f16, {1, kCount / 8, 8});
  Encoder encoder(device());
  scale(encoder, ScaleParams{kCount, 2}, {x, a, {}}, kLaunch);
  scale(encoder, ScaleParams{kCount, 0.5f}, {a, b, x}, kLaunch);  // x + x: waits
  kv_copy(encoder, {.k = b.reshape({1, kCount / 8, 8}), .k_cache = copied});
  scale(encoder, ScaleParams{kCount, 3}, {x, a, {}}, kLaunch);  // a was read
  EXPECT_EQ(encoder.size(), 4u);
  EXPECT_EQ(encoder.barriers(), 2u);
  encoder.submit().wait();
  EXPECT_TRUE(are(b, 2));
  EXPECT_TRUE(are(a, 3));
  EXPECT_EQ(static_cast<float>(values_of<Half>(copied)[5]), 10.0f);
}

TEST_P(CustomKernelTest, ReplaysWithNewContents) {
  const CustomKernel scale(scale_code());
  const Tensor x = counted(), a = counted(), bias = floats(std::vector<float>(kCount, 1.0f));
  Encoder encoder(device());
  for (int i = 0; i < 5; ++i) {  // a = 2 (2 x) + 1, a chain whose links must wait
    scale(encoder, ScaleParams{kCount, 2}, {x, a, {}}, kLaunch);
    scale(encoder, ScaleParams{kCount, 2}, {a, a, bias}, kLaunch);
  }
  const Graph graph = encoder.instantiate();
  for (const float b : {1.0f, 5.0f}) {
    std::vector<float> values(kCount, b);
    bias.write_from(std::span<const float>(values));
    graph.replay().wait();
    EXPECT_TRUE(are(a, 4, b));
  }
}

// A device knows kernels by their address: one that is gone must not be taken for the next.
TEST_P(CustomKernelTest, GoesBeforeItsCommandsRun) {
  const Tensor x = counted(), out = counted();
  Encoder encoder(device());
  for (int i = 1; i <= 20; ++i) {
    CustomCode code = scale_code("scale " + std::to_string(i));
    if (i % 2 == 0) code.cpu = [](const void*, const uint64_t*, uint32_t, uint32_t) noexcept {};
    if (i % 2 == 0) code.cuda.source += "\n__global__ void none(Params, Args) {}";
    if (i % 2 == 0) code.cuda.name = "none";
    CustomKernel{code}(encoder, ScaleParams{kCount, static_cast<float>(i)}, {x, out, {}}, kLaunch);
  }
  encoder.submit().wait();
  EXPECT_TRUE(are(out, 19));
}

TEST_P(CustomKernelTest, NothingToDo) {
  const CustomKernel scale(scale_code());
  const Tensor x = counted(), out = counted();
  Encoder encoder(device());
  scale(encoder, ScaleParams{kCount, 2}, {x, out, {}}, {.tasks = 0, .grid = {0, 1, 1}});
  scale(encoder, ScaleParams{kCount, 2}, {x, out, {}}, {.tasks = 0, .block = 0});
  encoder.submit().wait();
  EXPECT_TRUE(are(out, 1));
}

// Neither on its own device nor on another: the list that it is part of waits for it.
struct NestedParams {
  const Device* device;
  std::atomic<int>* refusals;
};
void submit_inside(const void* params, const uint64_t* /*args*/, uint32_t /*task*/,
                   uint32_t /*tasks*/) noexcept {
  NestedParams with{};
  std::memcpy(&with, params, sizeof(with));
  Encoder encoder(*with.device);
  const Tensor x = with.device->tensor(DType::f32, {1, 1, 16});
  hadamard(encoder, {.x = x, .out = x});
  *with.refusals += throws_error(ErrorCode::invalid_argument, {"encoder.submit", "or a task"},
                                 [&] { encoder.submit(); });
  encoder.clear();
}
TEST(CustomKernel, ATaskDoesNotSubmit) {
  const CustomKernel kernel({.name = "nested",
                             .args = {{"x", Access::read_write}},
                             .params_bytes = sizeof(NestedParams),
                             .cpu = submit_inside});
  const Device device = Device::open("cpu", {.threads = 2}), other = Device::open("cpu");
  const Tensor x = device.tensor(DType::f32, {16});
  for (const Device* nested : {&device, &other}) {
    std::atomic<int> refusals = 0;
    kernel(RunNow(device), NestedParams{nested, &refusals}, {x}, {.tasks = 8});
    EXPECT_EQ(refusals, 8);
  }
}

TEST_P(CustomKernelTest, IsRefusedAfterItWasMovedFrom) {
  CustomKernel scale(scale_code());
  const CustomKernel moved(std::move(scale));
  Encoder encoder(device());
  // NOLINTBEGIN(bugprone-use-after-move)
  const auto is_refused = [](const auto& call) {
    return throws_error(ErrorCode::invalid_argument, {"custom_kernel", "moved from"}, call);
  };
  EXPECT_TRUE(is_refused([&] { (void)scale.name(); }));
  EXPECT_TRUE(is_refused([&] { (void)supports(device(), scale); }));
  EXPECT_TRUE(is_refused([&] { scale.record(encoder, {}, {}, {}); }));
  // NOLINTEND(bugprone-use-after-move)
  EXPECT_TRUE(supports(device(), moved));
}

TEST_P(CustomKernelTest, IsTracedByName) {
  const CustomKernel scale(scale_code("my scale"));
  const Tensor x = counted(), out = counted();
  device().start_trace();
  scale(RunNow(device()), ScaleParams{kCount, 2}, {x, out, {}}, kLaunch);
  const Trace trace = device().stop_trace();
  ASSERT_EQ(trace.events.size(), 1u);
  EXPECT_EQ(trace.events[0].kernel, "my scale");
}

TEST_P(CustomKernelTest, RefusesWhatDoesNotFit) {
  const CustomKernel scale(scale_code());
  const Tensor x = counted(), out = counted();
  Encoder encoder(device());
  const ScaleParams params{kCount, 2};
  EXPECT_REFUSED(("scale", "3 arguments", "got 2"), scale(encoder, params, {x, out}, kLaunch));
  EXPECT_REFUSED(("scale", "16 bytes", "got 8"),
                 scale(encoder, uint64_t{7}, {x, out, {}}, kLaunch));
  EXPECT_REFUSED(("scale", "1024 threads", "got 1025"),
                 scale(encoder, params, {x, out, {}}, {.block = 1025}));
  EXPECT_REFUSED(("scale", "got 1 x 65536 x 1"),
                 scale(encoder, params, {x, out, {}}, {.grid = {1, 65536, 1}}));
  const Device other = Device::open("cpu");
  EXPECT_REFUSED(("scale", "x lives on another device"),
                 scale(encoder, params, {other.tensor(DType::f32, {kCount}), out, {}}, kLaunch));
  CustomCode code = scale_code("elsewhere");
  if (GetParam() == "cpu") {
    code.cpu = nullptr;
  } else {
    code.cuda = {};
  }
  const CustomKernel elsewhere(code);
  EXPECT_FALSE(supports(device(), elsewhere));
  EXPECT_ERROR(unsupported, ("elsewhere", "no code for device", GetParam()),
               elsewhere(encoder, params, {x, out, {}}, kLaunch));
  EXPECT_EQ(encoder.size(), 0u);
}

TEST_P(CustomKernelTest, SaysWhatDoesNotCompile) {
  if (GetParam() == "cpu") GTEST_SKIP() << "nothing is compiled for the CPU";
  CustomCode code = scale_code("broken");
  code.cuda.source += "\nthis is no C++";
  const Tensor x = counted(), out = counted();
  Encoder encoder(device());
  CustomKernel{code}(encoder, ScaleParams{kCount, 2}, {x, out, {}}, kLaunch);
  EXPECT_ERROR(compile_failed, ("broken", "scale<float>", "error"), encoder.submit());
}

INSTANTIATE_TEST_SUITE_P(All, CustomKernelTest, testing::Values("cpu", "cuda:0"),
                         [](const auto& test) { return test.param == "cpu" ? "cpu" : "cuda"; });

TEST(CustomKernelCode, IsChecked) {
  const auto refuse = [](const std::vector<std::string>& parts, const auto& change) {
    CustomCode code = scale_code();
    change(code);
    return refused(parts, [&] { CustomKernel kernel(code); });
  };
  EXPECT_TRUE(refuse({"custom_kernel", "a name"}, [](CustomCode& c) { c.name = ""; }));
  EXPECT_TRUE(refuse({"scale", "1 to 16", "got 0"}, [](CustomCode& c) { c.args.clear(); }));
  EXPECT_TRUE(refuse({"1 to 16", "got 17"}, [](CustomCode& c) { c.args.resize(17, {"a"}); }));
  EXPECT_TRUE(refuse({"argument", "a name"}, [](CustomCode& c) { c.args[1].name = ""; }));
  EXPECT_TRUE(refuse({"out", "no such access"},
                     [](CustomCode& c) { c.args[1].access = static_cast<Access>(3); }));
  EXPECT_TRUE(refuse({"1 to 1024", "got 0"}, [](CustomCode& c) { c.params_bytes = 0; }));
  EXPECT_TRUE(refuse({"1 to 1024", "got 1025"}, [](CustomCode& c) { c.params_bytes = 1025; }));
  EXPECT_TRUE(refuse({"source", "name"}, [](CustomCode& c) { c.cuda.name = ""; }));
  EXPECT_TRUE(
      refuse({"code for some device"}, [](CustomCode& c) { c.cpu = nullptr, c.cuda = {}; }));
}

}  // namespace
}  // namespace gyre::test
