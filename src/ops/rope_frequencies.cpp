// Frequencies as model configs describe them, in double precision, and the exact table made of
// them.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "gyre/rope.h"
#include "ops/rope_layout.h"
#include "runtime/require.h"

namespace gyre {
namespace {

double standard_frequency(double theta, uint32_t pair, uint32_t rotary_dim) {
  return std::pow(theta, -2.0 * pair / rotary_dim);
}

std::vector<double> standard_frequencies(double theta, uint32_t rotary_dim) {
  std::vector<double> inverse;
  for (uint32_t pair = 0; pair < rotary_dim / 2; ++pair)
    inverse.push_back(standard_frequency(theta, pair, rotary_dim));
  return inverse;
}

// The base that makes the slowest pair `stretch` times slower and leaves the fastest alone.
double ntk_theta(const RopeConfig& config, double stretch) {
  const double dim = config.rotary_dim;
  return config.rope_theta * std::pow(stretch, dim / (dim - 2));
}

double dynamic_theta(const RopeConfig& config) {
  const double trained = config.original_max_position_embeddings;
  const double length = std::max(config.seq_len, trained);
  return ntk_theta(config, config.factor * length / trained - (config.factor - 1));
}

// Pair (not rounded) that turns `rotations` times within the trained context.
double yarn_pair(const RopeConfig& config, double rotations) {
  return config.rotary_dim *
         std::log(config.original_max_position_embeddings / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(config.rope_theta));
}

// Fast pairs keep their frequency, slow ones are interpolated, a ramp lies between.
void apply_yarn(const RopeConfig& config, std::vector<double>& inverse) {
  double low = yarn_pair(config, config.beta_fast);
  double high = yarn_pair(config, config.beta_slow);
  if (config.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, config.rotary_dim - 1.0);
  if (low == high) high += 0.001;  // a step, not a division by zero
  for (size_t pair = 0; pair < inverse.size(); ++pair) {
    const double ramp = std::clamp((static_cast<double>(pair) - low) / (high - low), 0.0, 1.0);
    inverse[pair] = inverse[pair] / config.factor * ramp + inverse[pair] * (1 - ramp);
  }
}

double yarn_mscale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double yarn_attention_factor(const RopeConfig& config) {
  if (config.attention_factor) return *config.attention_factor;
  // A zero counts as absent, as in the models' own code.
  if (config.mscale.value_or(0) != 0 && config.mscale_all_dim.value_or(0) != 0) {
    return yarn_mscale(config.factor, *config.mscale) /
           yarn_mscale(config.factor, *config.mscale_all_dim);
  }
  return yarn_mscale(config.factor, 1.0);
}

void apply_llama3(const RopeConfig& config, std::vector<double>& inverse) {
  const double trained = config.original_max_position_embeddings;
  const double low_wavelength = trained / config.low_freq_factor;
  const double high_wavelength = trained / config.high_freq_factor;
  for (double& frequency : inverse) {
    const double wavelength = 2 * std::numbers::pi / frequency;
    if (wavelength < high_wavelength) continue;
    if (wavelength > low_wavelength) {
      frequency /= config.factor;
      continue;
    }
    const double smooth = (trained / wavelength - config.low_freq_factor) /
                          (config.high_freq_factor - config.low_freq_factor);
    frequency = (1 - smooth) * frequency / config.factor + smooth * frequency;
  }
}

void require_positive(double value, const char* what) {
  require(std::isfinite(value) && value > 0, "rope_frequencies: ", what,
          " must be finite and positive, got ", value);
}
void require_finite(const std::optional<double>& value, const char* what) {
  require(std::isfinite(value.value_or(0)), "rope_frequencies: ", what, " must be finite, got ",
          value.value_or(0));
}

void check(const RopeConfig& c) {
  require(c.rotary_dim >= 2 && c.rotary_dim % 2 == 0 && c.rotary_dim <= abi::kRopeMaxHeadDim,
          "rope_frequencies: rotary_dim must be even and from 2 to ", abi::kRopeMaxHeadDim,
          ", got ", c.rotary_dim);
  require(c.rope_type <= RopeType::llama3, "rope_frequencies: ", static_cast<uint32_t>(c.rope_type),
          " is not a rope_type");
  require_positive(c.rope_theta, "rope_theta");
  require_positive(c.factor, "factor");
  const bool stretches = c.rope_type == RopeType::ntk || c.rope_type == RopeType::dynamic;
  require(!stretches || c.rotary_dim > 2, "rope_frequencies: ntk needs a rotary_dim above 2, got ",
          c.rotary_dim);
  if (c.rope_type == RopeType::dynamic || c.rope_type == RopeType::yarn ||
      c.rope_type == RopeType::llama3) {
    require_positive(c.original_max_position_embeddings, "original_max_position_embeddings");
  }
  if (c.rope_type == RopeType::dynamic) {
    require(std::isfinite(c.seq_len), "rope_frequencies: seq_len must be finite, got ", c.seq_len);
    require(c.factor >= 1, "rope_frequencies: dynamic needs a factor of at least 1, got ",
            c.factor);
  }
  if (c.rope_type == RopeType::yarn) {
    require_positive(c.beta_fast, "beta_fast");
    require_positive(c.beta_slow, "beta_slow");
    require(c.beta_fast >= c.beta_slow, "rope_frequencies: beta_fast must be at least beta_slow ",
            c.beta_slow, ", got ", c.beta_fast);
    require(c.rope_theta != 1, "rope_frequencies: yarn needs a rope_theta other than 1");
    require_finite(c.attention_factor, "attention_factor");
    require_finite(c.mscale, "mscale");
    require_finite(c.mscale_all_dim, "mscale_all_dim");
  }
  if (c.rope_type == RopeType::llama3) {
    require_positive(c.low_freq_factor, "low_freq_factor");
    require(c.high_freq_factor > c.low_freq_factor && std::isfinite(c.high_freq_factor),
            "rope_frequencies: high_freq_factor must be above low_freq_factor ", c.low_freq_factor,
            ", got ", c.high_freq_factor);
  }
}

}  // namespace

RopeFrequencies rope_frequencies(const RopeConfig& config) try {
  check(config);
  double theta = config.rope_theta;
  if (config.rope_type == RopeType::ntk) theta = ntk_theta(config, config.factor);
  if (config.rope_type == RopeType::dynamic) theta = dynamic_theta(config);
  require(std::isfinite(theta), "rope_frequencies: rope_theta ", config.rope_theta,
          " stretched by factor ", config.factor, " is not finite");
  RopeFrequencies result{standard_frequencies(theta, config.rotary_dim), 1.0};
  switch (config.rope_type) {
    case RopeType::linear:
      for (double& frequency : result.inverse) frequency /= config.factor;
      break;
    case RopeType::yarn:
      apply_yarn(config, result.inverse);
      result.attention_factor = yarn_attention_factor(config);
      require(std::isfinite(result.attention_factor),
              "rope_frequencies: the attention factor must be finite, got ",
              result.attention_factor);
      break;
    case RopeType::llama3:
      apply_llama3(config, result.inverse);
      break;
    default:
      break;
  }
  for (const double frequency : result.inverse) {
    require(std::isfinite(frequency), "rope_frequencies: rope_theta ", config.rope_theta,
            ", rotary_dim ", config.rotary_dim, " and factor ", config.factor,
            " give a frequency that is not finite: ", frequency);
  }
  return result;
} catch (const std::bad_alloc&) {
  out_of_memory("rope_frequencies");
}

Tensor exact_rope_table(const Device& device, std::span<const long double> radians_per_position) {
  std::vector<uint32_t> words;
  for (const long double radians : radians_per_position) {
    require(std::isfinite(radians), "rope_table: a frequency must be finite, got ", radians);
    // Whole turns per position change nothing; what is left fits in 64 bits of fraction.
    const long double turns = radians / (2 * std::numbers::pi_v<long double>);
    const long double fraction = turns - std::floor(turns);
    const auto fixed = fraction < 1 ? static_cast<uint64_t>(std::ldexp(fraction, 64)) : 0;
    words.push_back(static_cast<uint32_t>(fixed));
    words.push_back(static_cast<uint32_t>(fixed >> 32));
  }
  Tensor table = device.tensor(DType::u32, {radians_per_position.size(), 2});
  table.write_from(std::span<const uint32_t>(words));
  return table;
}

Tensor rope_table(const Device& device, std::span<const double> radians_per_position) try {
  require(radians_per_position.size() <= abi::kRopeMaxPairs, "rope_table: at most ",
          abi::kRopeMaxPairs, " frequencies, got ", radians_per_position.size());
  const std::vector<long double> wide(radians_per_position.begin(), radians_per_position.end());
  return exact_rope_table(device, wide);
} catch (const std::bad_alloc&) {
  out_of_memory("rope_table");
}

}  // namespace gyre
