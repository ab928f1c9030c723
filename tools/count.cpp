#include "count.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "gyre/error.h"

namespace gyre::tools {
namespace {

uint64_t factor_of(char suffix) {
  switch (suffix) {
    case 'k':
    case 'K':
      return uint64_t{1} << 10;
    case 'M':
      return uint64_t{1} << 20;
    default:
      return 1;
  }
}

[[noreturn]] void refuse(const std::string& rule, std::string_view text) {
  throw Error(ErrorCode::invalid_argument, rule + ", got \"" + std::string(text) + "\"");
}

}  // namespace

uint64_t parse_count(std::string_view text, const CountRange& range) {
  const uint64_t factor = text.empty() ? 1 : factor_of(text.back());
  const std::string_view digits = text.substr(0, text.size() - (factor != 1 ? 1 : 0));
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), number);
  const bool whole = error == std::errc() && end == digits.end();
  if (!whole || number > range.max / factor || number * factor < range.min) {
    const bool large = range.max >= uint64_t{1} << 20;
    refuse("must be a whole number from " + std::to_string(range.min) + " to " +
               std::to_string(range.max) + (large ? ", such as 4096, 32k or 1M" : ""),
           text);
  }
  return number * factor;
}

double parse_seconds(std::string_view text) {
  constexpr double kLeast = 0.001, kMax = 60;
  double seconds = 0;
#if defined(__cpp_lib_to_chars)
  const auto [end, error] = std::from_chars(text.begin(), text.end(), seconds);
  const bool whole = error == std::errc() && end == text.end();
#else  // Apple's library takes whole numbers alone
  const std::string copy(text);
  char* end = nullptr;
  seconds = std::strtod(copy.c_str(), &end);
  const bool whole = !text.empty() && end == copy.c_str() + copy.size() && copy[0] > ' ';
#endif
  // Written so that NaN is refused.
  if (!whole || !(seconds >= kLeast && seconds <= kMax))
    refuse("must be a number of seconds from 0.001 to 60", text);
  return seconds;
}

std::vector<std::string> parse_list(std::string_view text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    if (end == begin) refuse("must be a list with commas between and nothing left out", text);
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

}  // namespace gyre::tools
