// When the CUDA backend compiles: for what is dispatched, once; never to answer a question. Skipped
// where there is no GPU; the fake driver has one.
#include <atomic>
#include <barrier>

#include "abi/attention_plan.h"
#include "cuda/compiler.h"
#include "cuda/device.h"
#include "cuda/kernel_folder.h"
#include "cuda/kernels.h"
#include "expect_error.h"
#include "gyre_test.h"
#include "in_threads.h"
#include "ops/cache_ops.h"
#include "runtime/recorder.h"
#include "test_device.h"

namespace gyre::test {
namespace {

class CudaPipelines : public KernelFolder {
 protected:
  CudaPipelines() : KernelFolder("gyre_pipelines") {}

  void SetUp() override {
    if (!is_available("cuda:0")) GTEST_SKIP() << "no CUDA device here";
  }
};

TEST_F(CudaPipelines, QuestionsCompileNothing) {
  const Device device = Device::open("cuda:0", options());
  for (const KvFormat k : kv_formats()) {
    EXPECT_TRUE(supports(device, AttentionTypes{DType::f16, k, KvFormat::tq4, DType::f16}));
    supports(device, KvQuantizeTypes{DType::f16, k});
  }
  EXPECT_TRUE(supports(device, KvCopyTypes{DType::f32, DType::f16}));
  EXPECT_TRUE(supports(device, RopeTypes{DType::f32, DType::f16}));
  EXPECT_FALSE(
      supports(device, AttentionTypes{DType::u8, KvFormat::f16, KvFormat::f16, DType::f16}));
  const KvCache cache(device, {.kv_heads = 2, .head_dim = 128, .capacity = 512});
  for (const KvLayerInfo& layer : cache.describe())
    EXPECT_NE(layer.kernel.find("attention"), std::string::npos) << layer.kernel;
  abi::AttentionProblem problem{};
  problem.tokens = 1, problem.heads = 8, problem.kv_heads = 2;
  problem.capacity = problem.keys = 4096;
  problem.k.head_dim = problem.v.head_dim = 128;
  for (const KvFormat format : kv_formats()) {
    problem.k.format = problem.v.format = static_cast<uint32_t>(format);
    abi::AttentionPlan plan{};
    EXPECT_TRUE(impl_of(device)->plan(kAttention.info, &problem, &plan));
    EXPECT_NE(plan.splits, 0u);
  }
  EXPECT_EQ(loaded(device), 0u);
  EXPECT_EQ(compiled(), 0);
}

TEST_F(CudaPipelines, RecordingCompilesWhatItDispatches) {
  const Device device = Device::open("cuda:0", options());
  const Tensor q = device.tensor(DType::f16, {1, 2, 64}),
               out = device.tensor(DType::f16, {1, 2, 64});
  const KvBuffer k = KvBuffer::allocate(device, {KvFormat::f16, KvRole::k, 1, 4096, 64});
  const KvBuffer v = KvBuffer::allocate(device, {KvFormat::f16, KvRole::v, 1, 4096, 64});
  const auto record = [&] {
    Encoder encoder(device);
    attention(encoder, {.q = q, .k_cache = k, .v_cache = v, .out = out}, {.length = 4096});
    EXPECT_EQ(encoder.size(), 1u);
    encoder.submit();
  };
  record();
  EXPECT_EQ(impl_of(device)->loaded_pipelines(kAttentionDecode.info), 1u);
  EXPECT_EQ(loaded(device), 1u);
  EXPECT_EQ(compiled(), 1);
  record();
  EXPECT_EQ(compiled(), 1);
}

std::atomic<int> names = 0;  // how often a kernel's name was asked for: every build begins so
std::string no_name(uint64_t) {
  ++names;
  return "";
}
std::string no_kernel(uint64_t) {
  ++names;
  return "gyre::cuda::no_such_kernel";
}

TEST_F(CudaPipelines, ANoIsRemembered) {
  const cuda::CudaKernel table[] = {
      {&kBytesCopy.info, "cache.cu", no_name, cuda::launch_bytes_copy},
      {&kKvExtend.info, "cache.cu", no_kernel, cuda::launch_kv_extend},
  };
  const Device device = device_of(cuda::make_device(0, options(), table));
  names = 0;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(impl_of(device)->pipeline(kBytesCopy.info, 0), nullptr);
    EXPECT_EQ(impl_of(device)->pipeline(kRope.info, 0), nullptr) << "in no table";
  }
  EXPECT_EQ(names, 1);
  const auto fails = [&] {
    return throws_error(ErrorCode::compile_failed, {"cache.cu", "no_such_kernel"},
                        [&] { impl_of(device)->pipeline(kKvExtend.info, 0)->finish(); });
  };
  EXPECT_TRUE(fails());
  const int once = names;
  EXPECT_TRUE(fails());
  EXPECT_TRUE(fails());
  EXPECT_EQ(names, once) << "built again";
  EXPECT_EQ(impl_of(device)->loaded_pipelines(kKvExtend.info), 0u);
  EXPECT_EQ(compiled(), 0);
}

// What cannot be built is thrown before anything runs, every time; the list stays as it was.
TEST_F(CudaPipelines, SubmitRefusesWhatDoesNotCompile) {
  const cuda::CudaKernel table[] = {
      {&kBytesCopy.info, "cache.cu", cuda::name_bytes_copy, cuda::launch_bytes_copy},
      {&kKvExtend.info, "cache.cu", no_kernel, cuda::launch_kv_extend},
  };
  const Device device = device_of(cuda::make_device(0, options(), table));
  const Tensor from = device.tensor(DType::u8, {256}), to = device.tensor(DType::u8, {256});
  const std::vector<uint8_t> ones(256, 1);
  from.write_from(std::span<const uint8_t>(ones));
  Encoder encoder(device);
  copy_bytes(encoder, from, to);
  extend_cache(encoder, device.tensor(DType::u8, {sizeof(abi::KvState)}),
               device.tensor(DType::i32, {1}), {});
  for (int i = 0; i < 2; ++i) {
    EXPECT_ERROR(compile_failed, ("no_such_kernel"), encoder.submit());
    EXPECT_EQ(encoder.size(), 2u);
  }
  std::vector<uint8_t> seen(256, 7);
  to.read_to(std::span<uint8_t>(seen));
  EXPECT_EQ(seen, std::vector<uint8_t>(256, 0));
}

// Recording does not wait for compilers: both kernels are on their way when submit() waits.
TEST_F(CudaPipelines, AStepIsBuiltSeveralAtATime) {
  const Device device = Device::open("cuda:0", options());
  const Tensor x = device.tensor(DType::f16, {1, 2, 64});
  const Tensor positions = device.tensor(DType::i32, {1});
  Encoder encoder(device);
  rope(encoder, {.x = x, .positions = positions, .out = x});
  norm_rope(encoder, {.x = x, .positions = positions, .out = x});
  EXPECT_EQ(encoder.size(), 2u);
  encoder.submit();
  EXPECT_EQ(impl_of(device)->loaded_pipelines(kRope.info), 2u);
  EXPECT_EQ(compiled(), 2);
}

// Specs that differ in what the kernel reads at run time have one kernel: compiled once, also by
// threads that ask at the same time.
TEST_F(CudaPipelines, OneKernelIsCompiledOnce) {
  cuda::KernelCompiler compiler(cuda::nvrtc(0), options().kernel_cache);
  const cuda::CompileJob job{"cache.cu", "gyre::cuda::kv_extend", "", 90};
  constexpr int kThreads = 4;
  std::barrier start(kThreads);
  std::array<cuda::KernelCompiler::Kernel, kThreads> got;
  in_threads(kThreads, [&](size_t i) {
    start.arrive_and_wait();
    got[i] = compiler.get(job);
  });
  std::set<cuda::KernelCompiler::Kernel> built;
  for (const auto& one : got) {
    if (!one->from_cache) built.insert(one);  // who comes late reads the file
  }
  EXPECT_EQ(built.size(), 1u);
}

}  // namespace
}  // namespace gyre::test
