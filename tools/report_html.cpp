#include "report_html.h"

#include <algorithm>
#include <cmath>

#include "compare_table.h"
#include "html_page.h"
#include "svg_chart.h"

namespace gyre::tools {
namespace {

using bench::CompareEntry;
using bench::CompareReport;

uint64_t longest(const CompareReport& report) {
  uint64_t context = 0;
  for (const CompareEntry& entry : report.entries) context = std::max(context, entry.context);
  return context;
}

bool usable(double value) { return std::isfinite(value) && value > 0; }

// The fastest format of the whole model at the longest context, in a sentence; empty where there is
// nothing to say.
std::string headline(const CompareReport& report) {
  const CompareEntry *first = nullptr, *best = nullptr;
  for (const CompareEntry& entry : report.entries) {
    if (entry.context != longest(report) || !usable(entry.tokens_per_second)) continue;
    if (first == nullptr) first = &entry;
    if (best == nullptr || entry.tokens_per_second > best->tokens_per_second) best = &entry;
  }
  if (best == first || first->cache_bytes == 0) return {};
  const double part =
      static_cast<double>(best->cache_bytes) / static_cast<double>(first->cache_bytes);
  return "At " + std::to_string(best->context) + " tokens " + best->formats.label() + " decodes " +
         fixed(best->tokens_per_second / first->tokens_per_second, 1) + " times as fast as " +
         first->formats.label() + ", with " + fixed(100 * part, 0) + " % of its memory (" +
         human_bytes(best->cache_bytes) + " instead of " + human_bytes(first->cache_bytes) + ").";
}

std::string table_head() {
  // Longer than in a terminal: there is room for two lines.
  static constexpr const char* kTitles[] = {"context",
                                            "format",
                                            "bytes per token",
                                            "cache size",
                                            "\u00b5s per step and layer",
                                            "tokens per second",
                                            "speed",
                                            "of the bandwidth",
                                            "error (NMSE)"};
  std::string head = "<thead><tr>";
  for (size_t i = 0; i < std::size(kTitles); ++i) {
    const bool left = compare_columns()[i].align == Align::left;
    head += std::string("<th scope=\"col\"") + (left ? " class=\"left\"" : "") + ">" +
            escape_html(kTitles[i]) + "</th>";
  }
  return head + "</tr></thead>\n";
}

std::string table(const CompareReport& report) {
  std::string out = tag("p", compare_meaning(report)) +
                    "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"All "
                    "figures\">\n<table>\n" +
                    tag("caption", "Formats at each context") + table_head();
  for (size_t i = 0; i < report.entries.size(); ++i) {
    const CompareEntry& entry = report.entries[i];
    const bool begins = i == 0 || report.entries[i - 1].context != entry.context;
    const bool ends =
        i + 1 == report.entries.size() || report.entries[i + 1].context != entry.context;
    const std::vector<std::string> cells = compare_cells(entry);
    out += begins ? "<tbody>\n<tr>" : "<tr>";
    out += std::string("<td") + (begins ? " class=\"first\"" : "") + ">" + escape_html(cells[0]) +
           "</td><th scope=\"row\" class=\"left\">" + escape_html(cells[1]) + "</th>";
    for (size_t c = 2; c < cells.size(); ++c) out += "<td>" + escape_html(cells[c]) + "</td>";
    out += ends ? "</tr>\n</tbody>\n" : "</tr>\n";
  }
  return out + "</table>\n</div>\n";
}

std::string notes(const CompareReport& report) {
  std::string out;
  for (const std::string& line : describe_model(report)) out += tag("p", line);
  return out +
         tag("p",
             "Each format has its own caches, filled with keys and values drawn from N(0,1). Steps "
             "of all formats and plain reading of memory take turns; figures are medians. A format "
             "such as tq8/tq4 stores keys in the first and values in the second.");
}

}  // namespace

std::string time_chart(const CompareReport& report) {
  Chart chart;
  chart.id = "time";
  chart.title = "Time per decode step and layer against context";
  chart.x = {"tokens in the cache", true, {}};
  chart.y = {"\u00b5s per step and layer", true, {}};
  for (const CompareEntry& entry : report.entries) {
    const std::string label = entry.formats.label();
    auto found = std::find_if(chart.series.begin(), chart.series.end(),
                              [&](const ChartSeries& series) { return series.label == label; });
    if (found == chart.series.end()) found = chart.series.insert(found, {label, {}});
    const auto context = static_cast<double>(entry.context);
    found->points.push_back({context, entry.step_us});
    if (std::find(chart.x.ticks.begin(), chart.x.ticks.end(), context) == chart.x.ticks.end())
      chart.x.ticks.push_back(context);
    if (entry.context == longest(report)) {
      chart.description += (chart.description.empty() ? "At the longest context: " : ", ") + label +
                           " " + plain_number(std::round(entry.step_us)) + " \u00b5s";
    }
  }
  std::sort(chart.x.ticks.begin(), chart.x.ticks.end());
  return svg_chart(chart);
}

std::string error_chart(const CompareReport& report) {
  Chart chart;
  chart.id = "error";
  chart.title = "Error of the attention output against bits per coordinate";
  chart.x = {"bits per coordinate, scales included", false, {0, 4, 8, 16, 32}};
  chart.y = {"squared error, relative (NMSE)", true, {}};
  chart.lines = false;
  for (const CompareEntry& entry : report.entries) {
    if (entry.context != longest(report)) continue;
    chart.series.push_back({entry.formats.label(), {{entry.bits, entry.nmse}}});
    if (!usable(entry.bits) || !usable(entry.nmse)) continue;
    chart.description += (chart.description.empty() ? "" : ", ") + entry.formats.label() + " " +
                         fixed(entry.bits, 1) + " bits, error " + plain_number(entry.nmse);
  }
  return svg_chart(chart);
}

std::string report_html(const CompareReport& report, const ReportInfo& info) {
  const std::string title = "KV cache formats for " + report.shape.name, words = headline(report);
  const std::string at = "at " + std::to_string(longest(report)) + " tokens";
  return html_page(
      title, (words.empty() ? "" : "<p class=\"lead\">" + escape_html(words) + "</p>\n") +
                 "<div class=\"charts\">\n" +
                 figure("Time per decode step and layer", time_chart(report)) +
                 figure("Error of the attention output " + at, error_chart(report)) + "</div>\n" +
                 tag("h2", "All figures") + table(report) + tag("h2", "What was measured") +
                 notes(report) + run_facts(describe_machine(report), info));
}

}  // namespace gyre::tools
