#pragma once
// The figures of `gyre compare` as text, for the terminal and for the page.

#include <string>
#include <vector>

#include "compare.h"
#include "table.h"

namespace gyre::tools {

const std::vector<Column>& compare_columns();  // the first is the context
std::vector<std::string> compare_cells(const bench::CompareEntry& entry);

// The model in a few words, and what its window layers and a tail mean for the figures; one string
// a line.
std::vector<std::string> describe_model(const bench::CompareReport& report);
std::string describe_machine(const bench::CompareReport& report);

// What the columns mean; lines of a terminal.
std::string compare_meaning(const bench::CompareReport& report);

}  // namespace gyre::tools
