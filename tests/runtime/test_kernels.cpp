#include "runtime/test_kernels.h"

#include <chrono>

namespace gyre::test {
namespace {

// Spins: a sleeping thread would give its core to the one that should be caught overtaking it.
void delay(const BytesParams& p, uint32_t task) {
  if (p.slow_ns == 0 || task != p.slow_task) return;
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(p.slow_ns);
  while (std::chrono::steady_clock::now() < end) {
  }
}

uint8_t operand(const uint8_t* bytes, uint64_t count, uint64_t i) {
  return count == 0 ? uint8_t{0} : bytes[i % count];
}

void run_mix(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const BytesParams*>(params);
  delay(p, task);
  const auto* a = cpu::pointer<const uint8_t>(args[0]);
  const auto* b = cpu::pointer<const uint8_t>(args[1]);
  auto* out = cpu::pointer<uint8_t>(args[2]);
  const cpu::Share share = cpu::share_of(p.out_bytes, task, tasks);
  for (uint64_t i = share.begin; i < share.end; ++i)
    out[i] = mix_value(operand(a, p.a_bytes, i), operand(b, p.b_bytes, i), i, p.salt);
}

void run_fold(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const BytesParams*>(params);
  delay(p, task);
  const auto* a = cpu::pointer<const uint8_t>(args[0]);
  auto* out = cpu::pointer<uint8_t>(args[1]);
  const cpu::Share share = cpu::share_of(p.out_bytes, task, tasks);
  for (uint64_t i = share.begin; i < share.end; ++i)
    out[i] = fold_value(out[i], operand(a, p.a_bytes, i), i, p.salt);
}

cpu::TaskFn select_mix(uint64_t spec) { return spec == kMissingVariant ? nullptr : run_mix; }
cpu::TaskFn select_fold(uint64_t spec) { return spec == kMissingVariant ? nullptr : run_fold; }

uint32_t count_tasks(const void* params, uint64_t /*spec*/) {
  return static_cast<const BytesParams*>(params)->tasks;
}

constexpr cpu::CpuKernel kTable[] = {
    {&kMix.info, select_mix, count_tasks},
    {&kFold.info, select_fold, count_tasks},
};

std::string bytes_shape(const void* params) {
  return "bytes=" + std::to_string(static_cast<const BytesParams*>(params)->out_bytes);
}

std::span<const uint64_t> test_specs() {
  static constexpr uint64_t kSpecs[] = {0, 1, kMissingVariant};
  return kSpecs;
}

constexpr KernelUse kUses[] = {
    {&kMix.info, bytes_shape, test_specs},
    {&kFold.info, bytes_shape, test_specs},
    {&kAbsent.info, bytes_shape, test_specs},
};

}  // namespace

BytesParams params_of(const BytesCall& call) {
  return {.a_bytes = call.a.elements(),
          .b_bytes = call.b.elements(),
          .out_bytes = call.out.elements(),
          .salt = call.salt,
          .tasks = call.tasks,
          .slow_task = call.slow_task,
          .slow_ns = call.slow_ns};
}

void record_mix(Encoder& encoder, const BytesCall& call) {
  Recording recording(encoder, "mix");
  recording.dispatch(kMix, TestSpec{}, params_of(call), {&call.a, &call.b, &call.out});
  recording.commit();
}

void record_fold(Encoder& encoder, const BytesCall& call) {
  Recording recording(encoder, "fold");
  recording.dispatch(kFold, TestSpec{}, params_of(call), {&call.a, &call.out});
  recording.commit();
}

Device open_test_device(const DeviceOptions& options) {
  return device_of(cpu::make_device(options, kTable, kUses));
}

}  // namespace gyre::test
