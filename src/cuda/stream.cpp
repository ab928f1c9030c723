#include "cuda/stream.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/launch_order.h"
#include "cuda/pipeline.h"
#include "cuda/submission.h"
#include "runtime/launches.h"
#include "runtime/require.h"

namespace gyre::cuda {

Prepared::Prepared(const CommandList& list, const Command& command, const CudaLimits& limits,
                   const EarlyReads& early) {
  const auto& pipeline = static_cast<const CudaPipeline&>(*command.pipeline);
  function = pipeline.function();
  shape = launch_shape(list, command, limits);
  std::copy_n(list.args_of(command), pipeline.kernel->arg_count, args.at);
  args.early = early.unwritten;
  args.early_old = early.old;
  params[0] = const_cast<void*>(list.params_of(command));  // the driver only reads
  params[1] = &args;
  params[2] = static_cast<EarlyBits*>(&args);
}

Stream::Stream(std::shared_ptr<const Context> context, bool check_each_launch,
               std::span<const KernelUse> uses)
    : context_(std::move(context)),
      api_(context_->api()),
      check_each_launch_(check_each_launch),
      uses_(uses) {
  const Current current(*context_);
  context_->check(api_.stream_create(&stream_, kCuStreamNonBlocking), "cuStreamCreate");
}

Stream::~Stream() {
  if (context_->is_inherited()) return;
  const Current current(*context_);
  api_.stream_synchronize(stream_);
  for (CuEvent event : free_events_) api_.event_destroy(event);
  for (CuEvent event : staging_.done) {
    if (event != nullptr) api_.event_destroy(event);
  }
  for (std::byte* const half : staging_.half) {
    if (half != nullptr) api_.host_give(half);
  }
  api_.stream_destroy(stream_);
}

std::string Stream::command_text(const CommandList& list, const Command& command) const {
  const KernelInfo& kernel = *command.pipeline->kernel;
  return join(kernel.name, " (", shape_of(uses_, kernel, list.params_of(command)), ")");
}

void Stream::require_alive() const {
  context_->require_same_process();
  const std::lock_guard lock(mutex_);
  if (lost_) throw Error(*lost_);
}

void Stream::check(CuResult result, const char* call) {
  if (result == kCuSuccess) return;
  if (ends_all_work(result)) lose(result);
  context_->check(result, call);
}

// Where there is no memory for the text, a fixed one.
Error Stream::loss(CuResult result, const CommandList* list,
                   const Command* command) const noexcept {
  try {
    try {
      const std::string where =
          command != nullptr ? " in " + command_text(*list, *command) : running();
      fail(ErrorCode::device_lost, context_->name(), ": ", api_.describe(result), where,
           "; the device can do no more work");
    } catch (const std::bad_alloc&) {
      fail_without_memory(ErrorCode::device_lost);
    }
  } catch (const Error& error) {
    return error;
  }
}

void Stream::lose(CuResult result, const CommandList* list, const Command* command) {
  const Error error = loss(result, list, command);
  const std::lock_guard lock(mutex_);
  if (!lost_) lost_ = error;
  // Its event has not been seen to pass, so none of these is known to be good.
  for (const std::shared_ptr<Submission>& one : in_flight_) one->fail_with(*lost_);
  throw Error(*lost_);
}

std::string Stream::running() const {
  constexpr size_t kMaxNamed = 12;
  const std::lock_guard lock(mutex_);
  std::string text;
  size_t count = 0;
  const auto add = [&](const CommandList& list) {
    for (const Command& command : list.commands) {
      if (count++ < kMaxNamed) text += join(text.empty() ? "" : ", ", command_text(list, command));
    }
  };
  for (const std::shared_ptr<Submission>& one : in_flight_) add(one->list());
  if (entering_ != nullptr) add(*entering_);
  if (count == 0) return "";
  if (count == 1) return " in " + text;
  return join(" in one of ", count, " commands: ", text, count > kMaxNamed ? ", ..." : "",
              " (DeviceOptions::check_each_launch finds out which)");
}

CuEvent Stream::take_event() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_events_.empty()) {
      CuEvent event = free_events_.back();
      free_events_.pop_back();
      return event;
    }
    constexpr size_t kFewest = 16;
    if (free_events_.capacity() <= events_)
      free_events_.reserve(std::max(kFewest, 2 * free_events_.capacity()));
    ++events_;
  }
  CuEvent event = nullptr;
  check(api_.event_create(&event, kCuEventNoTiming), "cuEventCreate");
  return event;
}

void Stream::give_event(CuEvent event) noexcept {
  if (context_->is_inherited()) return;
  const std::lock_guard lock(mutex_);
  free_events_.push_back(event);
}

Stream::Entering::Entering(Stream& stream, const CommandList& list) : stream_(stream) {
  stream.retire();
  const std::lock_guard lock(stream.mutex_);
  if (stream.lost_) throw Error(*stream.lost_);
  stream.entering_ = &list;
}

Stream::Entering::~Entering() {
  const std::lock_guard lock(stream_.mutex_);
  stream_.entering_ = nullptr;
}

CuResult Stream::launch(CuStream to, Prepared& run, bool overlaps) const {
  const uint32_t* const grid = run.shape.grid;
  CuLaunchAttribute early;
  const CuLaunchConfig config = {.grid = {grid[0], grid[1], grid[2]},
                                 .block = {run.shape.block, 1, 1},
                                 .shared_bytes = run.shape.shared_bytes,
                                 .stream = to,
                                 .attributes = &early,
                                 .attribute_count = overlaps ? 1u : 0u};
  return api_.launch(&config, run.function, run.params, nullptr);
}

void Stream::fail_launch(CuResult result, const CommandList& list, const Command& command) {
  if (ends_all_work(result)) {
    if (check_each_launch_) lose(result, &list, &command);
    lose(result);
  }
  context_->check(result, command_text(list, command).c_str());
}

void Stream::launch_all(CuStream to, const CommandList& list,
                        const std::function<void()>& launched) {
  // An event or a wait is ahead of the list. Launches that are timed or checked run alone.
  const bool overlap = context_->has_pdl() && !launched && !check_each_launch_;
  const LaunchOrder order(list, context_->limits(), overlap, false, {});
  bool has_begun = false;
  for (size_t i = 0; i < list.commands.size(); ++i) {
    const Command& command = list.commands[i];
    Prepared run(list, command, context_->limits(), order.steps[i].early);
    if (!run.empty()) {
      CuResult result = launch(to, run, order.steps[i].overlaps);
      if (result == kCuOutOfMemory) {  // work that has ended may have given some back
        api_.stream_synchronize(to);
        result = launch(to, run, order.steps[i].overlaps);
      }
      if (result == kCuSuccess) note_launch();
      if (result == kCuSuccess && check_each_launch_) result = api_.stream_synchronize(to);
      if (result != kCuSuccess) {
        api_.stream_synchronize(to);  // what was launched before may use what the caller holds
        if (has_begun && !ends_all_work(result)) {
          retire();
          lose(result, &list, &command);
        }
        fail_launch(result, list, command);
      }
      has_begun = true;
    }
    if (launched) launched();
  }
}

CuResult Stream::order(CuStream first, CuStream then, CuEvent event) const {
  const CuResult result = api_.event_record(event, first);
  return result == kCuSuccess ? api_.stream_wait_event(then, event, 0) : result;
}

void Stream::settle(CuResult result, CuStream stream) {
  if (result == kCuSuccess) return;
  if (ends_all_work(result)) lose(result);
  check(api_.stream_synchronize(stream), "cuStreamSynchronize");
}

std::shared_ptr<FenceState> Stream::submit(const CommandList& list) {
  if (list.commands.empty()) return nullptr;
  const std::lock_guard order(order_);
  const Current current(*context_);
  const Entering entering(*this, list);
  Submissions made = make_submission(list, nullptr);
  launch_all(stream_, list);
  return track(made);
}

namespace {

// What a captured graph uses. Gyre does not know when it runs.
class Captured final : public FenceState {
 public:
  explicit Captured(const CommandList& list)
      : storages_(list.storages), pipelines_(list.pipelines) {}
  void wait() override {}
  bool done() const override { return true; }

 private:
  std::vector<std::shared_ptr<Storage>> storages_;
  std::vector<std::shared_ptr<const Pipeline>> pipelines_;
};

}  // namespace

std::shared_ptr<FenceState> Stream::submit_on(CuStream other, const CommandList& list) {
  if (list.commands.empty()) return nullptr;
  const std::lock_guard order_lock(order_);
  const Current current(*context_);
  CuCaptureStatus capture = kCuNotCapturing;
  check(api_.stream_is_capturing(other, &capture), "cuStreamIsCapturing");
  if (capture != kCuNotCapturing) {
    // Nothing else is allowed on it, no event and no wait.
    require_alive();
    auto captured = std::make_shared<Captured>(list);
    capture_all(other, list);
    return captured;
  }
  const Entering entering(*this, list);
  Submissions made = make_submission(list, nullptr, true);
  CuEvent event = made.front()->event();
  check(order(stream_, other, event), "cuStreamWaitEvent");
  launch_all(other, list);
  settle(order(other, stream_, event), other);
  return track(made);
}

std::shared_ptr<FenceState> Stream::replay(CuGraphExec graph, const CommandList& list,
                                           std::shared_ptr<const void> holder) {
  const std::lock_guard order(order_);
  const Current current(*context_);
  const Entering entering(*this, list);
  Submissions made = make_submission(list, std::move(holder));
  check(api_.graph_launch(graph, stream_), "cuGraphLaunch");
  return track(made);
}

Stream::Submissions Stream::make_submission(const CommandList& list,
                                            std::shared_ptr<const void> holder,
                                            bool on_callers_stream) {
  Submission::Work work;
  if (holder != nullptr) {
    work.list = &list;
    work.holder = std::move(holder);
  } else {
    work.eager.commands = list.commands;
    work.eager.params = list.params;
    work.eager.pipelines = list.pipelines;
    std::copy_if(list.storages.begin(), list.storages.end(),
                 std::back_inserter(work.eager.storages), [&](const auto& storage) {
                   if (!storage->held_by_work()) return false;
                   return !on_callers_stream || storage->release() == OwnerRelease::when_done;
                 });
  }
  Submissions made(1);
  CuEvent event = take_event();
  try {
    made.front() = std::make_shared<Submission>(shared_from_this(), event, std::move(work));
  } catch (...) {
    give_event(event);
    throw;
  }
  return made;
}

std::shared_ptr<FenceState> Stream::track(Submissions& made) {
  std::shared_ptr<Submission> submission = made.front();
  const CuResult result = api_.event_record(submission->event(), stream_);
  settle(result, stream_);
  if (result != kCuSuccess) return nullptr;
  const std::lock_guard lock(mutex_);
  in_flight_.splice(in_flight_.end(), made);
  return submission;
}

void Stream::retire() {
  Submissions done;
  {
    const std::lock_guard lock(mutex_);
    while (!in_flight_.empty() && api_.event_query(in_flight_.front()->event()) == kCuSuccess) {
      done.splice(done.end(), in_flight_, in_flight_.begin());
    }
  }
  for (const std::shared_ptr<Submission>& one : done) one->set_finished(), one->let_go();
}

void Stream::wait() {
  require_alive();
  const Current current(*context_);
  check(api_.stream_synchronize(stream_), "cuStreamSynchronize");
  retire();
}

void Stream::drain() noexcept {
  const Current current(*context_);
  try {
    check(api_.stream_synchronize(stream_), "cuStreamSynchronize");
  } catch (...) {  // kept by the fences
  }
  Submissions done;
  {
    const std::lock_guard lock(mutex_);
    done.swap(in_flight_);
  }
  for (const std::shared_ptr<Submission>& one : done) one->set_finished(), one->let_go();
}

}  // namespace gyre::cuda
