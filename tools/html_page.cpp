#include "html_page.h"

#include "svg_chart.h"

namespace gyre::tools {
namespace {

// Light on every device and on paper; the table scrolls in its own box where it is too wide.
constexpr const char* kStyle = R"(
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 3rem; background: #fff; color: #222;
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; max-width: 46rem; }
code { font-size: .9em; }
.lead { font-size: 1.1rem; margin-bottom: 1.25rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { font-weight: 600; margin-bottom: .25rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; overflow-wrap: normal; }
caption { text-align: left; padding-bottom: .25rem; font-weight: 600; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; }
thead th { border-bottom: 2px solid #222; vertical-align: bottom; white-space: normal; line-height: 1.25; }
th[scope=row] { position: sticky; left: 0; background: #fff; }
tbody { border-bottom: 1px solid #999; }
.left { text-align: left; }
.first { font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: .5rem 0; }
dt { font-weight: 600; }
dd { margin: 0; }
@media (max-width: 34rem) { th, td { padding: .3rem .4rem; font-size: .875rem; } dl { display: block; } }
@media print { @page { margin: 15mm; } body { padding: 0; font-size: 10pt; max-width: none; }
  .charts { grid-template-columns: 1fr 1fr; } .scroll { overflow: visible; } tbody { break-inside: avoid; }
  th, td { padding: 1.5pt 5pt; } h2 { break-after: avoid; } }
)";

}  // namespace

std::string tag(const std::string& name, const std::string& text) {
  return "<" + name + ">" + escape_html(text) + "</" + name + ">\n";
}

std::string figure(const std::string& caption, const std::string& svg) {
  return "<figure>\n" + tag("figcaption", caption) + svg + "</figure>\n";
}

std::string run_facts(const std::string& machine, const ReportInfo& info) {
  return "<dl>\n" + tag("dt", "Machine") + tag("dd", machine) + tag("dt", "Command") +
         "<dd><code>" + escape_html(info.command) + "</code></dd>\n" + tag("dt", "Date") +
         tag("dd", info.date) + tag("dt", "Version") + tag("dd", "gyre " + info.version) +
         "</dl>\n";
}

std::string html_page(const std::string& title, const std::string& body) {
  return "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n" +
         tag("title", title) + "<link rel=\"icon\" href=\"data:,\">\n<style>" + kStyle +
         "</style>\n</head>\n<body>\n<main>\n" + tag("h1", title) + body +
         "</main>\n</body>\n</html>\n";
}

}  // namespace gyre::tools
