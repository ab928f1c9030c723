#pragma once
// How long a step of a model takes on a device, beside its KV path.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "format_pair.h"

namespace gyre::bench {

struct StepPreset {
  std::string name;         // model@device
  std::string model;        // of model_shapes()
  double step_ms = 0;       // of a step, whatever it holds: the weights are read once
  double token_us = 0;      // of each token more
  double kv_gbps = 0;       // at which attention reads K and V of 8 bits and more
  double packed_gbps = 0;   // the same, if K or V has fewer
  uint64_t memory_mib = 0;  // that the weights leave for the cache
  std::string source;       // where the numbers are from
};

double kv_gbps(const StepPreset& preset, const FormatPair& formats);
std::span<const StepPreset> step_presets();
const StepPreset& step_preset(std::string_view name);  // refuses names that are none

}  // namespace gyre::bench
