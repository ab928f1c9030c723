#include "simulate_report.h"

#include <algorithm>

#include "svg_chart.h"

namespace gyre::tools {
namespace {

using bench::SimulateResult;
using bench::SimulateSample;

// As many points as a chart can show; each is the largest of its part of the time.
template <class Value>
std::vector<ChartPoint> over_time(const SimulateResult& result, const Value& value) {
  constexpr size_t kPoints = 120;
  std::vector<ChartPoint> points;
  const double end = result.samples.empty() ? 0 : result.samples.back().at;
  size_t i = 0;
  for (size_t part = 0; part < kPoints && i < result.samples.size(); ++part) {
    const double until = end * static_cast<double>(part + 1) / kPoints;
    double peak = -1;
    for (; i < result.samples.size() && (result.samples[i].at <= until || part + 1 == kPoints); ++i)
      peak = std::max(peak, static_cast<double>(value(result.samples[i])));
    if (peak >= 0) points.push_back({until, peak});
  }
  return points;
}

template <class Value>
std::string chart(const char* id, const std::string& title, const std::string& unit,
                  const std::vector<SimulateResult>& results, const Value& value) {
  Chart chart;
  chart.id = id;
  chart.title = title;
  chart.x = {"seconds", false, {}};
  chart.y = {unit, false, {}};
  for (const SimulateResult& result : results) {
    chart.series.push_back({result.formats.label(), over_time(result, value)});
    double peak = 0;
    for (const ChartPoint& point : chart.series.back().points) peak = std::max(peak, point.y);
    chart.description += (chart.description.empty() ? "At most " : ", ") + plain_number(peak) +
                         " with " + result.formats.label();
  }
  return svg_chart(chart);
}

std::string table(const std::vector<SimulateResult>& results) {
  std::string out =
      "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"All "
      "figures\">\n<table>\n<thead><tr>";
  for (const Column& column : simulate_columns()) {
    const bool left = column.align == Align::left;
    out += std::string("<th scope=\"col\"") + (left ? " class=\"left\"" : "") + ">" +
           escape_html(column.title) + "</th>";
  }
  out += "</tr></thead>\n<tbody>\n";
  for (const SimulateResult& result : results) {
    const std::vector<std::string> cells = simulate_cells(result, results[0]);
    out += "<tr><th scope=\"row\" class=\"left\">" + escape_html(cells[0]) + "</th>";
    for (size_t c = 1; c < cells.size(); ++c) out += "<td>" + escape_html(cells[c]) + "</td>";
    out += "</tr>\n";
  }
  return out + "</tbody>\n</table>\n</div>\n";
}

// What the clock counts.
std::string step_time(const bench::SimulateOptions& o) {
  std::string rates;
  for (const double rate : o.kv_gbps) rates += (rates.empty() ? "" : ", ") + plain_number(rate);
  const std::string kv = rates.empty()
                             ? "its KV path, which runs"
                             : "reading its sequences' keys and values at " + rates + " GB/s";
  if (o.step_ms == 0 && o.token_us == 0)
    return "A step takes the time of " + kv + "; the rest of a model counts nothing (--step-ms).";
  return "A step takes " + plain_number(o.step_ms) + " ms, " + plain_number(o.token_us) +
         " us for each token, and " + kv + ".";
}

}  // namespace

std::vector<Column> simulate_columns() {
  return {{"format"},
          {"pages", Align::right},
          {"users held", Align::right},
          {"of the first", Align::right},
          {"full", Align::right},
          {"most", Align::right},
          {"wait p50 s", Align::right},
          {"p99 s", Align::right},
          {"pause p99 s", Align::right},
          {"hit rate", Align::right},
          {"pages shared", Align::right},
          {"tokens/s", Align::right},
          {"evictions", Align::right},
          {"preempted", Align::right},
          {"refused", Align::right}};
}

std::vector<std::string> simulate_cells(const SimulateResult& r, const SimulateResult& first) {
  const bool comparable = r.was_full() && first.was_full();
  return {r.formats.label(),
          std::to_string(r.pages),
          fixed(r.held_users, 1),
          comparable ? fixed(r.held_users / first.held_users, 2) + "x" : "-",
          fixed(100 * r.full_part, 0) + " %",
          std::to_string(r.max_users),
          fixed(r.wait_p50, 2),
          fixed(r.wait_p99, 2),
          fixed(r.pause_p99, 2),
          fixed(100 * r.hit_rate(), 0) + " %",
          std::to_string(r.max_shared),
          fixed(r.tokens_per_second(), 0),
          std::to_string(r.evictions),
          std::to_string(r.preemptions),
          std::to_string(r.refused)};
}

std::string simulate_meaning(const bench::SimulateOptions& o, const bench::Trace& trace) {
  return std::to_string(trace.size()) + " requests over " + fixed(trace.back().at, 0) +
         " s, a pool of " + human_bytes(o.memory) + " in pages of " +
         std::to_string(o.page_tokens) + " tokens, " + std::to_string(o.layers) + " layers of " +
         std::to_string(o.heads) + "/" + std::to_string(o.kv_heads) + "/" +
         std::to_string(o.head_dim) + ", at most " + std::to_string(o.users) + " users and " +
         std::to_string(o.step_tokens) + " tokens in a step. " + step_time(o) +
         " Users held are the mean of those that have pages while others wait for pages, which is "
         "`full` of the time (if nobody waits: of those served). A wait is from arrival to the "
         "answer's first token, a pause the longest time between two tokens of an answer, also if "
         "it was preempted between them. The hit rate is the part of prompt tokens that the prefix "
         "index had. Tokens per second count prompts "
         "and answers over the time of all steps. Refused are requests longer than the pool.";
}

std::string simulate_html(const bench::SimulateOptions& options, const bench::Trace& trace,
                          const std::vector<SimulateResult>& results, const std::string& machine,
                          const ReportInfo& info) {
  const std::string title = "Serving from one pool of " + human_bytes(options.memory);
  const auto pages = [](const SimulateSample& s) { return s.used + s.cached; };
  return html_page(
      title,
      "<div class=\"charts\">\n" +
          figure("Users served at once", chart("users", "Users served over time", "users", results,
                                               [](const SimulateSample& s) { return s.users; })) +
          figure("Pages in use, shared prefixes included",
                 chart("pages", "Pages in use over time", "pages", results, pages)) +
          figure("Hit rate so far",
                 chart("hits", "Prompt tokens that the prefix index had, so far", "%", results,
                       [](const SimulateSample& s) { return 100 * s.hit_rate; })) +
          figure("Evictions so far",
                 chart("evictions", "Pages taken from the prefix index, so far", "pages", results,
                       [](const SimulateSample& s) { return s.evictions; })) +
          figure("Pages shared",
                 chart("shared", "Pages that several sequences share, over time", "pages", results,
                       [](const SimulateSample& s) { return s.shared; })) +
          figure("Longest wait for an answer's first token",
                 chart("waits", "Longest wait of the answers that began, over time", "seconds",
                       results, [](const SimulateSample& s) { return s.wait; })) +
          figure("Longest pause in an answer",
                 chart("pauses", "Longest time between two tokens of an answer, over time",
                       "seconds", results, [](const SimulateSample& s) { return s.pause; })) +
          figure("Requests waiting",
                 chart("waiting", "Requests that wait, over time", "requests", results,
                       [](const SimulateSample& s) { return s.waiting; })) +
          "</div>\n" + tag("h2", "All figures") + table(results) + tag("h2", "What was measured") +
          tag("p", simulate_meaning(options, trace)) + run_facts(machine, info));
}

}  // namespace gyre::tools
