// The cases of attention launch every class of decode kernels that a GPU's planner chooses, and
// nothing that it does not list. Needs no GPU: commands are recorded, never submitted.
#include "cuda/kernel_set.h"
#include "cuda/kernels.h"
#include "gyre_test.h"
#include "op_case.h"
#include "ops/table.h"
#include "runtime/device_impl.h"
#include "runtime/pipeline_cache.h"
#include "variant_classes.h"

namespace gyre::test {
namespace {

constexpr uint32_t kSharedBytes = 227 << 10, kSharedOfMultiprocessor = 228 << 10;

struct Gpu {
  const char* name;
  cuda::CudaLimits limits;
};
constexpr Gpu kGpus[] = {{"H200", {132, kSharedBytes, kSharedOfMultiprocessor, 90}},
                         {"H100 PCIe", {114, kSharedBytes, kSharedOfMultiprocessor, 90}},
                         {"B200", {148, kSharedBytes, kSharedOfMultiprocessor, 100}},
                         {"A100", {108, 163 << 10, 164 << 10, 80}},
                         {"L4", {58, 99 << 10, 100 << 10, 89}},
                         {"RTX 4090", {128, 99 << 10, 100 << 10, 89}}};

// Records as a CudaDevice would; has no memory and runs nothing.
class PlanningDevice final : public DeviceImpl {
 public:
  explicit PlanningDevice(const Gpu& gpu)
      : DeviceImpl(::gyre::kernel_uses()), kernels_(cuda::kernel_table(), gpu.limits) {
    info_.name = "cuda:0";
    info_.available = true;
    info_.compute_units = gpu.limits.multiprocessors;
  }

  const DeviceInfo& info() const override { return info_; }
  std::shared_ptr<Storage> allocate(uint64_t bytes) override {
    const uint64_t address = next_;
    next_ += (bytes + 255) / 256 * 256;
    return std::make_shared<Storage>(id(), Storage::Block{address, bytes, nullptr, false});
  }
  std::shared_ptr<Storage> wrap(const Storage::Block& block, std::shared_ptr<void>) override {
    return std::make_shared<Storage>(id(), block);
  }
  std::shared_ptr<const Pipeline> pipeline(const KernelInfo& kernel, uint64_t spec) override {
    return pipelines_.find_or_make(kernel, spec, [&]() -> std::unique_ptr<Pipeline> {
      return has(kernel, spec) ? std::make_unique<Pipeline>(kernel, spec) : nullptr;
    });
  }
  std::string describe(const KernelInfo& kernel, uint64_t spec) const override {
    return kernels_.describe(kernel, spec);
  }
  std::span<const uint64_t> planned_specs(const KernelInfo& kernel) const override {
    return kernels_.planned_specs(kernel);
  }
  bool plan(const KernelInfo& kernel, const void* problem, void* plan) const override {
    return kernels_.plan(kernel, problem, plan);
  }
  bool has(const KernelInfo& kernel, uint64_t spec) const override {
    return kernels_.row(kernel, spec) != nullptr;
  }
  uint32_t loaded_pipelines(const KernelInfo&) const override { return 0; }
  std::shared_ptr<FenceState> submit(const CommandList&) override { return nullptr; }
  std::unique_ptr<GraphImpl> instantiate(CommandList) override { return nullptr; }
  MemoryUse memory() const override { return {}; }
  void trim() override {}

 private:
  cuda::KernelSet kernels_;
  DeviceInfo info_;
  uint64_t next_ = 256;
  PipelineCache pipelines_;
};

std::set<std::string> of_kernel(const std::set<std::string>& classes, const std::string& kernel) {
  std::set<std::string> some;
  for (const std::string& text : classes) {
    if (text.starts_with(kernel + " ")) some.insert(text);
  }
  return some;
}

class CudaVariants : public testing::TestWithParam<Gpu> {};

TEST_P(CudaVariants, CasesOfAttentionLaunchEachClass) {
  const Device device = device_of(std::make_shared<PlanningDevice>(GetParam()));
  std::set<std::string> launched;
  for (const auto& cases : {attention_cases(), attention_partial_cases()}) {
    for (const OpCase& op_case : cases) {
      for (const RecordedCommand& command : outline_commands(device, op_case)) {
        for (std::string& text : variant_classes(command)) launched.insert(std::move(text));
      }
    }
  }
  const std::set<std::string> listed = listed_classes(device);
  for (const char* const kernel : {"attention", "attention_decode"}) {
    const auto wanted = of_kernel(listed, kernel), got = of_kernel(launched, kernel);
    std::cout << GetParam().name << " " << kernel << ": " << wanted.size() << " classes\n";
    EXPECT_FALSE(wanted.empty());
    EXPECT_TRUE(each_is_launched(wanted, got));
  }
}

INSTANTIATE_TEST_SUITE_P(Gpus, CudaVariants, testing::ValuesIn(kGpus), [](const auto& test) {
  std::string name = test.param.name;
  for (char& c : name) c = c == ' ' ? '_' : c;
  return name;
});

}  // namespace
}  // namespace gyre::test
