#include "machine_kernels.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/device.h"
#include "fma_rate.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre::bench {
namespace {

struct NoSpec {
  uint64_t unused;
};
struct MemcpyParams {
  uint64_t bytes;
};
struct ReadParams {
  uint64_t bytes;
};
struct FmaParams {
  uint64_t tasks;
};
struct NothingParams {
  uint64_t tasks;
};

constexpr Kernel<NoSpec, MemcpyParams> kMemcpy{
    "memcpy", {{"source", Access::read}, {"target", Access::write}}};

constexpr Kernel<NoSpec, ReadParams> kRead{"read", {{"source", Access::read}}};

constexpr Kernel<NoSpec, FmaParams> kFma{"fma", {{"sink", Access::write}}};

constexpr Kernel<NoSpec, NothingParams> kNothing{"nothing", {{"tensor", Access::read_write}}};

void run_memcpy(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto share = cpu::share_of(static_cast<const MemcpyParams*>(params)->bytes, task, tasks);
  std::memcpy(cpu::pointer<std::byte>(args[1]) + share.begin,
              cpu::pointer<const std::byte>(args[0]) + share.begin, share.end - share.begin);
}

uint32_t memcpy_tasks(const void* params, uint64_t /*spec*/) {
  constexpr uint64_t kBytesPerTask = 64 << 10;
  const uint64_t bytes = static_cast<const MemcpyParams*>(params)->bytes;
  return static_cast<uint32_t>(std::clamp<uint64_t>(bytes / kBytesPerTask, 1, 1 << 20));
}

constexpr uint64_t kReadPerTask = 512 << 10;

void run_read(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto share =
      cpu::share_of(static_cast<const ReadParams*>(params)->bytes / 256, task, tasks);
  const auto* words = cpu::pointer<const uint64_t>(args[0]) + share.begin * 32;
  const uint64_t quarter = (share.end - share.begin) * 8;
  uint64_t sums[16] = {};
  for (uint64_t i = 0; i + 4 <= quarter; i += 4) {
    for (uint64_t stream = 0; stream < 4; ++stream) {
      for (uint64_t j = 0; j < 4; ++j) sums[stream * 4 + j] ^= words[stream * quarter + i + j];
    }
  }
  for (uint64_t& sum : sums) asm volatile("" ::"r"(sum));  // the reads are wanted, not the result
}

uint32_t read_tasks(const void* params, uint64_t /*spec*/) {
  return static_cast<uint32_t>(std::clamp<uint64_t>(
      static_cast<const ReadParams*>(params)->bytes / kReadPerTask, 1, 1 << 20));
}

void run_fma_task(const void* /*params*/, const uint64_t* args, uint32_t task,
                  uint32_t /*tasks*/) noexcept {
  run_fma(cpu::pointer<float>(args[0]) + uint64_t{64} * task);
}

uint32_t fma_tasks(const void* params, uint64_t /*spec*/) {
  return static_cast<uint32_t>(static_cast<const FmaParams*>(params)->tasks);
}

void run_nothing(const void* /*params*/, const uint64_t* /*args*/, uint32_t /*task*/,
                 uint32_t /*tasks*/) noexcept {}

uint32_t nothing_tasks(const void* params, uint64_t /*spec*/) {
  return static_cast<uint32_t>(static_cast<const NothingParams*>(params)->tasks);
}

std::span<const cpu::CpuKernel> bench_table() {
  static const std::vector<cpu::CpuKernel> kTable = [] {
    const auto own = cpu::kernel_table();
    std::vector<cpu::CpuKernel> table(own.begin(), own.end());
    table.push_back(
        {&kMemcpy.info, [](uint64_t) -> cpu::TaskFn { return run_memcpy; }, memcpy_tasks});
    table.push_back({&kRead.info, [](uint64_t) -> cpu::TaskFn { return run_read; }, read_tasks});
    table.push_back({&kFma.info, [](uint64_t) -> cpu::TaskFn { return run_fma_task; }, fma_tasks});
    table.push_back(
        {&kNothing.info, [](uint64_t) -> cpu::TaskFn { return run_nothing; }, nothing_tasks});
    return table;
  }();
  return kTable;
}

}  // namespace

Device open_cpu(uint32_t threads) {
  DeviceOptions options;
  options.threads = threads;
  return device_of(cpu::make_device(options, bench_table()));
}

void record_memcpy(Encoder& encoder, const Tensor& source, const Tensor& target) {
  Recording recording(encoder, "memcpy");
  require(source.bytes() == target.bytes(), "memcpy: ", source.bytes(), " bytes into ",
          target.bytes());
  recording.dispatch(kMemcpy, NoSpec{}, MemcpyParams{source.bytes()}, {&source, &target});
  recording.commit();
}

void record_read(Encoder& encoder, const Tensor& source) {
  Recording recording(encoder, "read");
  recording.dispatch(kRead, NoSpec{}, ReadParams{source.bytes()}, {&source});
  recording.commit();
}

uint64_t record_fma(Encoder& encoder, const Tensor& sink) {
  Recording recording(encoder, "fma");
  recording.dispatch(kFma, NoSpec{}, FmaParams{sink.shape(0)}, {&sink});
  recording.commit();
  float once = 0;
  return sink.shape(0) * run_fma(&once);
}

void record_nothing(Encoder& encoder, const Tensor& tensor, uint32_t tasks) {
  Recording recording(encoder, "nothing");
  recording.dispatch(kNothing, NoSpec{}, NothingParams{tasks}, {&tensor});
  recording.commit();
}

}  // namespace gyre::bench
