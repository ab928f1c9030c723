// Queues and command buffers of the stand-in.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "metal_host/standin_objects.h"

namespace gyre::metal_host {

using metal::Binding;
using metal::Commands;
using metal::Dispatch;
using metal::Queue;

namespace {

// What a kernel gets for an argument that is absent: it must not look.
void* forbidden_page() {
  static void* const page =
      mmap(nullptr, kPageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return page;
}

std::string refusal(const Dispatch& dispatch) {
  const auto text = [](const char* what, uint64_t got) {
    return std::string(what) + ", got " + std::to_string(got);
  };
  if (dispatch.state == nullptr) return "a dispatch without a pipeline";
  if (dispatch.params_bytes == 0 || dispatch.params_bytes > metal::kMaxParamsBytes)
    return text("setBytes takes 1 to 4096 bytes", dispatch.params_bytes);
  if (dispatch.binding_count > metal::kMaxBindings)
    return text("at most 16 arguments", dispatch.binding_count);
  if (dispatch.grid[0] == 0 || dispatch.grid[1] == 0 || dispatch.grid[2] == 0)
    return "a grid of 0 threadgroups";
  if (dispatch.threads == 0 || dispatch.threads > dispatch.state->max_threads)
    return text("more threads in a threadgroup than the pipeline has, or 0", dispatch.threads);
  if (dispatch.threadgroup_bytes > kMaxThreadgroupBytes)
    return text("at most 32768 bytes of threadgroup memory", dispatch.threadgroup_bytes);
  if (dispatch.threadgroup_bytes % metal::kThreadgroupUnit != 0)
    return text("threadgroup memory must be a multiple of 16 bytes", dispatch.threadgroup_bytes);
  for (uint32_t i = 0; i < dispatch.binding_count; ++i) {
    const Binding& binding = dispatch.bindings[i];
    if (binding.buffer == nullptr) return text("no buffer is bound to argument", i);
    if (binding.offset >= binding.buffer->bytes)
      return text("an offset behind the end of its buffer", binding.offset);
  }
  return "";
}

// With GYRE_METAL_FLUSH f32 subnormals are 0 to kernels, as they may be to a GPU.
class Flush {
 public:
  Flush() : wanted_(std::getenv("GYRE_METAL_FLUSH") != nullptr) {
    if (wanted_) set(before_ | kFlush);
  }
  Flush(const Flush&) = delete;
  Flush& operator=(const Flush&) = delete;
  ~Flush() {
    if (wanted_) set(before_);
  }

 private:
#if defined(__aarch64__)
  static constexpr uint64_t kFlush = uint64_t{1} << 24;  // FPCR.FZ
  static uint64_t get() {
    uint64_t value = 0;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set(uint64_t value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#elif defined(__x86_64__)
  static constexpr uint64_t kFlush = 0x8040;  // MXCSR.FTZ, DAZ
  static uint64_t get() { return __builtin_ia32_stmxcsr(); }
  static void set(uint64_t value) { __builtin_ia32_ldmxcsr(static_cast<uint32_t>(value)); }
#else
  static constexpr uint64_t kFlush = 0;
  static uint64_t get() { return 0; }
  static void set(uint64_t /*value*/) {}
#endif

  bool wanted_;
  uint64_t before_ = get();
};

// What the kernel did that it must not; empty: nothing.
std::string run_item(const Commands::Item& item) {
  const Dispatch& d = item.dispatch;
  void* args[metal::kMaxBindings] = {};
  for (uint32_t i = 0; i < d.binding_count; ++i) {
    const Binding& binding = d.bindings[i];
    args[i] =
        (d.arguments >> i & 1) != 0 ? binding.buffer->contents + binding.offset : forbidden_page();
  }
  const HostDispatch call = {.params = item.params.data(),
                             .args = args,
                             .arguments = d.arguments,
                             .spec_low = d.state->constants[0],
                             .spec_high = d.state->constants[1],
                             .grid = {d.grid[0], d.grid[1], d.grid[2]},
                             .threads = d.threads,
                             .threadgroup_bytes = d.threadgroup_bytes};
  const std::lock_guard running(state().running);
  const Flush flush;
  try {
    d.state->kernel->run(call);
  } catch (const std::exception& error) {
    return std::string(d.state->kernel->name) + ": " + error.what();
  }
  return "";
}

void run(Commands& commands) {
  const auto begin = std::chrono::steady_clock::now();
  for (std::vector<Commands::Item>& group : commands.groups) {
    {
      const std::lock_guard lock(state().mutex);
      std::ranges::shuffle(group, state().random);
    }
    for (const Commands::Item& item : group) {
      if (commands.error.empty()) commands.error = run_item(item);
    }
  }
  const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - begin;
  commands.gpu_ns = std::max<uint64_t>(1, static_cast<uint64_t>(took.count()));
}

void let_go(const Commands& commands) {
  for (const auto& group : commands.groups) {
    for (const Commands::Item& item : group) {
      const Dispatch& d = item.dispatch;
      for (uint32_t i = 0; i < d.binding_count; ++i) --d.bindings[i].buffer->users;
    }
  }
}

void work(Queue* queue) {
  State& all = state();
  std::unique_lock lock(all.mutex);
  for (;;) {
    all.changed.wait(lock,
                     [&] { return all.holds == 0 && (queue->ends || !queue->waiting.empty()); });
    if (queue->waiting.empty()) return;
    Commands* const commands = queue->waiting.front();
    queue->waiting.pop_front();
    if (commands->error.empty() && !all.violations.empty()) commands->error = all.violations[0];
    const bool is_good = commands->error.empty();
    lock.unlock();
    if (is_good) run(*commands);
    let_go(*commands);
    lock.lock();
    commands->done = true;
    all.changed.notify_all();
  }
}

}  // namespace

Queue* queue_make() {
  {
    const std::lock_guard lock(state().mutex);
    ++state().counts.queues;
  }
  auto* const queue = new Queue;
  queue->thread = std::thread([queue] { work(queue); });
  return queue;
}

// What was committed is run.
void queue_free(Queue* queue) {
  {
    const std::lock_guard lock(state().mutex);
    queue->ends = true;
  }
  state().changed.notify_all();
  queue->thread.join();
  delete queue;
  const std::lock_guard lock(state().mutex);
  --state().counts.queues;
}

Commands* begin(Queue* queue) {
  const std::lock_guard lock(state().mutex);
  if (is_last(state().begins_left)) return nullptr;
  ++state().counts.commands;
  auto* const commands = new Commands;
  commands->queue = queue;
  return commands;
}

void dispatch(Commands* commands, const Dispatch& dispatch) {
  if (commands->committed) return state().note("a command after commit()");
  if (commands->error.empty()) commands->error = refusal(dispatch);
  if (!commands->error.empty()) return;
  const auto* const params = static_cast<const std::byte*>(dispatch.params);
  Commands::Item item{dispatch, {params, params + dispatch.params_bytes}};
  item.dispatch.params = nullptr;
  for (uint32_t i = 0; i < dispatch.binding_count; ++i) ++dispatch.bindings[i].buffer->users;
  commands->groups.back().push_back(std::move(item));
  const std::lock_guard lock(state().mutex);
  ++state().counts.dispatches;
}

void barrier(Commands* commands) {
  if (commands->committed) return state().note("a barrier after commit()");
  commands->groups.emplace_back();
  const std::lock_guard lock(state().mutex);
  ++state().counts.barriers;
}

void commit(Commands* commands) {
  if (commands->committed) return state().note("committed twice");
  {
    const std::lock_guard lock(state().mutex);
    commands->committed = true;
    ++state().counts.committed;
    if (is_last(state().commits_left)) commands->error = state().commit_error;
    commands->queue->waiting.push_back(commands);
  }
  state().changed.notify_all();
}

bool done(Commands* commands) {
  const std::lock_guard lock(state().mutex);
  return commands->done;
}

void wait(Commands* commands) {
  if (!commands->committed) return state().note("wait() before commit()");
  std::unique_lock lock(state().mutex);
  state().changed.wait(lock, [&] { return commands->done; });
}

std::string error(Commands* commands) {
  const std::lock_guard lock(state().mutex);
  return commands->done ? commands->error : "error() before the command buffer is done";
}

uint64_t gpu_ns(Commands* commands) {
  const std::lock_guard lock(state().mutex);
  return commands->gpu_ns;
}

void commands_free(Commands* commands) {
  if (!done(commands)) return state().note("a command buffer was freed before it was done");
  delete commands;
  const std::lock_guard lock(state().mutex);
  --state().counts.commands;
}

}  // namespace gyre::metal_host
