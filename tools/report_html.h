#pragma once

#include <string>

#include "compare.h"
#include "html_page.h"

namespace gyre::tools {

// One self-contained page: no scripts, nothing loaded.
std::string report_html(const bench::CompareReport& report, const ReportInfo& info);

// The page's two charts, as files of their own.
std::string time_chart(const bench::CompareReport& report);
std::string error_chart(const bench::CompareReport& report);

}  // namespace gyre::tools
