#pragma once
// A model on the command line: one of the list, or by its numbers.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "model_shapes.h"

namespace gyre::tools {

// As far as given.
struct ModelNumbers {
  std::optional<uint64_t> layers, heads, kv_heads, head_dim;
};

void list_models();
void add_model_numbers(CLI::App& command, ModelNumbers& numbers);
// Explicit numbers make a model of their own, or change a preset. `command` opens the messages.
bench::ModelShape chosen_model(const std::string& command, const std::string& preset,
                               const ModelNumbers& given);

}  // namespace gyre::tools
