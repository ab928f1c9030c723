#include <cmath>
#include <vector>

#include "cuda/stream.h"
#include "runtime/trace_log.h"

namespace gyre::cuda {
namespace {

class Marks {
 public:
  explicit Marks(const Driver& api) : api_(api) {}
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;
  ~Marks() {
    for (CuEvent event : events_) api_.event_destroy(event);
  }

  CuResult record(CuStream stream) {
    CuEvent event = nullptr;
    const CuResult result = api_.event_create(&event, 0);
    if (result != kCuSuccess) return result;
    events_.push_back(event);
    return api_.event_record(event, stream);
  }
  uint64_t since_first_ns(size_t mark) const {
    float milliseconds = 0;
    api_.event_elapsed(&milliseconds, events_[0], events_[mark]);
    return static_cast<uint64_t>(std::llround(static_cast<double>(milliseconds) * 1e6));
  }

 private:
  const Driver& api_;
  std::vector<CuEvent> events_;
};

}  // namespace

void Stream::run_timed(const CommandList& list, TraceLog& trace) {
  const std::lock_guard order(order_);
  const Current current(*context_);
  const Entering entering(*this, list);
  const uint64_t generation = trace.generation();
  check(api_.stream_synchronize(stream_), "cuStreamSynchronize");
  const uint64_t origin = trace.now_ns();  // the stream is idle: the first mark passes now
  Marks marks(api_);
  check(marks.record(stream_), "cuEventRecord");
  for (const Command& command : list.commands) {
    launch(stream_, list, command, check_each_launch_);
    check(marks.record(stream_), "cuEventRecord");
  }
  check(api_.stream_synchronize(stream_), "cuStreamSynchronize");
  std::vector<TraceLog::Timing> timings;
  for (uint32_t i = 0; i < list.commands.size(); ++i) {
    timings.push_back({i,
                       {.thread = 0,
                        .begin_ns = origin + marks.since_first_ns(i),
                        .end_ns = origin + marks.since_first_ns(i + 1)}});
  }
  trace.add(list, timings, generation);
}

}  // namespace gyre::cuda
