#include "trace_file.h"

#include <algorithm>
#include <cmath>
#include <istream>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>
#include <sstream>

#include "gyre/error.h"

namespace gyre::tools {
namespace {

using bench::kTraceBlockTokens;
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
constexpr uint64_t kMostId = ~uint64_t{0};
constexpr double kMostSeconds = 1e7;  // months

// For messages: short, and no recursion into lists of lists of lists.
std::string shown(const nlohmann::json& value) {
  if (value.is_structured()) return value.is_array() ? "a list" : "an object";
  constexpr size_t kMost = 40;
  const std::string text = value.dump();
  return text.size() <= kMost ? text : text.substr(0, kMost) + "...";
}

// One line's object; each key is read once, and none may be left.
class Line {
 public:
  Line(const std::string& text, std::string where) : where_(std::move(where)) {
    std::set<std::string> keys;
    using Event = nlohmann::json::parse_event_t;
    const auto see = [&](int depth, Event event, nlohmann::json& key) {
      if (event != Event::key || depth != 1) return true;
      const bool is_new = keys.insert(key.get<std::string>()).second;
      require(is_new, where_, ": ", shown(key), " is there twice");
      return true;
    };
    try {
      json_ = nlohmann::json::parse(text, see);
    } catch (const nlohmann::json::out_of_range&) {
      require(false, where_, " has a number that is too large");
    } catch (const nlohmann::json::exception&) {  // below
    }
    require(json_.is_object(), where_, " is not a JSON object; each line must be one");
  }

  bool has(const char* key) const { return json_.contains(key); }

  uint64_t count(const char* key, uint64_t least, uint64_t most) {
    return count_in(take(key), std::string("\"") + key + "\"", least, most);
  }
  double number(const char* key, double most) {
    const nlohmann::json value = take(key);
    require(value.is_number() && value >= 0 && value <= most, where_, ": \"", key,
            "\" must be a number from 0 to ", most, ", got ", shown(value));
    return value.get<double>();
  }
  std::vector<uint64_t> counts(const char* key, uint64_t size) {
    const nlohmann::json value = take(key);
    require(value.is_array(), where_, ": \"", key, "\" must be a list, got ", shown(value));
    require(value.size() == size, where_, ": \"", key, "\" must have ", size, " blocks of ",
            kTraceBlockTokens, " tokens, got ", value.size());
    std::vector<uint64_t> all;
    for (const nlohmann::json& each : value)
      all.push_back(count_in(each, std::string("each of \"") + key + "\"", 0, kMostId));
    return all;
  }
  void end() const {
    require(json_.empty(), where_, ": unknown key ",
            json_.empty() ? "" : shown(json_.begin().key()));
  }

 private:
  nlohmann::json take(const char* key) {
    const auto found = json_.find(key);
    require(found != json_.end(), where_, " has no \"", key, "\"");
    nlohmann::json value = std::move(*found);
    json_.erase(found);
    return value;
  }
  uint64_t count_in(const nlohmann::json& value, const std::string& what, uint64_t least,
                    uint64_t most) const {
    const bool whole =  // -0 is one
        value.is_number_unsigned() || (value.is_number_integer() && value.get<int64_t>() >= 0);
    const uint64_t count = whole ? value.get<uint64_t>() : 0;
    require(whole && count >= least && count <= most, where_, ": ", what,
            " must be a whole number from ", least, " to ", most, ", got ", shown(value));
    return count;
  }

  nlohmann::json json_;
  std::string where_;
};

TraceRequest parse_own(Line& line) {
  TraceRequest request;
  request.at = line.number("at", kMostSeconds);
  request.conversation = line.count("conversation", 0, kMostId);
  request.system = line.count("system", 0, kMostId);
  request.system_tokens = line.count("system_tokens", 0, kMostTokens);
  request.user_tokens = line.count("user_tokens", 1, kMostTokens);
  request.answer_tokens = line.count("answer_tokens", 1, kMostTokens);
  return request;
}

TraceRequest parse_mooncake(Line& line) {
  TraceRequest request;
  request.at = line.number("timestamp", kMostSeconds * 1e3) * 1e-3;
  request.user_tokens = line.count("input_length", 1, kMostTokens);
  request.answer_tokens = line.count("output_length", 1, kMostTokens);
  const uint64_t blocks = (request.user_tokens + kTraceBlockTokens - 1) / kTraceBlockTokens;
  request.blocks = line.counts("hash_ids", blocks);
  return request;
}

}  // namespace

Trace read_trace(std::istream& in, const std::string& name) {
  Trace trace;
  std::map<uint64_t, const TraceRequest*> first;  // of each conversation
  std::vector<uint64_t> lines;                    // of each request
  uint64_t number = 0;
  bool mooncake = false;
  for (std::string text; std::getline(in, text);) {
    ++number;
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = "trace: line " + std::to_string(number) + " of " + name;
    Line line(text, where);
    if (trace.empty()) mooncake = line.has("timestamp");
    require(!trace.empty() || mooncake || line.has("at"), where,
            " has neither \"at\", as Gyre's traces do, nor \"timestamp\", as Mooncake's");
    trace.push_back(mooncake ? parse_mooncake(line) : parse_own(line));
    line.end();
    lines.push_back(number);
    if (mooncake) trace.back().conversation = trace.size() - 1;
    require(trace.size() == 1 || trace[trace.size() - 2].at <= trace.back().at, where,
            " is earlier than the line before");
  }
  if (in.bad()) throw Error(ErrorCode::io, "trace: " + name + " cannot be read");  // a folder
  require(!trace.empty(), "trace: ", name, " has no requests");
  for (size_t i = 0; i < trace.size() && !mooncake; ++i) {
    const TraceRequest &r = trace[i], &began = *first.try_emplace(r.conversation, &r).first->second;
    require(r.system == began.system && r.system_tokens == began.system_tokens, "trace: line ",
            lines[i], " of ", name, " changes the system prompt of conversation ", r.conversation,
            " from ", began.system, " (", began.system_tokens, " tokens) to ", r.system, " (",
            r.system_tokens, " tokens)");
  }
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

void write_mooncake_trace(std::ostream& out, const Trace& trace) {
  for (const TraceRequest& r : bench::in_blocks(trace)) {
    nlohmann::ordered_json json;
    json["timestamp"] = static_cast<uint64_t>(std::llround(r.at * 1000));
    json["input_length"] = r.user_tokens;
    json["output_length"] = r.answer_tokens;
    json["hash_ids"] = r.blocks;
    out << json.dump() << '\n';
  }
}

}  // namespace gyre::tools
