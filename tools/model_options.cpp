#include "model_options.h"

#include <iostream>
#include <vector>

#include "gyre/error.h"
#include "options.h"
#include "table.h"

namespace gyre::tools {

void list_models() {
  std::vector<std::vector<std::string>> rows;
  for (const bench::ModelShape& s : bench::model_shapes()) {
    rows.push_back(
        {s.name, std::to_string(s.layers), std::to_string(s.heads), std::to_string(s.kv_heads),
         std::to_string(s.head_dim) + (s.latent() ? " + " + std::to_string(s.rotary_dim) : ""),
         s.window == 0 ? "-" : std::to_string(s.window),
         s.window == 0 ? "all" : "every " + std::to_string(s.full_every)});
  }
  print_table(std::cout,
              {{"preset"},
               {"layers", Align::right},
               {"heads", Align::right},
               {"KV heads", Align::right},
               {"head_dim", Align::right},
               {"window", Align::right},
               {"full layers"}},
              rows);
}

void add_model_numbers(CLI::App& command, ModelNumbers& numbers) {
  const char* group = "A model by its numbers (or a preset with other numbers)";
  add_count(command, "--layers", numbers.layers, "Layers; 1 if not given")->group(group);
  add_count(command, "--heads", numbers.heads, "Query heads")->group(group);
  add_count(command, "--kv-heads", numbers.kv_heads, "KV heads")->group(group);
  add_count(command, "--head-dim", numbers.head_dim, "Coordinates of a head")->group(group);
}

bench::ModelShape chosen_model(const std::string& command, const std::string& preset,
                               const ModelNumbers& given) {
  const bool any = given.layers || given.heads || given.kv_heads || given.head_dim;
  if (!any && !preset.empty()) return bench::model_shape(preset);
  bench::ModelShape shape;
  if (!preset.empty()) {
    shape = bench::model_shape(preset);
    shape.name += ", changed";
  } else if (given.heads && given.kv_heads && given.head_dim) {
    shape.name = "own numbers";
    shape.layers = 1;
  } else {
    throw Error(ErrorCode::invalid_argument,
                command + ": without a preset --heads, --kv-heads and --head-dim must be given");
  }
  shape.layers = given.layers.value_or(shape.layers);
  shape.heads = given.heads.value_or(shape.heads);
  shape.kv_heads = given.kv_heads.value_or(shape.kv_heads);
  shape.head_dim = given.head_dim.value_or(shape.head_dim);
  return shape;
}

}  // namespace gyre::tools
