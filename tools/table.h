#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace gyre::tools {

enum class Align : char { left, right };

struct Column {
  std::string title;
  Align align = Align::left;
};

// Columns as wide as their widest cell, two spaces between.
void print_table(std::ostream& out, const std::vector<Column>& columns,
                 const std::vector<std::vector<std::string>>& rows);

std::string fixed(double value, int decimals);
std::string human_bytes(uint64_t bytes);

}  // namespace gyre::tools
