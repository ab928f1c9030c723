#pragma once
// Numbers and lists as they are typed. What is refused is refused with the text as it was typed.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gyre::tools {

struct CountRange {
  uint64_t min = 1;
  uint64_t max = 2147483647;  // what a position can number; heads and layers are far below
};

// A whole number: "4096", "32k" (times 1024), "1M" (times 1024^2).
uint64_t parse_count(std::string_view text, const CountRange& range = {});

// Seconds per measurement: from 0.001 to 60.
double parse_seconds(std::string_view text);

// What stands between the commas; none may be empty.
std::vector<std::string> parse_list(std::string_view text);

}  // namespace gyre::tools
