#include "compare_table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace gyre::tools {
namespace {

std::string shown(double value, int decimals, const char* unit = "") {
  return std::isfinite(value) ? fixed(value, decimals) + unit : "-";
}

// Three figures.
std::string rate(double per_second) {
  return shown(per_second, per_second >= 100 ? 0 : (per_second >= 10 ? 1 : 2));
}

std::string scientific(double value) {
  if (!std::isfinite(value)) return "-";
  char text[32];
  std::snprintf(text, sizeof(text), "%.1e", value);
  return text;
}

}  // namespace

const std::vector<Column>& compare_columns() {
  static const std::vector<Column> kColumns = {
      {"context", Align::right},       {"format"},
      {"per token", Align::right},     {"cache", Align::right},
      {"us/step/layer", Align::right}, {"tok/s", Align::right},
      {"speed", Align::right},         {"of bandwidth", Align::right},
      {"error", Align::right}};
  return kColumns;
}

std::vector<std::string> compare_cells(const bench::CompareEntry& e) {
  return {std::to_string(e.context),
          e.formats.label(),
          human_bytes(static_cast<uint64_t>(std::llround(e.bytes_per_token))),
          human_bytes(e.cache_bytes),
          shown(e.step_us, 1),
          rate(e.tokens_per_second),
          shown(e.speedup, 2, "x"),
          shown(100 * e.fraction, 0, " %"),
          scientific(e.nmse)};
}

std::vector<std::string> describe_model(const bench::CompareReport& report) {
  const bench::ModelShape& s = report.shape;
  std::vector<std::string> lines = {
      s.name + ": " + std::to_string(s.layers) + (s.layers == 1 ? " layer, " : " layers, ") +
      std::to_string(s.heads) + " query heads over " + std::to_string(s.kv_heads) +
      " KV heads of " + std::to_string(s.head_dim) + "."};
  const uint64_t full = bench::full_layers(s);
  if (full != s.layers) {
    lines.push_back(std::to_string(s.layers - full) + " layers see a window of " +
                    std::to_string(s.window) + " tokens and stay in f16; the other " +
                    std::to_string(full) + " grow with the context. A step is of one of these.");
  }
  if (report.tail != 0) {
    lines.push_back("Compressed formats keep the newest " + std::to_string(report.tail) +
                    " tokens in f16.");
  }
  return lines;
}

std::string describe_machine(const bench::CompareReport& report) {
  double min = 0, max = 0;
  for (const bench::CompareEntry& entry : report.entries) {
    if (!std::isfinite(entry.limit_gbps)) continue;
    min = min == 0 ? entry.limit_gbps : std::min(min, entry.limit_gbps);
    max = std::max(max, entry.limit_gbps);
  }
  const std::string low = fixed(min, 0), high = fixed(max, 0);
  return std::to_string(report.threads) + " threads on " + report.device + ": " +
         report.description + ". It reads " + (low == high ? high : low + " to " + high) + " GB/s.";
}

std::string compare_meaning(const bench::CompareReport& report) {
  const std::string first =
      report.entries.empty() ? "the first format" : report.entries.front().formats.label();
  return "A step appends one token and attends once, in one layer; tok/s is one step of every "
         "layer, "
         "without\nthe model's matrix products. Speed is against " +
         first +
         "; the bandwidth is what the machine reads in\nthe same run; error is the squared error "
         "of "
         "the output relative to double precision.";
}

}  // namespace gyre::tools
