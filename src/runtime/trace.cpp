#include "gyre/trace.h"

#include <algorithm>
#include <iomanip>
#include <locale>
#include <map>
#include <new>
#include <ostream>
#include <utility>

#include "runtime/trace_log.h"

namespace gyre {
namespace {

int64_t clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Restores what a table changes on the caller's stream.
class StreamFormat {
 public:
  explicit StreamFormat(std::ostream& out)
      : out_(out),
        flags_(out.flags()),
        precision_(out.precision()),
        fill_(out.fill()),
        locale_(out.imbue(std::locale::classic())) {}  // JSON has no decimal commas
  StreamFormat(const StreamFormat&) = delete;
  StreamFormat& operator=(const StreamFormat&) = delete;
  ~StreamFormat() {
    out_.flags(flags_);
    out_.precision(precision_);
    out_.fill(fill_);
    out_.imbue(locale_);
  }

 private:
  std::ostream& out_;
  std::ios::fmtflags flags_;
  std::streamsize precision_;
  char fill_;
  std::locale locale_;
};

double microseconds(uint64_t ns) { return static_cast<double>(ns) / 1e3; }

std::string hex(uint64_t value) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text = "0x";
  for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[value >> shift & 15];
  return text;
}

// A custom kernel may be called anything.
std::string json_text(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string made;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20) {
      made += "\\u00";
      made += kDigits[byte >> 4];
      made += kDigits[byte & 15];
      continue;
    }
    if (c == '"' || c == '\\') made += '\\';
    made += c;
  }
  return made;
}

}  // namespace

uint64_t TraceEvent::begin_ns() const {
  uint64_t begin = spans.empty() ? 0 : spans.front().begin_ns;
  for (const TraceSpan& span : spans) begin = std::min(begin, span.begin_ns);
  return begin;
}

uint64_t TraceEvent::duration_ns() const {
  uint64_t end = 0;
  for (const TraceSpan& span : spans) end = std::max(end, span.end_ns);
  return spans.empty() ? 0 : end - begin_ns();
}

void Trace::write_text(std::ostream& out) const try {
  const StreamFormat format(out);
  out << std::fixed << std::setprecision(3);
  for (const TraceEvent& event : events) {
    out << event.submission << '.' << event.command << ' ' << event.kernel
        << " spec=" << hex(event.spec) << ' ' << event.shape << (event.barrier ? " barrier" : "")
        << " start_us=" << microseconds(event.begin_ns())
        << " duration_us=" << microseconds(event.duration_ns()) << '\n';
  }
  if (dropped != 0) out << dropped << " events beyond the limit were dropped\n";
} catch (const std::bad_alloc&) {
  out_of_memory("trace.write_text");
}

void Trace::write_table(std::ostream& out) const try {
  struct Row {
    uint64_t count = 0, total = 0, min = ~uint64_t{0}, max = 0;
  };
  std::map<std::string, Row> rows;
  for (const TraceEvent& event : events) {
    Row& row = rows[event.kernel];
    const uint64_t ns = event.duration_ns();
    ++row.count;
    row.total += ns;
    row.min = std::min(row.min, ns);
    row.max = std::max(row.max, ns);
  }
  std::vector<std::pair<std::string, Row>> sorted(rows.begin(), rows.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.second.total > b.second.total; });
  const StreamFormat format(out);
  out << std::fixed << std::setprecision(2) << std::left << std::setw(20) << "kernel" << std::right
      << std::setw(10) << "count" << std::setw(14) << "total us" << std::setw(12) << "min us"
      << std::setw(12) << "max us" << '\n';
  for (const auto& [kernel, row] : sorted) {
    out << std::left << std::setw(20) << kernel << std::right << std::setw(10) << row.count
        << std::setw(14) << microseconds(row.total) << std::setw(12) << microseconds(row.min)
        << std::setw(12) << microseconds(row.max) << '\n';
  }
  if (dropped != 0) out << dropped << " events beyond the limit were dropped\n";
} catch (const std::bad_alloc&) {
  out_of_memory("trace.write_table");
}

void Trace::write_chrome(std::ostream& out) const try {
  const StreamFormat format(out);
  out << std::fixed << std::setprecision(3) << "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
  const char* separator = "\n";
  for (const TraceEvent& event : events) {
    for (const TraceSpan& span : event.spans) {
      out << separator << R"({"name":")" << json_text(event.kernel)
          << R"(","ph":"X","pid":1,"tid":)" << span.thread
          << ",\"ts\":" << microseconds(span.begin_ns)
          << ",\"dur\":" << microseconds(span.end_ns - span.begin_ns) << R"(,"args":{"spec":")"
          << hex(event.spec) << R"(","shape":")" << event.shape << R"(","barrier":)"
          << (event.barrier ? "true" : "false") << ",\"submission\":" << event.submission
          << ",\"command\":" << event.command << "}}";
      separator = ",\n";
    }
  }
  out << "\n]}\n";
} catch (const std::bad_alloc&) {
  out_of_memory("trace.write_chrome");
}

void TraceLog::start() {
  const std::lock_guard lock(mutex_);
  trace_ = {};
  submissions_ = 0;
  ++generation_;
  origin_ns_.store(clock_ns(), std::memory_order_relaxed);
  enabled_.store(true, std::memory_order_relaxed);
}

Trace TraceLog::stop() {
  const std::lock_guard lock(mutex_);
  enabled_.store(false, std::memory_order_relaxed);
  return std::exchange(trace_, {});
}

uint64_t TraceLog::now_ns() const {
  return static_cast<uint64_t>(
      std::max<int64_t>(0, clock_ns() - origin_ns_.load(std::memory_order_relaxed)));
}

void TraceLog::add(const CommandList& list, const std::vector<Timing>& timings,
                   uint64_t generation) noexcept {
  try {
    add_events(list, timings, generation);
  } catch (const std::bad_alloc&) {
    drop(list.commands.size());
  }
}

void TraceLog::drop(uint64_t events) noexcept {
  const std::lock_guard lock(mutex_);
  trace_.dropped += events;
}

void TraceLog::add_events(const CommandList& list, const std::vector<Timing>& timings,
                          uint64_t generation) {
  std::vector<std::vector<TraceSpan>> spans(list.commands.size());
  for (const Timing& timing : timings) {
    std::vector<TraceSpan>& of_command = spans[timing.command];
    // One thread's consecutive tasks of a command read better as one bar.
    const auto same_thread =
        std::find_if(of_command.begin(), of_command.end(),
                     [&](const TraceSpan& s) { return s.thread == timing.span.thread; });
    if (same_thread == of_command.end()) {
      of_command.push_back(timing.span);
    } else {
      same_thread->end_ns = timing.span.end_ns;
    }
  }
  const std::lock_guard lock(mutex_);
  if (!enabled() || generation != generation_) return;  // stopped while this list ran
  const uint64_t submission = submissions_++;
  const size_t known = trace_.events.size();
  try {
    add_to_trace(list, submission, spans);
  } catch (...) {
    trace_.events.erase(trace_.events.begin() + static_cast<ptrdiff_t>(known), trace_.events.end());
    throw;
  }
}

// With the lock held.
void TraceLog::add_to_trace(const CommandList& list, uint64_t submission,
                            std::span<std::vector<TraceSpan>> spans) {
  for (size_t i = 0; i < list.commands.size(); ++i) {
    if (trace_.events.size() >= kMaxEvents) {
      ++trace_.dropped;
      continue;
    }
    const Command& command = list.commands[i];
    const KernelInfo& kernel = *command.pipeline->kernel;
    trace_.events.push_back({.kernel = kernel.name,
                             .spec = command.pipeline->spec,
                             .shape = shape_of(uses_, kernel, list.params_of(command)),
                             .barrier = command.barrier,
                             .submission = submission,
                             .command = static_cast<uint32_t>(i),
                             .spans = std::move(spans[i])});
  }
}

}  // namespace gyre
