#pragma once
// What a misspelt name was probably meant to be.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace gyre::bench {

// Fewest insertions, deletions, replacements and swaps of neighbours that make one word into the
// other. Upper and lower case are the same.
uint64_t edit_distance(std::string_view a, std::string_view b);

// "; did you mean compare?", or nothing where no name is near. Names at the same distance are all
// said.
std::string did_you_mean(std::string_view word, std::span<const std::string> names);

// Throws: `what` (such as "bench: no benchmark") is not called `word`; what is near, and all there
// are.
[[noreturn]] void refuse_name(std::string_view what, std::string_view word,
                              std::span<const std::string> names);

}  // namespace gyre::bench
