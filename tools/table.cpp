#include "table.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ostream>

namespace gyre::tools {

void print_table(std::ostream& out, const std::vector<Column>& columns,
                 const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns.size(); ++c) {
    size_t width = columns[c].title.size();
    for (const auto& row : rows) width = std::max(width, row[c].size());
    widths.push_back(width);
  }
  const auto print_row = [&](const auto& cell_of) {
    std::string line;
    for (size_t c = 0; c < columns.size(); ++c) {
      const std::string& cell = cell_of(c);
      const std::string pad(widths[c] - cell.size(), ' ');
      line += (c == 0 ? "" : "  ") + (columns[c].align == Align::left ? cell + pad : pad + cell);
    }
    out << line.substr(0, line.find_last_not_of(' ') + 1) << '\n';
  };
  print_row([&](size_t c) -> const std::string& { return columns[c].title; });
  for (const auto& row : rows) print_row([&](size_t c) -> const std::string& { return row[c]; });
}

std::string fixed(double value, int decimals) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", decimals, value);
  return text;
}

std::string human_bytes(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return fixed(value, unit == 0 ? 0 : 1) + " " + kUnits[unit];
}

}  // namespace gyre::tools
