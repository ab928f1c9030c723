#pragma once

#include "gyre_test.h"
#include "kv_copy/kv_copy_case.h"
#include "op_case.h"

namespace gyre::test {

enum class RopePositions : uint8_t {
  mixed,         // i32 of both signs up to 2^20
  extreme,       // i32: 0, both ends, powers of two
  unsigned_top,  // u32 from 2^31 on
};

enum class RopeFrequencySource : uint8_t {
  base,     // options.base
  radians,  // f32, some negative, some above a turn
  table,    // from rope_table
};

// What makes it a norm_rope.
struct RopeNorm {
  bool turns = true;  // false: the norm alone
  float epsilon = 1e-6f, weight_offset = 0;
  std::optional<DType> weight;
  std::optional<DType> second;
  KvLayout second_layout = KvLayout::head_major;
};

// One rope or norm_rope call as numbers; make_case() turns it into memory, call and expected
// result.
struct RopeCase {
  std::string name;
  uint64_t tokens = 5, heads = 3;
  uint64_t k_heads = 0;    // 0: x alone
  uint64_t head_dim = 20;  // 10 pairs: a rest behind vectors of 4 and 8, less than one of 16
  DType x = DType::f32, out = DType::f32;
  KvLayout x_layout = KvLayout::token_major;  // interleaved: x and k in one buffer
  KvLayout out_layout = KvLayout::token_major;
  bool in_place = false;
  RopeOptions options;
  RopePositions positions = RopePositions::mixed;
  bool positions_apart = false;  // with gaps between them
  RopeFrequencySource frequencies = RopeFrequencySource::base;
  std::vector<float> factors;
  bool specials = false;  // NaN, infinities and huge values among what turns
  float size = 1;         // what values are multiplied with
  std::optional<RopeNorm> norm;
};

OpCase make_case(const RopeCase& numbers);

std::string types_text(const RopeCase& c);

// The lists behind rope_cases(), each with its theme.
std::vector<RopeCase> rope_convention_cases();
std::vector<RopeCase> rope_head_dim_cases();
std::vector<RopeCase> rope_partial_cases();
std::vector<RopeCase> rope_layout_cases();
std::vector<RopeCase> rope_position_cases();
std::vector<RopeCase> rope_section_cases();
std::vector<RopeCase> rope_frequency_cases();
std::vector<RopeCase> rope_value_cases();

// And behind norm_rope_cases().
std::vector<RopeCase> norm_convention_cases();
std::vector<RopeCase> norm_output_cases();
std::vector<RopeCase> norm_shape_cases();

}  // namespace gyre::test
