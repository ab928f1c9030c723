#pragma once

#include <string>

#include "compare.h"

namespace gyre::tools {

// What a page says about the run beside its figures.
struct ReportInfo {
  std::string command;  // the command line
  std::string date;
  std::string version;
};

// One self-contained page: no scripts, nothing loaded.
std::string report_html(const bench::CompareReport& report, const ReportInfo& info);

// The page's two charts, as files of their own.
std::string time_chart(const bench::CompareReport& report);
std::string error_chart(const bench::CompareReport& report);

}  // namespace gyre::tools
