#pragma once
// A trace as a file of JSON lines:
//   {"at": 1.5, "conversation": 3, "system": 0, "system_tokens": 512, "user_tokens": 40,
//    "answer_tokens": 120}

#include <iosfwd>
#include <string>

#include "trace.h"

namespace gyre::tools {

// Refuses lines that are not such objects, times that go back, and numbers out of range; `name` is
// what messages call it.
bench::Trace read_trace(std::istream& in, const std::string& name);
void write_trace(std::ostream& out, const bench::Trace& trace);

}  // namespace gyre::tools
