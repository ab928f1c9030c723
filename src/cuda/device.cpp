#include "cuda/device.h"

#include <utility>

#include "cuda/build_kernels.h"
#include "cuda/device_list.h"
#include "cuda/graph.h"
#include "cuda/kernel_set.h"
#include "cuda/kernels.h"
#include "cuda/memory.h"
#include "cuda/offline_device.h"
#include "cuda/pipeline.h"
#include "cuda/stream.h"
#include "runtime/queued_device.h"
#include "runtime/require.h"

namespace gyre::cuda {
namespace {

struct OwnParts {
  std::shared_ptr<const Context> context;
  std::shared_ptr<Stream> stream;
  KernelCompiler compiler;
};

struct Parts : OwnParts, QueuedParts {
  Parts(uint64_t device_id, int ordinal, const DeviceOptions& options,
        std::span<const KernelUse> uses)
      : Parts(device_id, std::make_shared<Context>(ordinal), options, uses) {}

 private:
  Parts(uint64_t device_id, const std::shared_ptr<const Context>& on, const DeviceOptions& options,
        std::span<const KernelUse> uses)
      : OwnParts{on,
                 std::make_shared<Stream>(on, options.check_each_launch, uses),
                 {nvrtc(on->api().version), options.kernel_cache}} {
    pool = std::make_shared<BufferPool>(device_id, device_memory(stream),
                                        options.pool_limit_bytes.value_or(QueuedDevice::kKeepAll));
  }
};

class CudaDevice final : public QueuedDevice {
 public:
  CudaDevice(DeviceInfo info, int ordinal, const DeviceOptions& options,
             std::span<const CudaKernel> table, std::span<const KernelUse> uses)
      : QueuedDevice(std::move(info), uses),
        parts_(std::make_unique<Parts>(id(), ordinal, options, uses)),
        kernels_(table, parts_->context->limits()) {}
  // Fences outlive the device; pipelines, which they name commands by, do not.
  ~CudaDevice() override {
    if (parts_->context->is_inherited()) {
      static_cast<void>(parts_.release());
      return;
    }
    parts_->stream->drain();
  }

  std::shared_ptr<Storage> allocate(uint64_t bytes) override {
    return parts_->pool->allocate(bytes);
  }
  std::shared_ptr<Storage> wrap(const Storage::Block& block, std::shared_ptr<void> owner) override {
    return wrap_memory(id(), parts_->stream, block, std::move(owner));
  }
  void trim() override {
    parts_->pool->trim();
    parts_->pipelines.trim();
  }
  void wait() override { parts_->stream->wait(); }
  uint64_t stream() const override { return parts_->stream->handle(); }

  void build(std::span<const KernelKey> keys, const BuildCallback& built) override {
    build_kernels(parts_->builds, kernels_, keys, built, [&](const CudaKernel& row, uint64_t spec) {
      const auto pipeline =
          std::static_pointer_cast<const CudaPipeline>(find_pipeline(*row.info, spec));
      if (pipeline->is_built()) return true;
      pipeline->finish();
      return pipeline->from_cache();
    });
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

  std::shared_ptr<FenceState> submit(const CommandList& list) override {
    if (!trace().enabled()) return parts_->stream->submit(list);
    parts_->stream->run_timed(list, trace());
    return nullptr;
  }
  std::shared_ptr<FenceState> submit_on(uint64_t stream, const CommandList& list) override {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): a handle that the driver gave out
    return parts_->stream->submit_on(reinterpret_cast<CuStream>(static_cast<uintptr_t>(stream)),
                                     list);
  }
  std::unique_ptr<GraphImpl> instantiate(CommandList list) override {
    return make_graph(parts_->stream, trace(), std::move(list));
  }

 private:
  QueuedParts& queued() const override { return *parts_; }
  std::shared_ptr<const LazyPipeline> make_pipeline(const KernelInfo& kernel,
                                                    uint64_t spec) override {
    const CudaKernel* const row = kernels_.row(kernel, spec);
    if (row == nullptr) return nullptr;
    return std::make_shared<CudaPipeline>(parts_->context, parts_->compiler, kernel, *row, spec);
  }

  std::unique_ptr<Parts> parts_;
  KernelSet kernels_;
};

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
  if (is_offline(name)) return open_offline(name, options, uses);
  return make_device(checked_ordinal(name), options, kernel_table(), uses);
}

}  // namespace gyre::cuda
