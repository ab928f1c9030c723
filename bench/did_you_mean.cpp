#include "did_you_mean.h"

#include <algorithm>
#include <vector>

#include "runtime/require.h"

namespace gyre::bench {
namespace {

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

std::string listed(std::span<const std::string> names, const char* last_separator) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i != 0) text += i + 1 == names.size() ? last_separator : ", ";
    text += names[i];
  }
  return text;
}

}  // namespace

uint64_t edit_distance(std::string_view a, std::string_view b) {
  // Rows of the dynamic programme; a swap looks two rows back.
  std::vector<uint64_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    std::swap(before, above);
    std::swap(above, row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const bool same = lower(a[i - 1]) == lower(b[j - 1]);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (same ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && lower(a[i - 1]) == lower(b[j - 2]) &&
                           lower(a[i - 2]) == lower(b[j - 1]);
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

std::string did_you_mean(std::string_view word, std::span<const std::string> names) {
  constexpr size_t kLongest = 64;  // no name is longer; a hostile word costs nothing
  if (word.empty() || word.size() > kLongest) return {};
  std::vector<std::string> nearest;
  uint64_t least = ~uint64_t{0};
  for (const std::string& name : names) {
    const uint64_t distance = edit_distance(word, name);
    // A third of the letters may be wrong.
    if (distance > std::max<uint64_t>(1, std::max(word.size(), name.size()) / 3)) continue;
    if (distance < least) nearest.clear();
    if (distance <= least) nearest.push_back(name);
    least = std::min(least, distance);
  }
  return nearest.empty() ? "" : "; did you mean " + listed(nearest, " or ") + "?";
}

void refuse_name(std::string_view what, std::string_view word, std::span<const std::string> names) {
  const std::string meant = did_you_mean(word, names);
  fail(ErrorCode::invalid_argument, what, " \"", word, "\"", meant,
       meant.empty() ? "; there are " : " There are ", listed(names, ", "));
}

}  // namespace gyre::bench
