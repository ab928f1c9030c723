#include "cuda/device.h"

#include <algorithm>
#include <utility>

#include "cuda/compiler.h"
#include "cuda/device_list.h"
#include "cuda/graph.h"
#include "cuda/kernels.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "runtime/pipeline_cache.h"
#include "runtime/require.h"

namespace gyre::cuda {
namespace {

// By default nothing that was freed goes back: cuMemFree waits for the GPU.
constexpr uint64_t kKeepAll = ~uint64_t{0} >> 1;

class CudaDevice final : public DeviceImpl {
 public:
  CudaDevice(DeviceInfo info, int ordinal, const DeviceOptions& options,
             std::span<const CudaKernel> table, std::span<const KernelUse> uses)
      : DeviceImpl(uses),
        info_(std::move(info)),
        table_(table),
        context_(std::make_shared<Context>(ordinal)),
        stream_(std::make_shared<Stream>(context_, options.check_each_launch, uses)),
        pool_(std::make_shared<BufferPool>(id(), device_memory(stream_),
                                           options.pool_limit_bytes.value_or(kKeepAll))),
        kernel_cache_(options.kernel_cache) {}
  // Fences outlive the device; pipelines, which they name commands by, do not.
  ~CudaDevice() override { stream_->drain(); }

  const DeviceInfo& info() const override { return info_; }
  std::shared_ptr<Storage> allocate(uint64_t bytes) override { return pool_->allocate(bytes); }
  std::shared_ptr<Storage> wrap(const Storage::Block& block, std::shared_ptr<void> owner) override {
    return wrap_memory(id(), stream_, block, std::move(owner));
  }
  MemoryUse memory() const override { return pool_->use(); }
  void trim() override { pool_->trim(); }
  void wait() override { stream_->wait(); }
  uint64_t stream() const override { return stream_->handle(); }

  const Pipeline* pipeline(const KernelInfo& kernel, uint64_t spec) override {
    const CudaKernel* const row = find(kernel);
    if (row == nullptr) return nullptr;
    return pipelines_.find_or_make(kernel, spec, [&] { return build(*row, spec); });
  }
  std::string describe(const KernelInfo& kernel, uint64_t spec) const override {
    const CudaKernel* const row = find(kernel);
    std::string name = row != nullptr ? row->name(spec) : "";
    require(!name.empty(), "device.describe: no kernel ", kernel.name, " for this spec");
    return name;
  }
  bool has(const KernelInfo& kernel, uint64_t spec) const override {
    const CudaKernel* const row = find(kernel);
    return row != nullptr && !row->name(spec).empty() && fits(*row, spec);
  }
  bool plan(const KernelInfo& kernel, const void* problem, void* plan) const override {
    const CudaKernel* const row = find(kernel);
    return row != nullptr && row->plan != nullptr && row->plan(problem, context_->limits(), plan);
  }
  uint32_t loaded_pipelines(const KernelInfo& kernel) const override {
    return pipelines_.count(kernel);
  }

  std::shared_ptr<FenceState> submit(const CommandList& list) override {
    if (!trace().enabled()) return stream_->submit(list);
    stream_->run_timed(list, trace());
    return nullptr;
  }
  std::shared_ptr<FenceState> submit_on(uint64_t stream, const CommandList& list) override {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): a handle that the driver gave out
    return stream_->submit_on(reinterpret_cast<CuStream>(static_cast<uintptr_t>(stream)), list);
  }
  std::unique_ptr<GraphImpl> instantiate(CommandList list) override {
    return make_graph(stream_, trace(), std::move(list));
  }

 private:
  const CudaKernel* find(const KernelInfo& kernel) const {
    const auto row = std::find_if(table_.begin(), table_.end(),
                                  [&](const CudaKernel& k) { return k.info == &kernel; });
    return row != table_.end() ? &*row : nullptr;
  }
  bool fits(const CudaKernel& row, uint64_t spec) const {
    return row.fits == nullptr || row.fits(spec, context_->limits());
  }
  std::unique_ptr<Pipeline> build(const CudaKernel& row, uint64_t spec) const;

  DeviceInfo info_;
  std::span<const CudaKernel> table_;
  std::shared_ptr<const Context> context_;
  std::shared_ptr<Stream> stream_;
  std::shared_ptr<BufferPool> pool_;
  KernelCache kernel_cache_;
  PipelineCache pipelines_;
};

std::unique_ptr<Pipeline> CudaDevice::build(const CudaKernel& row, uint64_t spec) const {
  const std::string name = row.name(spec);
  const CudaLimits& limits = context_->limits();
  if (name.empty() || !fits(row, spec)) return nullptr;
  const Driver& api = context_->api();
  const CompileJob job{row.file, name, row.options != nullptr ? row.options : "", limits.arch};
  const CompiledKernel compiled = compile(nvrtc(api.version), job, kernel_cache_);
  const Current current(*context_);
  auto pipeline = std::make_unique<CudaPipeline>(context_, row, spec);
  context_->check(api.module_load(&pipeline->module, compiled.cubin.data()), name.c_str());
  CuFunction& function = pipeline->function;
  context_->check(api.module_function(&function, pipeline->module, compiled.symbol.c_str()),
                  name.c_str());
  // Whatever a launch asks for: beyond 48 KiB a kernel needs leave.
  int fixed = 0;
  context_->check(api.function_get(&fixed, kCuStaticSharedBytes, function), "cuFuncGetAttribute");
  context_->check(api.function_set(function, kCuMaxDynamicSharedBytes,
                                   static_cast<int>(limits.shared_bytes_per_block) - fixed),
                  "cuFuncSetAttribute");
  return pipeline;
}

}  // namespace

std::shared_ptr<DeviceImpl> make_device(int ordinal, const DeviceOptions& options,
                                        std::span<const CudaKernel> table,
                                        std::span<const KernelUse> uses) {
  DeviceInfo info = describe_device(ordinal);
  if (!info.available) fail(ErrorCode::unsupported, "device.open: ", info.name, ": ", info.reason);
  return std::make_shared<CudaDevice>(std::move(info), ordinal, options, table, uses);
}

std::shared_ptr<DeviceImpl> open_device(std::string_view name, const DeviceOptions& options,
                                        std::span<const KernelUse> uses) {
  return make_device(checked_ordinal(name), options, kernel_table(), uses);
}

}  // namespace gyre::cuda
