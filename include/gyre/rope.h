#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "gyre/encoder.h"
#include "gyre/export.h"
#include "gyre/tensor.h"

namespace gyre {

// Which two coordinates of a head rotate together.
enum class RopePairing : uint8_t {
  split_half,  // (i, i + distance): NeoX, Llama in Hugging Face
  adjacent,    // (2i, 2i + 1): GPT-J, Llama in its original weights
};

// Which position axis a pair follows. Values are the wire values other engines use.
enum class RopeMode : uint8_t {
  plain = 0,         // positions [tokens]
  sectioned = 8,     // M-RoPE: runs of pairs per axis; positions [4, tokens]
  vision = 24,       // two axes, exponent restarts in the second run; positions [4, tokens]
  interleaved = 40,  // IM-RoPE: axes alternate; positions [4, tokens]
  vision_2d = 2,     // halves of the head by x and y; positions [2, tokens]
};

// Conventions that differ between models under partial rotary (rotary_dim < head_dim).
enum class RopeSpan : uint8_t { rotary_dim, head_dim };

struct RopeInputs {
  Tensor x{};          // [tokens, heads, head_dim], f32, f16 or bf16; head_dim contiguous
  Tensor positions{};  // i32 (or u32), shape by mode
  Tensor out{};        // like x, any float dtype; may be x itself
  Tensor k{};  // a second tensor rotated by the same angles in the same dispatch, heads may differ
  Tensor k_out{};        // undefined with k
  Tensor frequencies{};  // radians per position for each pair: f32 [pairs], or exact, from
                         // rope_table(); undefined: made from options.base
  Tensor factors{};  // f32 [pairs]: each frequency is divided by its factor; undefined: none. An
                     // exact table must then hold less than half a turn per position
  // Where a frequency, divided by its factor, is not finite, the pair becomes NaN; an infinite
  // factor stops it.
};

struct RopeOptions {
  RopePairing pairing = RopePairing::split_half;
  RopeMode mode = RopeMode::plain;
  std::optional<uint32_t> rotary_dim{};  // coordinates that rotate, from 2 on; unset: all
  // split_half: the partner is half of this away. Hugging Face and ggml: rotary_dim.
  RopeSpan partner = RopeSpan::rotary_dim;
  // Pair p rotates by base^(-2p / this). Ignored with `frequencies` and in the vision modes, which
  // use head_dim / 2.
  RopeSpan exponent = RopeSpan::rotary_dim;
  double base = 10000.0;
  uint32_t sections[4] = {0, 0, 0, 0};  // pairs per axis
  float magnitude = 1.0f;               // YaRN's attention factor: scales the rotated coordinates
};

// Rotates pairs (u, v) by a = position * frequency: (u cos a - v sin a, u sin a + v cos a). f32
// arithmetic, one rounding at the output. Angles are exact to 2^-32 of a turn at every position if
// the frequencies come from options.base or rope_table. Frequencies given in f32, and those divided
// by factors, are turns per position in double precision: the angle is then within
// position * frequency * 2^-51 of the exact product, 1e-6 radians at 2^31 for one radian per
// position. From 2^53 turns per position on a double is a whole number of turns: no rotation.
// Coordinates that do not rotate are copied (bit for bit when the dtype stays).
GYRE_API void rope(Encoder& encoder, const RopeInputs& inputs, const RopeOptions& options = {});

struct NormRopeInputs {
  Tensor x{};  // as in RopeInputs
  Tensor positions{};
  Tensor out{};
  Tensor weight{};  // f32, f16 or bf16 [head_dim]; undefined: 1, and nothing is added to it
  Tensor second{};  // a second output, another dtype or layout; undefined: none
  Tensor k{};       // heads of K, with their own weight and second output, or without
  Tensor k_out{};
  Tensor k_weight{};
  Tensor k_second{};
  Tensor frequencies{};
  Tensor factors{};
};

struct NormRopeOptions {
  std::optional<RopeOptions> rope = RopeOptions{};  // nullopt: the norm alone, no positions
  float epsilon = 1e-6f;
  float weight_offset = 0.0f;  // 1 for models that store weight - 1 (Gemma)
};

// Per head: y = x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset), then rope. One pass, f32
// arithmetic, one rounding. The sum of squares may leave f32: heads of size 1e30 or 1e-30 are
// normalised like any other.
GYRE_API void norm_rope(Encoder& encoder, const NormRopeInputs& inputs,
                        const NormRopeOptions& options = {});

struct RopeTypes {
  DType x = DType::f32;
  DType out = DType::f32;
};

GYRE_API bool supports(const Device& device, const RopeTypes& types);

// Scaling of frequencies, in the words of a model's config ("rope_scaling").
enum class RopeType : uint8_t { standard, linear, ntk, dynamic, yarn, llama3 };

struct RopeConfig {
  double rope_theta = 10000.0;
  uint32_t rotary_dim = 0;  // head_dim * partial_rotary_factor; must be given
  RopeType rope_type = RopeType::standard;
  double factor = 1.0;
  double original_max_position_embeddings = 0;  // yarn, llama3; dynamic: max_position_embeddings
  double seq_len = 0;                           // dynamic: how long the sequence is now
  double low_freq_factor = 1.0;                 // llama3
  double high_freq_factor = 4.0;                // llama3
  double beta_fast = 32.0;                      // yarn, at least beta_slow
  double beta_slow = 1.0;                       // yarn
  std::optional<double> attention_factor{};     // yarn; computed if absent
  std::optional<double> mscale{};               // yarn (DeepSeek)
  std::optional<double> mscale_all_dim{};       // yarn (DeepSeek)
  bool truncate = true;                         // yarn: whole numbers as ends of the ramp
};

struct RopeFrequencies {
  std::vector<double> inverse{};  // radians per position, one per pair
  double attention_factor = 1.0;  // for RopeOptions::magnitude
};

GYRE_API RopeFrequencies rope_frequencies(const RopeConfig& config);

// Frequencies in the form the kernels use: exact at any position, on the device. u32 [pairs, 2].
GYRE_API Tensor rope_table(const Device& device, std::span<const double> radians_per_position);

}  // namespace gyre
