#include "step_preset.h"

#include <vector>

#include "did_you_mean.h"

namespace gyre::bench {

double kv_gbps(const StepPreset& preset, const FormatPair& formats) {
  const auto is_packed = [](KvFormat format) { return describe(format).bits < 8; };
  return is_packed(formats.k) || is_packed(formats.v) ? preset.packed_gbps : preset.kv_gbps;
}

std::span<const StepPreset> step_presets() {
  // KV rates of the H200 are those of `gyre bench serving` (docs/benchmarks.md, 64 x 4096: f16,
  // tq4). Its steps are vLLM's (docs/engines.md) without their attention: 4.9 and 5.4 ms of 16 and
  // 64 tokens, 171 to 187 ms of 8192.
  static const std::vector<StepPreset> kPresets = {
      {"llama-3.1-8b@h200", "llama-3.1-8b", 4.7, 21.3, 4200, 3000, 112 << 10,
       "from what was measured: tokens per second of vLLM 0.33 in bf16, less the time of "
       "attention, and the rate at which attention reads"},
      {"llama-3.1-70b@4xh200", "llama-3.1-70b", 9.5, 62, 16800, 12000, 384 << 10,
       "estimated: bf16 weights at the copy bandwidth of 3959 GB/s and products at 60 % of "
       "989 Tflop/s, split over 4 GPUs with 0.5 ms for messages; KV rates measured on one"},
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
