#include "step_preset.h"

#include <vector>

#include "did_you_mean.h"

namespace gyre::bench {

std::span<const StepPreset> step_presets() {
  // KV rates of the H200 are those of `gyre bench serving` (docs/benchmarks.md, tq4, 64 x 4096).
  static const std::vector<StepPreset> kPresets = {
      {"llama-3.1-8b@h200", "llama-3.1-8b", 4.1, 27, 3000, 112 << 10,
       "estimated: bf16 weights at the measured copy bandwidth of 3959 GB/s, products at 60 % of "
       "989 Tflop/s; KV rate measured"},
      {"llama-3.1-70b@4xh200", "llama-3.1-70b", 9.5, 62, 12000, 384 << 10,
       "estimated as llama-3.1-8b@h200, split over 4 GPUs with 0.5 ms for messages; KV rate "
       "measured on one"},
  };
  return kPresets;
}

const StepPreset& step_preset(std::string_view name) {
  std::vector<std::string> names;
  for (const StepPreset& preset : step_presets()) {
    if (preset.name == name) return preset;
    names.push_back(preset.name);
  }
  refuse_name("no step preset", name, names);
}

}  // namespace gyre::bench
