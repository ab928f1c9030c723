#pragma once

#include <string>
#include <vector>

#include "html_page.h"
#include "simulate.h"
#include "table.h"

namespace gyre::tools {

std::vector<Column> simulate_columns();
// `first`: the format that others are compared with.
std::vector<std::string> simulate_cells(const bench::SimulateResult& result,
                                        const bench::SimulateResult& first);
std::string simulate_meaning(const bench::SimulateOptions& options, const bench::Trace& trace);

// A page with the table and what happened over time.
std::string simulate_html(const bench::SimulateOptions& options, const bench::Trace& trace,
                          const std::vector<bench::SimulateResult>& results,
                          const std::string& machine, const ReportInfo& info);

}  // namespace gyre::tools
