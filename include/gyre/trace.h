#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "gyre/export.h"

namespace gyre {

// One thread's (or stream's) work on one command. Nanoseconds since the trace started.
struct TraceSpan {
  uint32_t thread = 0;
  uint64_t begin_ns = 0;
  uint64_t end_ns = 0;
};

struct TraceEvent {
  std::string kernel{};
  uint64_t spec = 0;
  std::string shape{};
  bool barrier = false;     // waited for the commands before it
  uint64_t submission = 0;  // counts submits and replays
  uint32_t command = 0;     // position in the submitted list
  std::vector<TraceSpan> spans{};

  GYRE_API uint64_t begin_ns() const;
  GYRE_API uint64_t duration_ns() const;  // first begin to last end
};

// What ran between Device::start_trace and Device::stop_trace, in submission order.
class GYRE_API Trace {
 public:
  std::vector<TraceEvent> events;
  uint64_t dropped = 0;  // events beyond 2^20, or that there was no memory for

  void write_text(std::ostream& out) const;    // one line per command
  void write_table(std::ostream& out) const;   // count, total, min, max per kernel
  void write_chrome(std::ostream& out) const;  // JSON for chrome://tracing and Perfetto
};

}  // namespace gyre
