#include "metal/device.h"

#include <algorithm>
#include <utility>

#include "metal/kernels.h"
#include "metal/memory.h"
#include "metal/pipeline.h"
#include "metal/prepared_list.h"
#include "metal/stream.h"
#include "runtime/build_all.h"
#include "runtime/kernel_code.h"
#include "runtime/process.h"
#include "runtime/queued_device.h"
#include "runtime/require.h"

namespace gyre::metal {
namespace {

// Every kernel that comes with its code.
constexpr MetalKernel kCustom = {.launch = [](const void* params, uint64_t spec) -> Launch {
  const CustomLaunch launch = launch_of(params, spec);
  return {{launch.grid[0], launch.grid[1], launch.grid[2]}, launch.block, launch.shared_bytes};
}};

DeviceInfo describe_device() {
  DeviceInfo info;
  info.name = "metal";
  info.reason = absent_reason();
  if (!info.reason.empty()) return info;
  const Description device = driver()->describe();
  info.available = true;
  info.description = join(device.name, ", memory shared with the host");
  info.memory_bytes = device.memory_bytes;
  return info;
}

// A list that was prepared once; a replay encodes it again. A replay in flight keeps it.
struct BuiltList {
  CommandList list;
  PreparedList prepared;

  BuiltList(CommandList commands, const Buffers& buffers)
      : list(std::move(commands)), prepared(list, buffers) {}
};

// Holds no reference to the device: the public Graph does.
class MetalGraph final : public GraphImpl {
 public:
  MetalGraph(std::shared_ptr<Stream> stream, TraceLog& trace, CommandList list)
      : stream_(std::move(stream)),
        trace_(trace),
        built_(std::make_shared<BuiltList>(std::move(list), stream_->buffers())) {}

  std::shared_ptr<FenceState> replay() override {
    if (!trace_.enabled()) return stream_->replay(built_->prepared, built_->list, built_);
    stream_->run_timed(built_->prepared, built_->list, trace_);
    return nullptr;
  }
  uint32_t size() const override { return static_cast<uint32_t>(built_->list.commands.size()); }

 private:
  std::shared_ptr<Stream> stream_;
  TraceLog& trace_;
  std::shared_ptr<const BuiltList> built_;
};

struct OwnParts {
  std::shared_ptr<Stream> stream;
  LibraryCache libraries;
};

struct Parts : OwnParts, QueuedParts {
  Parts(uint64_t device_id, const Driver& api, const DeviceOptions& options,
        std::span<const KernelUse> uses)
      : OwnParts{std::make_shared<Stream>(std::make_shared<Buffers>(api), options.check_each_launch,
                                          uses),
                 LibraryCache(api)} {
    pool = std::make_shared<BufferPool>(device_id, shared_memory(stream),
                                        options.pool_limit_bytes.value_or(QueuedDevice::kKeepAll));
  }
};

class MetalDevice final : public QueuedDevice {
 public:
  MetalDevice(DeviceInfo info, const DeviceOptions& options, std::span<const MetalKernel> table,
              std::span<const KernelUse> uses)
      : QueuedDevice(std::move(info), uses),
        api_(*driver()),
        table_(table),
        parts_(std::make_unique<Parts>(id(), api_, options, uses)) {}
  // Fences outlive the device; pipelines, which they name commands by, do not.
  ~MetalDevice() override {
    if (process_ != process_generation()) {
      static_cast<void>(parts_.release());
      return;
    }
    parts_->stream->settle();
  }

  std::shared_ptr<Storage> allocate(uint64_t bytes) override {
    parts_->stream->retire();  // what work has let go of can be had again
    return parts_->pool->allocate(bytes);
  }
  std::shared_ptr<Storage> wrap(const Storage::Block& block, std::shared_ptr<void> owner) override {
    return wrap_memory(id(), parts_->stream, block, std::move(owner));
  }
  void trim() override {
    parts_->stream->retire();
    parts_->pool->trim();
    parts_->pipelines.trim();
  }
  void wait() override { parts_->stream->wait(); }

  void build(std::span<const KernelKey> keys, const BuildCallback& built) override {
    std::vector<BuildTask> tasks;
    for (const KernelKey& key : keys) {
      const auto pipeline = find_pipeline(*key.kernel, key.spec);
      require(pipeline != nullptr, "prepare: no kernel ", key.kernel->name, " for this spec");
      tasks.push_back({describe(*key.kernel, key.spec), [pipeline] {
                         if (pipeline->is_built()) return true;
                         pipeline->finish();
                         return false;
                       }});
    }
    build_all(parts_->builds, tasks, built);
  }
  std::string describe(const KernelInfo& kernel, uint64_t spec) const override {
    require(find(kernel, spec) != nullptr, "device.describe: no kernel ", kernel.name,
            " for this spec");
    return join("metal ", kernel.name);
  }
  bool has(const KernelInfo& kernel, uint64_t spec) const override {
    return find(kernel, spec) != nullptr;
  }
  bool plan(const KernelInfo& kernel, const void* problem, void* plan) const override {
    const MetalKernel* const row = find(kernel);
    return row != nullptr && row->plan != nullptr && row->plan(problem, plan);
  }

  std::shared_ptr<FenceState> submit(const CommandList& list) override {
    Stream& stream = *parts_->stream;
    if (!trace().enabled()) return stream.submit(list);
    stream.run_timed(PreparedList(list, stream.buffers()), list, trace());
    return nullptr;
  }
  std::unique_ptr<GraphImpl> instantiate(CommandList list) override {
    return std::make_unique<MetalGraph>(parts_->stream, trace(), std::move(list));
  }

 private:
  QueuedParts& queued() const override { return *parts_; }
  std::shared_ptr<const LazyPipeline> make_pipeline(const KernelInfo& kernel,
                                                    uint64_t spec) override {
    const MetalKernel* const row = find(kernel, spec);
    if (row == nullptr) return nullptr;
    return std::make_shared<MetalPipeline>(api_, parts_->libraries, kernel, *row, spec);
  }
  // Null: there is none.
  const MetalKernel* find(const KernelInfo& kernel) const {
    if (kernel.code != nullptr) return kernel.code->code.metal.source.empty() ? nullptr : &kCustom;
    const auto row =
        std::ranges::find_if(table_, [&](const MetalKernel& k) { return k.info == &kernel; });
    return row != table_.end() ? &*row : nullptr;
  }
  const MetalKernel* find(const KernelInfo& kernel, uint64_t spec) const {
    const MetalKernel* const row = find(kernel);
    return row != nullptr && (row->has == nullptr || row->has(spec)) ? row : nullptr;
  }

  const Driver& api_;
  std::span<const MetalKernel> table_;
  const uint64_t process_ = process_generation();
  std::unique_ptr<Parts> parts_;
};

}  // namespace

std::vector<DeviceInfo> list_devices() { return {describe_device()}; }

std::shared_ptr<DeviceImpl> make_device(const DeviceOptions& options,
                                        std::span<const MetalKernel> table,
                                        std::span<const KernelUse> uses) {
  DeviceInfo info = describe_device();
  if (!info.available) fail(ErrorCode::unsupported, "device.open: ", info.name, ": ", info.reason);
  return std::make_shared<MetalDevice>(std::move(info), options, table, uses);
}

std::shared_ptr<DeviceImpl> open_device(std::string_view name, const DeviceOptions& options,
                                        std::span<const KernelUse> uses) {
  require(name == "metal", "device.open: the Apple GPU is one device, called \"metal\", got \"",
          name, "\"");
  return make_device(options, kernel_table(), uses);
}

}  // namespace gyre::metal
