#include "trace_file.h"

#include <cmath>
#include <istream>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>

#include "gyre/error.h"

namespace gyre::tools {
namespace {

using bench::Trace;
using bench::TraceRequest;

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream text;
  (text << ... << parts);
  throw Error(ErrorCode::invalid_argument, text.str());
}

constexpr uint64_t kMostTokens = 1 << 24;

// One line. Fields that are missing or of another type are refused by name.
TraceRequest parse_request(const std::string& line, const std::string& where) {
  const nlohmann::json json = nlohmann::json::parse(line, nullptr, false);
  require(json.is_object(), where, " is not a JSON object");
  const auto count = [&](const char* key, uint64_t least, uint64_t most) {
    const auto found = json.find(key);
    require(found != json.end() && found->is_number_unsigned(), where, " has no count \"", key,
            "\"");
    const auto value = found->get<uint64_t>();
    require(value >= least && value <= most, where, ": \"", key, "\" must be from ", least, " to ",
            most, ", got ", value);
    return value;
  };
  const auto at = json.find("at");
  require(at != json.end() && at->is_number(), where, " has no number \"at\"");
  TraceRequest request;
  request.at = at->get<double>();
  require(std::isfinite(request.at) && request.at >= 0, where, ": \"at\" must not be negative");
  request.conversation = count("conversation", 0, ~uint64_t{0});
  request.system = count("system", 0, ~uint64_t{0});
  request.system_tokens = count("system_tokens", 0, kMostTokens);
  request.user_tokens = count("user_tokens", 1, kMostTokens);
  request.answer_tokens = count("answer_tokens", 1, kMostTokens);
  return request;
}

}  // namespace

Trace read_trace(std::istream& in, const std::string& name) {
  Trace trace;
  uint64_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = "trace: line " + std::to_string(number) + " of " + name;
    trace.push_back(parse_request(line, where));
    require(trace.size() == 1 || trace[trace.size() - 2].at <= trace.back().at, where,
            " is earlier than the line before");
  }
  require(!trace.empty(), "trace: ", name, " has no requests");
  return trace;
}

void write_trace(std::ostream& out, const Trace& trace) {
  for (const TraceRequest& r : trace) {
    nlohmann::ordered_json json;
    json["at"] = std::round(r.at * 1000) / 1000;
    json["conversation"] = r.conversation;
    json["system"] = r.system;
    json["system_tokens"] = r.system_tokens;
    json["user_tokens"] = r.user_tokens;
    json["answer_tokens"] = r.answer_tokens;
    out << json.dump() << '\n';
  }
}

}  // namespace gyre::tools
