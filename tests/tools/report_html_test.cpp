// The page of `gyre compare`: well-formed and complete, whatever the figures are.
#include "report_html.h"

#include "compare_table.h"
#include "gyre_test.h"
#include "svg_chart.h"

namespace gyre::tools {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

bench::CompareReport made_up() {
  bench::CompareReport report;
  report.shape = {"model-7b", 32, 32, 8, 128};
  report.device = "cpu";
  report.description = "a processor";
  report.threads = 2;
  for (const uint64_t context : {1024, 16384}) {
    double us = static_cast<double>(context) / 4, error = 1e-7;
    for (const bench::FormatPair& pair : bench::usual_formats()) {
      bench::CompareEntry entry;
      entry.formats = pair;
      entry.context = context;
      entry.bits = 2 - std::log10(error);
      entry.bytes_per_token = 66560;
      entry.cache_bytes = 66560 * context;
      entry.step_us = us;
      entry.model_us = 32 * us;
      entry.tokens_per_second = 1e6 / entry.model_us;
      entry.speedup = static_cast<double>(context) / 4 / us;
      entry.limit_gbps = 50;
      entry.fraction = 0.37;
      entry.nmse = error;
      us *= 0.8, error *= 10;
      report.entries.push_back(entry);
    }
  }
  return report;
}

const ReportInfo kInfo = {"gyre compare model-7b", "2026-01-02 03:04 UTC", "9.8.7"};

// Empty, or what is wrong: every tag is closed in order, every & begins an entity.
std::string fault_of(const std::string& page) {
  std::vector<std::string> open;
  for (size_t i = 0; i < page.size(); ++i) {
    if (page[i] == '&' && page.find(';', i) > i + 7) return "a bare & at " + page.substr(i, 20);
    if (page[i] != '<' || page[i + 1] == '!') continue;
    const size_t end = page.find('>', i);
    if (end == std::string::npos) return "a tag without an end";
    const bool closes = page[i + 1] == '/';
    const size_t begin = i + (closes ? 2 : 1);
    const std::string name = page.substr(begin, page.find_first_of(" />\n", begin) - begin);
    if (std::string(page, i + 1, end - i - 1).find('<') != std::string::npos)
      return "< inside of " + name;
    if (closes && (open.empty() || open.back() != name)) return "</" + name + "> out of order";
    if (closes) {
      open.pop_back();
    } else if (page[end - 1] != '/' && name != "meta" && name != "link") {
      open.push_back(name);
    }
    i = end;
  }
  return open.empty() ? "" : open.back() + " is never closed";
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(ReportHtml, TheCheckerFindsFaults) {
  EXPECT_EQ(fault_of("<!DOCTYPE html><p>a &lt; b<br/></p>"), "");
  EXPECT_NE(fault_of("<p><b></p></b>"), "");
  EXPECT_NE(fault_of("<p>"), "");
  EXPECT_NE(fault_of("<p>this & that is not escaped</p>"), "");
}

TEST(ReportHtml, IsWellFormedAndSaysEverything) {
  const std::string page = report_html(made_up(), kInfo);
  EXPECT_EQ(fault_of(page), "");
  for (const char* part :
       {"model-7b", "2 threads on cpu: a processor", "50 GB/s", "gyre compare model-7b",
        "2026-01-02 03:04 UTC", "gyre 9.8.7", "65.0 KiB", "1.0 GiB", "37 %", "1.0e-07",
        ">tokens per second</th>", "<td>122</td>", "viewport", "@media print", "<caption>",
        "At 16384 tokens tq8/tq4 decodes 3.1 times"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(count(page, "<svg"), 2u);
  EXPECT_EQ(count(page, "<polyline"), 6u);
  EXPECT_EQ(count(page, "<tr>"), 13u);
  EXPECT_EQ(count(page, ">tq8/tq4</text>"), 2u);
}

TEST(ReportHtml, HasATitleForEveryColumn) {
  const std::string page = report_html(made_up(), kInfo);
  EXPECT_EQ(count(page, "<th scope=\"col\""), compare_columns().size());
  EXPECT_EQ(compare_cells(made_up().entries[0]).size(), compare_columns().size());
}

TEST(ReportHtml, SaysThatThereIsATail) {
  bench::CompareReport report = made_up();
  EXPECT_EQ(report_html(report, kInfo).find("newest"), std::string::npos);
  report.tail = 128;
  EXPECT_NE(report_html(report, kInfo).find("newest 128 tokens in f16"), std::string::npos);
}

TEST(ReportHtml, LoadsNothing) {
  const std::string page = report_html(made_up(), kInfo);
  EXPECT_EQ(count(page, "http"), 2u);  // the name of SVG's namespace, once per chart
  for (const char* part : {"<script", "src=", "@import", "url("}) EXPECT_EQ(count(page, part), 0u);
}

TEST(ReportHtml, EscapesText) {
  bench::CompareReport report = made_up();
  report.shape.name = "<script>alert('x')</script> & \"co\"\n\x01";
  report.description = "a <b> & c";
  const std::string page = report_html(report, {"gyre \"<i>\" & 'more'", "<now>", "&1"});
  EXPECT_EQ(fault_of(page), "");
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_EQ(page.find('\x01'), std::string::npos);
  EXPECT_NE(page.find("&lt;script&gt;alert(&#39;x&#39;)"), std::string::npos);
  EXPECT_NE(page.find("gyre &quot;&lt;i&gt;&quot; &amp; &#39;more&#39;"), std::string::npos);
}

TEST(ReportHtml, FiguresThatCannotBeDrawnAreLeftOut) {
  for (const double odd : {kNan, kInf, -kInf, 0.0, -1.0}) {
    bench::CompareReport one = made_up(), all = made_up();
    one.entries[7].step_us = one.entries[7].nmse = one.entries[7].bits = odd;
    for (bench::CompareEntry& entry : all.entries) {
      entry.step_us = entry.nmse = entry.bits = entry.speedup = entry.fraction = odd;
      entry.limit_gbps = entry.tokens_per_second = odd;
    }
    for (const bench::CompareReport& report : {one, all}) {
      const std::string page = report_html(report, kInfo);
      EXPECT_EQ(fault_of(page), "") << odd;
      EXPECT_EQ(page.find("nan"), std::string::npos) << odd;
      EXPECT_EQ(count(page, "inf"), 0u) << odd;
    }
    EXPECT_EQ(count(time_chart(one), "<polyline"), 6u);
    EXPECT_NE(time_chart(all).find("nothing to show"), std::string::npos);
  }
}

TEST(ReportHtml, OneFigureOrNoneIsEnough) {
  bench::CompareReport report = made_up();
  report.entries.resize(1);
  EXPECT_EQ(fault_of(report_html(report, kInfo)), "");
  EXPECT_EQ(count(time_chart(report), ">1024</text>"), 1u);
  report.entries.clear();
  EXPECT_EQ(fault_of(report_html(report, kInfo)), "");
}

// Where the text of a label begins.
struct Place {
  double x = 0, y = 0;
};

Place place_of(const std::string& svg, const std::string& label) {
  const size_t end = svg.find(">" + label + "</text>");
  if (end == std::string::npos) return {-1, -1};
  return {std::stod(svg.substr(svg.rfind(" x=\"", end) + 4)),
          std::stod(svg.substr(svg.rfind(" y=\"", end) + 4))};
}

// No label covers another one or leaves the chart.
void expect_labels_apart(const std::string& svg, double top, double bottom) {
  std::vector<double> places;
  for (const bench::FormatPair& pair : bench::usual_formats())
    places.push_back(place_of(svg, pair.label()).y);
  std::sort(places.begin(), places.end());
  EXPECT_GT(places.front(), top);
  EXPECT_LT(places.back(), bottom);
  for (size_t i = 1; i < places.size(); ++i) EXPECT_GE(places[i] - places[i - 1], 13.9);
}

TEST(SvgChart, LabelsKeepTheirDistance) {
  bench::CompareReport report = made_up();
  for (bench::CompareEntry& entry : report.entries) entry.step_us = 100;
  expect_labels_apart(time_chart(report), 0, 340);
}

// Any formats can be asked for: many, with long names, of 32 bits, with the same figures.
TEST(SvgChart, AnyFormatsFit) {
  bench::CompareReport report = made_up();
  const bench::CompareEntry any = report.entries[0];
  report.entries.clear();
  for (const KvFormat k : kv_formats()) {
    for (const KvFormat v : {KvFormat::f32, KvFormat::mlx_native8}) {
      report.entries.push_back(any);
      report.entries.back().formats = {k, v};
      report.entries.back().bits = 32;
    }
  }
  for (const bench::CompareEntry& entry : report.entries) {
    const std::string label = entry.formats.label();
    for (const std::string& svg : {time_chart(report), error_chart(report)}) {
      const Place place = place_of(svg, label);
      EXPECT_GT(place.x, 0) << label;
      EXPECT_GT(place.y, 14) << label;
      EXPECT_LT(place.y, 340) << label;
    }
    EXPECT_LE(place_of(time_chart(report), label).x + 9 * static_cast<double>(label.size()), 480)
        << label;
  }
  EXPECT_NE(error_chart(report).find(">32</text>"), std::string::npos);
  EXPECT_EQ(error_chart(made_up()).find(">32</text>"), std::string::npos);
}

TEST(SvgChart, LabelsOfPointsKeepTheirDistance) {
  bench::CompareReport report = made_up();
  for (bench::CompareEntry& entry : report.entries) entry.bits = 6, entry.nmse = 1e-3;
  report.entries.back().nmse = 1e-4;
  expect_labels_apart(error_chart(report), 14, 300);
}

TEST(SvgChart, NumbersArePlain) {
  EXPECT_EQ(plain_number(0), "0");
  EXPECT_EQ(plain_number(16384), "16384");
  EXPECT_EQ(plain_number(0.5), "0.5");
  EXPECT_EQ(plain_number(1e-7), "1e-7");
  EXPECT_EQ(plain_number(1e-12), "1e-12");
  EXPECT_EQ(plain_number(kNan), "-");
}

}  // namespace
}  // namespace gyre::tools
