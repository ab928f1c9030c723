#pragma once
// A trace as a file of JSON lines, of Gyre's own kind:
//   {"at": 1.5, "conversation": 3, "system": 0, "system_tokens": 512, "user_tokens": 40,
//    "answer_tokens": 120}
// or of Mooncake's (https://github.com/kvcache-ai/Mooncake), milliseconds and blocks of 512 tokens:
//   {"timestamp": 1500, "input_length": 552, "output_length": 120, "hash_ids": [0, 7]}

#include <iosfwd>
#include <string>

#include "trace.h"

namespace gyre::tools {

// The first line says which kind the file is of. Refuses lines that are not such objects, unknown
// keys, times that go back, numbers out of range, and a conversation whose system prompt changes;
// `name` is what messages call the file.
bench::Trace read_trace(std::istream& in, const std::string& name);
void write_trace(std::ostream& out, const bench::Trace& trace);
void write_mooncake_trace(std::ostream& out, const bench::Trace& trace);

}  // namespace gyre::tools
