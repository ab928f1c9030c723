#pragma once
// Options that several commands have, read and refused in one place.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "count.h"
#include "format_pair.h"

namespace gyre::tools {

// Refusals of parse_count() and parse_seconds(), which CLI11 puts the option's name before.
CLI::Validator count_validator(const CountRange& range);
CLI::Validator seconds_validator();

// A count with k and M; T is an unsigned integer or an optional of one.
template <class T>
CLI::Option* add_count(CLI::App& app, const char* flag, T& value, const std::string& help,
                       const CountRange& range = {}) {
  return app.add_option(flag, value, help)->transform(count_validator(range))->type_name("N");
}

// Both take one argument with commas inside: the next argument may be a name.
CLI::Option* add_contexts(CLI::App& app, std::vector<uint64_t>& contexts, const std::string& help);
CLI::Option* add_formats(CLI::App& app, std::vector<bench::FormatPair>& formats,
                         const std::string& help);

CLI::Option* add_device(CLI::App& app, std::string& device);
CLI::Option* add_threads(CLI::App& app, std::optional<uint32_t>& threads);

template <class T>
CLI::Option* add_seconds(CLI::App& app, T& seconds, const std::string& help) {
  return app.add_option("--seconds", seconds, help)->transform(seconds_validator())->type_name("S");
}

}  // namespace gyre::tools
