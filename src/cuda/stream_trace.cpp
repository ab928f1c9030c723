#include <cmath>
#include <vector>

#include "cuda/stream.h"
#include "runtime/trace_log.h"

namespace gyre::cuda {
namespace {

// Events that are there before the first is recorded.
class Marks {
 public:
  explicit Marks(const Driver& api) : api_(api) {}
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;
  ~Marks() {
    for (CuEvent event : events_) api_.event_destroy(event);
  }

  CuResult make(size_t count) {
    events_.reserve(count);
    while (events_.size() < count) {
      CuEvent event = nullptr;
      if (const CuResult result = api_.event_create(&event, 0); result != kCuSuccess) return result;
      events_.push_back(event);
    }
    return kCuSuccess;
  }
  // The next one. Those after one that could not be recorded are of no use.
  void record(CuStream stream) {
    if (is_complete_) is_complete_ = api_.event_record(events_[next_++], stream) == kCuSuccess;
  }
  bool is_complete() const { return is_complete_; }
  uint64_t since_first_ns(size_t mark) const {
    float milliseconds = 0;
    api_.event_elapsed(&milliseconds, events_[0], events_[mark]);
    return static_cast<uint64_t>(std::llround(static_cast<double>(milliseconds) * 1e6));
  }

 private:
  const Driver& api_;
  std::vector<CuEvent> events_;
  size_t next_ = 0;
  bool is_complete_ = true;
};

}  // namespace

void Stream::run_timed(const CommandList& list, TraceLog& trace) {
  const std::lock_guard order(order_);
  const Current current(*context_);
  const Entering entering(*this, list);
  const uint64_t generation = trace.generation();
  const size_t count = list.commands.size();
  std::vector<TraceLog::Timing> timings;
  timings.reserve(count);
  Marks marks(api_);
  check(marks.make(count + 1), "cuEventCreate");
  check(api_.stream_synchronize(stream_), "cuStreamSynchronize");
  const uint64_t origin = trace.now_ns();  // the stream is idle: the first mark passes now
  marks.record(stream_);
  launch_all(stream_, list, [&] { marks.record(stream_); });
  // The list has run, with its times or without.
  check(api_.stream_synchronize(stream_), "cuStreamSynchronize");
  if (!marks.is_complete()) {
    trace.drop(count);
    return;
  }
  for (uint32_t i = 0; i < count; ++i) {
    timings.push_back({i,
                       {.thread = 0,
                        .begin_ns = origin + marks.since_first_ns(i),
                        .end_ns = origin + marks.since_first_ns(i + 1)}});
  }
  trace.add(list, timings, generation);
}

}  // namespace gyre::cuda
