#include "cpu/executor.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "cpu/device.h"
#include "runtime/require.h"

namespace gyre::cpu {
namespace {

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // a short real delay; `yield` is a no-op on most cores
#endif
}

// For waits that end soon unless the machine is oversubscribed, where the awaited thread needs our
// core.
class Backoff {
 public:
  void wait() {
    constexpr uint32_t kSpins = 2048;
    if (++spins_ < kSpins) {
      pause_cpu();
    } else {
      std::this_thread::yield();
    }
  }

 private:
  uint32_t spins_ = 0;
};

constexpr std::chrono::milliseconds kPollEvery{20};
constexpr std::align_val_t kScratchAlignment{64};  // of vectors, and of cache lines

void zero(const Plan::Entry& entry) {
  if (entry.zeroed.bytes == 0) return;
  std::memset(pointer<void>(entry.args[entry.zeroed.arg]), 0, entry.zeroed.bytes);
}

// The task that runs on the thread.
struct Running {
  Executor* executor = nullptr;
  uint32_t thread = 0;
  void* scratch = nullptr;
};
thread_local Running running;
thread_local bool in_poll = false;

struct InPoll {
  InPoll() { in_poll = true; }
  ~InPoll() { in_poll = false; }
};

}  // namespace

void* task_scratch() { return running.scratch; }
bool task_ended() { return running.executor != nullptr && running.executor->ended(running.thread); }

void Plan::build(const CommandList& list) {
  entries.clear();
  steps.clear();
  tickets = 0;
  scratch_bytes = 0;
  uint64_t group_start = 0;  // tickets before the current group of concurrent commands
  bool chain_open = false;   // the last step is a chain that makes up the whole group so far
  for (const Command& command : list.commands) {
    const auto& pipeline = static_cast<const CpuPipeline&>(*command.pipeline);
    const void* params = list.params_of(command);
    const uint32_t tasks = pipeline.row->tasks(params, pipeline.spec);
    const auto entry = static_cast<uint32_t>(entries.size());
    scratch_bytes = std::max(scratch_bytes, pipeline.row->scratch_bytes);
    const ArgBytes zeroed =
        pipeline.row->zeroed != nullptr ? pipeline.row->zeroed(params) : ArgBytes();
    entries.push_back({pipeline.run, params, list.args_of(command), tasks, zeroed});
    if (tasks == 1 && chain_open) {
      // One thread runs the chain in order, which is all that a barrier inside it asks for. What
      // follows the chain waits for the whole of it.
      ++steps.back().chain;
      group_start = tickets;
      continue;
    }
    if (command.barrier) group_start = tickets;
    if (tasks == 0) {
      chain_open = false;
      continue;
    }
    if (tasks > 1 && zeroed.bytes != 0) {  // by the thread that ends the chain, or one of its own
      if (!chain_open) steps.push_back({tickets++, group_start, entry, 0, false});
      steps.back().zeroes_next = true;
      group_start = tickets;
    }
    chain_open = tasks == 1 && group_start == tickets;
    steps.push_back({tickets, group_start, entry, 1, false});
    tickets += tasks;
  }
}

Executor::Executor(uint32_t threads, uint32_t spin_us, std::function<void()> poll)
    : spin_us_(spin_us), poll_(std::move(poll)), timings_(threads), scratch_(threads) {
  workers_.reserve(threads - 1);
  for (uint32_t thread = 1; thread < threads; ++thread) {
    try {
      workers_.emplace_back([this, thread] { worker(thread); });
    } catch (const std::exception& error) {  // no thread, or no memory for one
      stop();
      fail(ErrorCode::out_of_memory, "device.open: thread ", thread + 1, " of ", threads,
           " could not be started: ", error.what());
    }
  }
}

Executor::~Executor() { stop(); }

void Executor::stop() {
  if (is_inherited()) {
    for (std::thread& worker : workers_) worker.detach();
    return;
  }
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Executor::FreeScratch::operator()(std::byte* memory) const {
  ::operator delete(memory, kScratchAlignment);
}

void Executor::require_outside_lists(const char* op) {
  require(!in_poll && running.executor == nullptr, op,
          ": called from DeviceOptions::poll or a task, in the middle of another list");
}

// A block for each thread, the caller's first. Pages become resident where a thread writes.
void Executor::reserve(const Plan& plan) {
  if (plan.scratch_bytes == 0) return;
  const std::lock_guard lock(submit_mutex_);
  if (plan.scratch_bytes <= scratch_bytes_) return;
  std::vector<Scratch> made(scratch_.size());
  for (Scratch& scratch : made) {
    scratch.reset(static_cast<std::byte*>(::operator new(plan.scratch_bytes, kScratchAlignment)));
  }
  scratch_ = std::move(made);
  scratch_bytes_ = plan.scratch_bytes;
}

bool Executor::run(const Plan& plan, const TraceLog* log, std::vector<TraceLog::Timing>* timings) {
  if (plan.tickets == 0) return true;
  const std::lock_guard lock(submit_mutex_);
  run_ = {&plan, log};
  thrown_ = nullptr;
  ended_.store(false, std::memory_order_relaxed);
  skipped_ = 0;
  if (poll_) next_poll_ = std::chrono::steady_clock::now() + kPollEvery;
  if (plan.tickets == 1) {
    run_ticket(run_, 0, 0);
  } else {
    finished_.store(0, std::memory_order_relaxed);
    // Sequentially consistent with park(): either the worker sees the tickets or we see the
    // sleeper.
    remaining_.store(plan.tickets);
    if (sleepers_.load() != 0) {
      epoch_.fetch_add(1);
      epoch_.notify_all();
    }
    help(0);
    wait_until_finished(plan.tickets - skipped_, 0);
  }
  if (thrown_ != nullptr) end_early();
  bool timed = !untimed_.exchange(false, std::memory_order_relaxed);
  for (auto& of_thread : timings_) {
    if (timings == nullptr) break;
    try {
      timings->insert(timings->end(), of_thread.begin(), of_thread.end());
    } catch (const std::bad_alloc&) {
      timed = false;
    }
    of_thread.clear();
  }
  return timed;
}

void Executor::help(uint32_t thread) {
  uint64_t left = remaining_.load(std::memory_order_acquire);
  while (left != 0) {
    if (!remaining_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel,
                                          std::memory_order_acquire)) {
      continue;
    }
    // The ticket we hold keeps its run open, so run_ is that run's, even if we were about to take
    // one from an earlier run when this one began.
    const Run run = run_;
    run_ticket(run, run.plan->tickets - left, thread);
    finished_.fetch_add(1, std::memory_order_acq_rel);
    if (thread == 0 && ended_.load(std::memory_order_relaxed)) {
      skipped_ = remaining_.exchange(0);  // what nobody has taken
      return;
    }
    left = remaining_.load(std::memory_order_acquire);
  }
}

void Executor::run_ticket(const Run& run, uint64_t ticket, uint32_t thread) {
  const auto& steps = run.plan->steps;
  const auto after =
      std::upper_bound(steps.begin(), steps.end(), ticket,
                       [](uint64_t t, const Plan::Step& s) { return t < s.first_ticket; });
  const Plan::Step& step = *(after - 1);
  if (run.plan->tickets != 1) wait_until_finished(step.wait_for, thread);
  const auto task = static_cast<uint32_t>(ticket - step.first_ticket);
  running = {this, thread, scratch_[thread].get()};
  for (uint32_t i = step.entry; i < step.entry + step.chain; ++i) {
    const Plan::Entry& entry = run.plan->entries[i];
    if (ended(thread)) break;
    if (entry.tasks == 1) zero(entry);
    if (run.log == nullptr) {
      entry.run(entry.params, entry.args, task, entry.tasks);
      continue;
    }
    const uint64_t begin = run.log->now_ns();
    entry.run(entry.params, entry.args, task, entry.tasks);
    try {
      timings_[thread].push_back({i, {thread, begin, run.log->now_ns()}});
    } catch (const std::bad_alloc&) {
      untimed_.store(true, std::memory_order_relaxed);
    }
  }
  if (step.zeroes_next) zero(run.plan->entries[step.entry + step.chain]);
  running = {};
}

void Executor::wait_until_finished(uint64_t tickets, uint32_t thread) {
  Backoff backoff;
  while (finished_.load(std::memory_order_acquire) < tickets && !is_inherited()) {
    backoff.wait();
    if (thread == 0) ended(0);
  }
}

bool Executor::ended(uint32_t thread) {
  if (!poll_) return false;
  const bool is_ended = ended_.load(std::memory_order_relaxed);
  if (thread != 0 || is_ended) return is_ended;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_poll_) return false;
  next_poll_ = now + kPollEvery;
  try {
    const InPoll inside;
    poll_();
    if (is_inherited())
      fail(ErrorCode::device_lost,
           "cpu: DeviceOptions::poll called fork(), and the list's threads ",
           "are the parent's; open a device in the child");
  } catch (...) {
    thrown_ = std::current_exception();
    ended_.store(true, std::memory_order_relaxed);
  }
  return thrown_ != nullptr;
}

// Nothing runs any more: commands may have run in part.
void Executor::end_early() {
  untimed_ = false;
  for (auto& of_thread : timings_) of_thread.clear();
  std::rethrow_exception(std::exchange(thrown_, nullptr));
}

void Executor::worker(uint32_t thread) {
  while (!stop_.load(std::memory_order_relaxed)) {
    help(thread);
    if (!wait_for_work()) park();
  }
}

bool Executor::wait_for_work() const {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_);
  do {
    if (stop_.load(std::memory_order_relaxed)) return false;
    for (uint32_t i = 0; i < 64; ++i) {
      if (remaining_.load(std::memory_order_relaxed) != 0) return true;
      pause_cpu();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

void Executor::park() {
  sleepers_.fetch_add(1);
  const uint32_t epoch = epoch_.load();
  if (remaining_.load() == 0 && !stop_.load()) epoch_.wait(epoch);
  sleepers_.fetch_sub(1);
}

}  // namespace gyre::cpu
