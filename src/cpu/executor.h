#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/kernel.h"
#include "runtime/command_list.h"
#include "runtime/process.h"
#include "runtime/trace_log.h"

namespace gyre::cpu {

struct CpuPipeline;

// A command list made ready to run. Work is handed out as tickets, numbered through the whole list:
// a ticket is one task of a command, or a chain of small commands that one thread runs in order.
struct Plan {
  struct Entry {
    TaskFn run;
    const void* params;
    const uint64_t* args;
    uint32_t tasks;
    ArgBytes zeroed;  // before the first task
  };
  struct Step {
    uint64_t first_ticket;
    uint64_t wait_for;  // tickets that must be finished before this step may start
    uint32_t entry;     // first command
    uint32_t chain;     // commands run by one ticket; 1 for a command of several tasks
    bool zeroes_next;   // the ticket ends with the zeros of the command after it
  };

  std::vector<Entry> entries;
  std::vector<Step> steps;
  uint64_t tickets = 0;
  uint64_t scratch_bytes = 0;  // that a thread needs for it

  // Pointers into `list` are kept: it must stay where it is while the plan is in use.
  void build(const CommandList& list);
};

// The thread pool. Threads are not gathered at barriers: whoever is awake takes the next ticket and
// waits, if it must, for tickets to be finished, not for threads to arrive. So the caller never
// waits for a worker to wake up, and a list of one ticket runs without touching a worker at all.
class Executor {
 public:
  // `poll`: as DeviceOptions has it.
  Executor(uint32_t threads, uint32_t spin_us, std::function<void()> poll = {});
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  ~Executor();

  // A list in the middle of another one's would wait for it, and it for the list.
  static void require_outside_lists(const char* op);

  uint32_t threads() const { return static_cast<uint32_t>(workers_.size()) + 1; }

  // Scratch memory of all threads for such a plan. run() takes no memory.
  void reserve(const Plan& plan);
  // Runs the whole plan, the caller helping. One plan at a time; further callers queue.
  // What poll() throws ends it and is thrown; a task may end early then. With a log, notes when
  // which thread ran which command; false: there was no memory for all times.
  bool run(const Plan& plan, const TraceLog* log, std::vector<TraceLog::Timing>* timings);

 private:
  struct Run {
    const Plan* plan = nullptr;
    const TraceLog* log = nullptr;
  };

  struct FreeScratch {
    void operator()(std::byte* memory) const;
  };
  using Scratch = std::unique_ptr<std::byte, FreeScratch>;

  void stop();  // ends and joins the workers
  void worker(uint32_t thread);
  void help(uint32_t thread);
  void run_ticket(const Run& run, uint64_t ticket, uint32_t thread);
  bool wait_for_work() const;  // true when there is some before the spin time is over
  // A child of fork() has no threads to wait for.
  bool is_inherited() const { return process_ != process_generation(); }
  void wait_until_finished(uint64_t tickets, uint32_t thread);
  // Whether poll() has thrown, which thread 0, the one that called run(), asks now and then.
  bool ended(uint32_t thread);
  friend bool task_ended();
  void end_early();
  void park();

  const uint32_t spin_us_;
  const uint64_t process_ = process_generation();
  const std::function<void()> poll_;
  std::mutex submit_mutex_;
  Run run_;                                             // valid while a ticket is out
  std::vector<std::vector<TraceLog::Timing>> timings_;  // per thread
  std::vector<Scratch> scratch_;                        // per thread
  uint64_t scratch_bytes_ = 0;                          // of each
  std::atomic<bool> untimed_{false};
  // The caller's alone.
  std::chrono::steady_clock::time_point next_poll_;
  std::exception_ptr thrown_;
  uint64_t skipped_ = 0;            // tickets, because of it
  std::atomic<bool> ended_{false};  // something was thrown

  alignas(64) std::atomic<uint64_t> remaining_{0};  // tickets not yet taken
  alignas(64) std::atomic<uint64_t> finished_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};  // sleeping workers wait for a change
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stop_{false};

  std::vector<std::thread> workers_;
};

}  // namespace gyre::cpu
