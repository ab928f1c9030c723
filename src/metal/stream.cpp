#include "metal/stream.h"

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "metal/submission.h"
#include "runtime/launches.h"
#include "runtime/require.h"
#include "runtime/trace_log.h"

namespace gyre::metal {

Stream::Stream(std::shared_ptr<Buffers> buffers, bool check_each_launch,
               std::span<const KernelUse> uses)
    : buffers_(std::move(buffers)),
      api_(buffers_->api()),
      check_each_launch_(check_each_launch),
      uses_(uses),
      queue_(api_.queue_make()) {
  if (queue_ == nullptr) fail(ErrorCode::out_of_memory, "metal: no memory for a command queue");
}

Stream::~Stream() {
  if (process_ == process_generation()) api_.queue_free(queue_);
}

void Stream::require_same_process() const {
  if (process_ != process_generation())
    fail(ErrorCode::device_lost, "metal: opened before fork(); open a device in the child");
}

void Stream::require_alive() const {
  require_same_process();
  const std::lock_guard lock(mutex_);
  if (!lost_.empty()) fail(ErrorCode::device_lost, lost_);
}

std::string Stream::text_of(const CommandList& list, const Command& command) const {
  const KernelInfo& kernel = *command.pipeline->kernel;
  return join(kernel.name, " (", shape_of(uses_, kernel, list.params_of(command)), ")");
}

std::string Stream::where(const CommandList& list) const {
  constexpr size_t kMaxNamed = 12;
  const size_t count = list.commands.size();
  if (count == 1) return " in " + text_of(list, list.commands.front());
  std::string text;
  for (size_t i = 0; i < std::min(count, kMaxNamed); ++i)
    text += join(i == 0 ? "" : ", ", text_of(list, list.commands[i]));
  return join(" in one of ", count, " commands: ", text, count > kMaxNamed ? ", ..." : "",
              " (DeviceOptions::check_each_launch finds out which)");
}

void Stream::lose(const std::string& error, const std::string& where) {
  if (lost_.empty()) lost_ = join("metal: ", error, where, "; the device can do no more work");
  // None of these is known to be good.
  for (const std::shared_ptr<Submission>& one : in_flight_)
    one->fail_with({ErrorCode::device_lost, lost_});
}

Commands* Stream::commit(std::span<const PreparedList::Step> steps) const {
  Commands* const commands = api_.begin(queue_);
  if (commands == nullptr) fail(ErrorCode::out_of_memory, "metal: no memory for a command buffer");
  for (const PreparedList::Step& step : steps) {
    if (step.barrier) api_.barrier(commands);
    api_.dispatch(commands, step.dispatch);
  }
  note_launch();
  api_.commit(commands);
  return commands;
}

void Stream::run_one_by_one(const PreparedList& prepared, const CommandList& list,
                            const std::function<void(uint32_t, uint64_t)>& ran) {
  for (const PreparedList::Step& step : prepared.steps) {
    Commands* const commands = commit({&step, 1});
    api_.wait(commands);
    const std::string error = api_.error(commands);
    const uint64_t gpu_ns = api_.gpu_ns(commands);
    api_.commands_free(commands);
    if (!error.empty()) {
      const std::string text = " in " + text_of(list, list.commands[step.command]);
      const std::lock_guard lock(mutex_);
      lose(error, text);
      fail(ErrorCode::device_lost, lost_);
    }
    ran(step.command, gpu_ns);
  }
}

std::shared_ptr<FenceState> Stream::enter(const PreparedList& prepared, const CommandList& list,
                                          Submissions made) {
  if (prepared.steps.empty()) return nullptr;
  retire();
  const std::lock_guard order(order_);
  require_alive();
  if (check_each_launch_) {
    run_one_by_one(prepared, list, [](uint32_t, uint64_t) {});
    return nullptr;
  }
  std::shared_ptr<Submission> submission = made.front();
  submission->set_commands(commit(prepared.steps));
  const std::lock_guard lock(mutex_);
  in_flight_.splice(in_flight_.end(), made);
  return submission;
}

std::shared_ptr<FenceState> Stream::submit(const CommandList& list) {
  Submission::Work work;
  work.eager.commands = list.commands;
  work.eager.params = list.params;
  work.eager.storages = list.storages;
  work.eager.pipelines = list.pipelines;
  const PreparedList prepared(list, *buffers_);
  return enter(prepared, list, {std::make_shared<Submission>(shared_from_this(), std::move(work))});
}

std::shared_ptr<FenceState> Stream::replay(const PreparedList& prepared, const CommandList& list,
                                           std::shared_ptr<const void> holder) {
  return enter(prepared, list,
               {std::make_shared<Submission>(shared_from_this(),
                                             Submission::Work{&list, {}, std::move(holder)})});
}

void Stream::run_timed(const PreparedList& prepared, const CommandList& list, TraceLog& trace) {
  wait();
  const std::lock_guard order(order_);
  require_alive();
  const uint64_t generation = trace.generation();
  std::vector<TraceLog::Timing> timings;
  timings.reserve(prepared.steps.size());
  uint64_t begin = trace.now_ns();
  run_one_by_one(prepared, list, [&](uint32_t command, uint64_t gpu_ns) {
    timings.push_back({command, {.thread = 0, .begin_ns = begin, .end_ns = begin + gpu_ns}});
    begin = std::max(begin + gpu_ns, trace.now_ns());
  });
  trace.add(list, timings, generation);
}

void Stream::retire() {
  Submissions done;
  {
    const std::lock_guard lock(mutex_);
    while (!in_flight_.empty() && api_.done(in_flight_.front()->commands())) {
      Submission& first = *in_flight_.front();
      const std::string error = api_.error(first.commands());
      if (!error.empty()) lose(error, where(first.list()));
      first.set_finished();
      done.splice(done.end(), in_flight_, in_flight_.begin());
    }
  }
  for (const std::shared_ptr<Submission>& one : done) one->let_go();
}

// Work ends in the order in which it was committed.
void Stream::wait_for(const Submission& submission) {
  for (;;) {
    retire();
    std::shared_ptr<Submission> first;
    {
      const std::lock_guard lock(mutex_);
      if (submission.is_finished()) return;
      first = in_flight_.front();
    }
    api_.wait(first->commands());
  }
}

void Stream::wait() {
  require_alive();
  std::shared_ptr<Submission> last;
  {
    const std::lock_guard lock(mutex_);
    if (!in_flight_.empty()) last = in_flight_.back();
  }
  if (last != nullptr) wait_for(*last);
  require_alive();
}

void Stream::settle() noexcept {
  if (process_ != process_generation()) return;
  for (;;) {
    std::shared_ptr<Submission> last;
    {
      const std::lock_guard lock(mutex_);
      if (in_flight_.empty()) return;
      last = in_flight_.back();
    }
    api_.wait(last->commands());
    try {
      retire();
    } catch (const std::bad_alloc&) {  // no memory for the message; the next try may have it
    }
  }
}

}  // namespace gyre::metal
