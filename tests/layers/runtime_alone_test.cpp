// The runtime with a backend of this file, linked without the ops and without Gyre's own backends.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "runtime/buffer_pool.h"
#include "runtime/pipeline_cache.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre::test {
namespace {

struct AddSpec {
  uint64_t variant;
};
struct AddParams {
  uint64_t bytes;
  uint64_t addend;
};

// to[i] = from[i] + addend
constexpr Kernel<AddSpec, AddParams> kAdd{"add", {{"from", Access::read}, {"to", Access::write}}};

std::string add_shape(const void* params) {
  return join("bytes=", static_cast<const AddParams*>(params)->bytes);
}
std::span<const uint64_t> add_specs() {
  static constexpr uint64_t kSpecs[] = {0, 1};
  return kSpecs;
}
constexpr KernelUse kUses[] = {{&kAdd.info, add_shape, add_specs}};

class HeapMemory final : public MemorySource {
 public:
  void* take(uint64_t bytes) override { return std::calloc(1, bytes); }
  void give(void* memory, uint64_t /*bytes*/) override { std::free(memory); }
  void zero(void* memory, uint64_t bytes) override { std::memset(memory, 0, bytes); }
  void* host(void* memory) override { return memory; }
};

void run_list(const CommandList& list) {
  for (const Command& command : list.commands) {
    AddParams params{};
    std::memcpy(&params, list.params_of(command), sizeof(params));
    // NOLINTBEGIN(performance-no-int-to-ptr): args are addresses
    const auto* from = reinterpret_cast<const uint8_t*>(list.args_of(command)[0]);
    auto* to = reinterpret_cast<uint8_t*>(list.args_of(command)[1]);
    // NOLINTEND(performance-no-int-to-ptr)
    for (uint64_t i = 0; i < params.bytes; ++i)
      to[i] = static_cast<uint8_t>(from[i] + params.addend);
  }
}

class AddGraph final : public GraphImpl {
 public:
  explicit AddGraph(CommandList list) : list_(std::move(list)) {}
  std::shared_ptr<FenceState> replay() override {
    run_list(list_);
    return nullptr;
  }
  uint32_t size() const override { return static_cast<uint32_t>(list_.commands.size()); }

 private:
  CommandList list_;
};

// Runs kAdd, variant 0, when a list is submitted.
class AddDevice final : public DeviceImpl {
 public:
  AddDevice() : DeviceImpl(kUses) { info_.name = "add"; }

  const DeviceInfo& info() const override { return info_; }
  std::shared_ptr<Storage> allocate(uint64_t bytes) override { return pool_->allocate(bytes); }
  std::shared_ptr<Storage> wrap(const Storage::Block& block, std::shared_ptr<void>) override {
    return std::make_shared<Storage>(id(), block);
  }
  bool has(const KernelInfo& kernel, uint64_t spec) const override {
    return &kernel == &kAdd.info && spec == 0;
  }
  std::shared_ptr<const Pipeline> pipeline(const KernelInfo& kernel, uint64_t spec) override {
    return pipelines_.find_or_make(kernel, spec, [&] {
      return has(kernel, spec) ? std::make_unique<Pipeline>(kernel, spec) : nullptr;
    });
  }
  std::string describe(const KernelInfo& kernel, uint64_t) const override { return kernel.name; }
  uint32_t loaded_pipelines(const KernelInfo& kernel) const override {
    return pipelines_.count(kernel);
  }
  std::shared_ptr<FenceState> submit(const CommandList& list) override {
    const uint64_t generation = trace().generation();
    run_list(list);
    if (trace().enabled()) trace().add(list, {}, generation);
    return nullptr;
  }
  std::unique_ptr<GraphImpl> instantiate(CommandList list) override {
    return std::make_unique<AddGraph>(std::move(list));
  }
  MemoryUse memory() const override { return pool_->use(); }
  void trim() override { pool_->trim(); }

 private:
  DeviceInfo info_;
  PipelineCache pipelines_;
  std::shared_ptr<BufferPool> pool_ =
      std::make_shared<BufferPool>(id(), std::make_unique<HeapMemory>(), 0);
};

void record_add(Encoder& encoder, const Tensor& from, const Tensor& to, uint64_t addend,
                uint64_t variant = 0) {
  Recording recording(encoder, "add");
  recording.dispatch(kAdd, AddSpec{variant}, AddParams{from.bytes(), addend}, {&from, &to});
  recording.commit();
}

TEST(RuntimeAlone, RecordsRunsAndReplays) {
  const Device device = device_of(std::make_shared<AddDevice>());
  const Tensor a = device.tensor(DType::u8, {4}), b = device.tensor(DType::u8, {4});
  Encoder encoder(device);
  record_add(encoder, a, b, 3);
  record_add(encoder, b, a, 4);
  EXPECT_EQ(encoder.barriers(), 1u);
  encoder.submit().wait();
  EXPECT_EQ(a.data<uint8_t>()[3], 7);
  record_add(encoder, a, a.slice(0, 0, 4), 1);
  const Graph graph = encoder.instantiate();
  graph.replay().wait();
  graph.replay().wait();
  EXPECT_EQ(a.data<uint8_t>()[0], 9);
  EXPECT_EQ(b.data<uint8_t>()[0], 3);
}

TEST(RuntimeAlone, ListsAndTracesTheKernelsItIsGiven) {
  const Device device = device_of(std::make_shared<AddDevice>());
  const auto rows = device.kernels();
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].args, "from read, to write");
  EXPECT_EQ(rows[0].variants, 1u);
  device.start_trace();
  Encoder encoder(device);
  const Tensor a = device.tensor(DType::u8, {5});
  record_add(encoder, a, device.tensor(DType::u8, {5}), 1);
  encoder.submit().wait();
  const Trace trace = device.stop_trace();
  ASSERT_EQ(trace.events.size(), 1u);
  EXPECT_EQ(trace.events[0].shape, "bytes=5");
  EXPECT_EQ(device.kernels()[0].loaded, 1u);
}

TEST(RuntimeAlone, RefusesASpecTheBackendDoesNotHave) {
  const Device device = device_of(std::make_shared<AddDevice>());
  Encoder encoder(device);
  const Tensor a = device.tensor(DType::u8, {1});
  EXPECT_THROW(record_add(encoder, a, a, 1, 1), Error);
  EXPECT_EQ(encoder.size(), 0u);
}

}  // namespace
}  // namespace gyre::test
