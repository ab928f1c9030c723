#pragma once
// Hand-built command lists whose tasks note when they ran.

#include <atomic>
#include <cstring>

#include "cpu/device.h"
#include "cpu/executor.h"
#include "gyre_test.h"

namespace gyre::test {

struct ProbeSpan {
  uint64_t begin = 0, end = 0;
  uint32_t runs = 0;
};

struct ProbeLog {
  std::atomic<uint64_t> clock{1};
  std::vector<std::vector<ProbeSpan>> spans;  // [command][task]
};

struct ProbeParams {
  uint32_t command = 0, tasks = 0;
  uint32_t spins = 0;  // task 0 works longer
};

inline void run_probe(const void* params, const uint64_t* args, uint32_t task,
                      uint32_t tasks) noexcept {
  const auto& p = *static_cast<const ProbeParams*>(params);
  auto& log = *cpu::pointer<ProbeLog>(args[0]);
  ProbeSpan& span = log.spans[p.command][task];
  // Relaxed: the clock must not be what orders the tasks.
  span.begin = log.clock.fetch_add(1, std::memory_order_relaxed);
  for (uint32_t i = 0; task == 0 && i < p.spins; ++i)
    std::atomic_signal_fence(std::memory_order_seq_cst);
  if (tasks == p.tasks) ++span.runs;
  span.end = log.clock.fetch_add(1, std::memory_order_relaxed);
}

inline constexpr KernelInfo kProbeInfo{
    .name = "probe",
    .params_bytes = sizeof(ProbeParams),
    .arg_count = 1,
    .args = {{{"log", Access::read}}},
};

inline constexpr cpu::CpuKernel kProbeKernel{
    &kProbeInfo, [](uint64_t) -> cpu::TaskFn { return run_probe; },
    [](const void* params, uint64_t) { return static_cast<const ProbeParams*>(params)->tasks; }};

struct ProbeCommand {
  uint32_t tasks = 1;
  bool barrier = false;
  uint32_t spins = 0;
};

// A list, the plan for it and the log it writes; stays where it is, the plan points into it.
class ProbeRun {
 public:
  explicit ProbeRun(const std::vector<ProbeCommand>& commands)
      : commands_(commands), pipeline_(*kProbeKernel.info, kProbeKernel, 0, run_probe) {
    constexpr size_t kWords = (sizeof(ProbeParams) + 7) / 8;
    log_.spans.resize(commands.size());
    for (uint32_t i = 0; i < commands.size(); ++i) {
      const ProbeParams params{i, commands[i].tasks, commands[i].spins};
      const auto offset = static_cast<uint32_t>(list_.params.size());
      list_.params.resize(offset + kWords);
      std::memcpy(&list_.params[offset], &params, sizeof(params));
      list_.args.push_back(reinterpret_cast<uintptr_t>(&log_));
      list_.commands.push_back({&pipeline_, offset, i, commands[i].barrier});
      log_.spans[i].resize(commands[i].tasks);
    }
    plan_.build(list_);
  }
  ProbeRun(const ProbeRun&) = delete;
  ProbeRun& operator=(const ProbeRun&) = delete;

  const cpu::Plan& plan() const { return plan_; }
  const CommandList& list() const { return list_; }
  const std::vector<std::vector<ProbeSpan>>& spans() const { return log_.spans; }
  void forget() {
    for (auto& command : log_.spans) std::fill(command.begin(), command.end(), ProbeSpan{});
  }

  // Every task ran once, and nothing behind a barrier began before everything in front of it had
  // ended.
  testing::AssertionResult in_order() const {
    uint64_t front_end = 0;  // latest end of the commands in front of the last barrier
    uint64_t end = 0;        // latest end so far
    for (size_t c = 0; c < commands_.size(); ++c) {
      if (commands_[c].barrier) front_end = end;
      for (size_t t = 0; t < log_.spans[c].size(); ++t) {
        const ProbeSpan& span = log_.spans[c][t];
        if (span.runs != 1) {
          return testing::AssertionFailure()
                 << "command " << c << " task " << t << " ran " << span.runs << " times";
        }
        if (span.begin < front_end) {
          return testing::AssertionFailure() << "command " << c << " task " << t << " did not wait";
        }
        end = std::max(end, span.end);
      }
    }
    return testing::AssertionSuccess();
  }

 private:
  std::vector<ProbeCommand> commands_;
  cpu::CpuPipeline pipeline_;
  ProbeLog log_;
  CommandList list_;
  cpu::Plan plan_;
};

inline std::vector<ProbeCommand> random_commands(std::mt19937& random) {
  constexpr uint32_t kTasks[] = {0, 1, 1, 1, 2, 3, 7};
  std::vector<ProbeCommand> commands(random() % 20);
  for (ProbeCommand& command : commands) {
    command.tasks = kTasks[random() % std::size(kTasks)];
    command.barrier = random() % 3 == 0;
    command.spins = random() % 4 == 0 ? 3000 : 0;
  }
  return commands;
}

}  // namespace gyre::test
