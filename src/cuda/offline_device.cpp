#include "cuda/offline_device.h"

#include <algorithm>
#include <charconv>
#include <utility>
#include <vector>

#include "cuda/build_kernels.h"
#include "cuda/kernel_set.h"
#include "cuda/kernels.h"
#include "cuda/pipeline.h"
#include "runtime/process.h"
#include "runtime/require.h"

namespace gyre::cuda {
namespace {

constexpr std::string_view kPrefix = "cuda:sm_";

// Plans depend on the number of multiprocessors where there are clusters, from 9.0 on: those of
// the GPUs on sale. KiB as in the CUDA C++ programming guide, "Technical Specifications".
struct Architecture {
  uint32_t arch;
  uint32_t shared_kib_per_block, shared_kib_per_multiprocessor;
  std::vector<uint32_t> multiprocessors;
};
const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> kAll = {
      {80, 163, 164, {108}},          {86, 99, 100, {84}},
      {87, 163, 164, {16}},           {89, 99, 100, {128}},
      {90, 227, 228, {132, 114, 78}}, {100, 227, 228, {148}},
      {103, 227, 228, {148, 160}},    {120, 99, 100, {188, 170, 110, 84, 70, 48, 36, 30}},
      {121, 99, 100, {48}},
  };
  return kAll;
}

// What threads work on. In a child of fork() it is left alone: they are the parent's.
struct OfflineParts {
  KernelCompiler compiler;
  BuildQueue builds;  // last: its threads compile

  explicit OfflineParts(const std::string& cache) : compiler(nvrtc(0), cache) {}
};

class OfflineDevice final : public DeviceImpl {
 public:
  OfflineDevice(DeviceInfo info, const CudaLimits& limits, const DeviceOptions& options,
                std::span<const KernelUse> uses)
      : DeviceImpl(uses),
        info_(std::move(info)),
        kernels_(kernel_table(), limits),
        parts_(std::make_unique<OfflineParts>(options.kernel_cache)) {}
  ~OfflineDevice() override {
    if (process_ != process_generation()) static_cast<void>(parts_.release());
  }

  void stand_for(std::shared_ptr<const OfflineDevice> other) {
    others_.push_back(std::move(other));
  }

  const DeviceInfo& info() const override { return info_; }
  std::shared_ptr<Storage> allocate(uint64_t /*bytes*/) override { refuse("device.tensor"); }
  std::shared_ptr<Storage> wrap(const Storage::Block& /*block*/,
                                std::shared_ptr<void> /*owner*/) override {
    refuse("device.wrap");
  }
  std::shared_ptr<const Pipeline> pipeline(const KernelInfo& /*kernel*/,
                                           uint64_t /*spec*/) override {
    refuse("encoder");
  }
  std::string describe(const KernelInfo& kernel, uint64_t spec) const override {
    return kernels_.describe(kernel, spec);
  }
  bool has(const KernelInfo& kernel, uint64_t spec) const override {
    return kernels_.row(kernel, spec) != nullptr;
  }
  std::span<const uint64_t> planned_specs(const KernelInfo& kernel) const override {
    return kernels_.planned_specs(kernel);
  }
  bool plan(const KernelInfo& kernel, const void* problem, void* plan) const override {
    return kernels_.plan(kernel, problem, plan);
  }
  void build(std::span<const KernelKey> keys, const BuildCallback& built) override {
    build_kernels(parts_->builds, kernels_, keys, built, [&](const CudaKernel& row, uint64_t spec) {
      return parts_->compiler.get(compile_job(*row.info, row, spec, kernels_.limits()))->from_cache;
    });
  }
  std::vector<std::shared_ptr<const DeviceImpl>> stands_for() const override {
    std::vector<std::shared_ptr<const DeviceImpl>> all = DeviceImpl::stands_for();
    all.insert(all.end(), others_.begin(), others_.end());
    return all;
  }
  uint32_t loaded_pipelines(const KernelInfo& /*kernel*/) const override { return 0; }
  std::shared_ptr<FenceState> submit(const CommandList& /*list*/) override {
    refuse("encoder.submit");
  }
  std::unique_ptr<GraphImpl> instantiate(CommandList /*list*/) override {
    refuse("encoder.instantiate");
  }
  MemoryUse memory() const override { return {}; }
  void trim() override {}

 private:
  [[noreturn]] void refuse(const char* op) const {
    fail(ErrorCode::unsupported, op, ": device ", info_.name,
         " only compiles kernels for prepare(), it has no memory and runs nothing");
  }

  DeviceInfo info_;
  KernelSet kernels_;
  std::vector<std::shared_ptr<const OfflineDevice>> others_;  // of other sizes
  const uint64_t process_ = process_generation();
  std::unique_ptr<OfflineParts> parts_;
};

const Architecture& checked_architecture(std::string_view name) {
  const std::string_view digits = name.substr(kPrefix.size());
  uint32_t arch = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), arch);
  const bool is_number = error == std::errc() && end == digits.data() + digits.size();
  std::string known;
  for (const Architecture& one : architectures()) {
    if (is_number && one.arch == arch) return one;
    known += join(known.empty() ? "" : ", ", kPrefix, one.arch);
  }
  fail(ErrorCode::invalid_argument, "device.open: no architecture is called \"", name,
       "\"; known are ", known);
}

}  // namespace

bool is_offline(std::string_view name) { return name.starts_with(kPrefix); }

std::shared_ptr<DeviceImpl> open_offline(std::string_view name, const DeviceOptions& options,
                                         std::span<const KernelUse> uses) {
  const Architecture& found = checked_architecture(name);
  const Nvrtc& compiler = nvrtc(0);
  if (!compiler.reason.empty())
    fail(ErrorCode::unsupported, "device.open: ", name, ": ", compiler.reason);
  if (found.arch > compiler.newest_arch)
    fail(ErrorCode::unsupported, "device.open: ", name, ": NVRTC ", compiler.version_text(),
         " is older than this architecture");
  DeviceInfo info;
  info.name = name;
  info.available = true;
  info.description = join("compiles for compute capability ", found.arch / 10, ".", found.arch % 10,
                          " with NVRTC ", compiler.version_text(), ", no GPU");
  std::shared_ptr<OfflineDevice> first;
  for (const uint32_t multiprocessors : found.multiprocessors) {
    const CudaLimits limits{multiprocessors, found.shared_kib_per_block * 1024,
                            found.shared_kib_per_multiprocessor * 1024, found.arch};
    auto made = std::make_shared<OfflineDevice>(info, limits, options, uses);
    if (first == nullptr) {
      first = std::move(made);
    } else {
      first->stand_for(std::move(made));
    }
  }
  return first;
}

}  // namespace gyre::cuda
