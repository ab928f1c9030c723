#include "rope/rope_case.h"

#include "rope/rope_operands.h"
#include "rope/rope_reference.h"

namespace gyre::test {
namespace {

using reference::KvSide;

// Twice this is the promised 2e-6 for a pair (1, 1); the norm's sum of squares adds its own
// rounding.
constexpr double kTurnBound = 1e-6;
constexpr double kNormBound = 1e-6;

// Half the distance to the next value of a narrow dtype.
double half_step(DType dtype, double magnitude) {
  const reference::Format format = reference::format_of(dtype);
  const uint32_t pattern = reference::nearest_pattern(dtype, magnitude);
  return (reference::magnitude_of(format, pattern + 1) - reference::magnitude_of(format, pattern)) /
         2;
}

uint32_t rounded_bits(DType dtype, double value) {
  if (dtype == DType::f32) return std::bit_cast<uint32_t>(static_cast<float>(value));
  const reference::Format format = reference::format_of(dtype);
  if (std::isnan(value)) return format.nan;
  return (std::signbit(value) ? format.sign() : 0) |
         reference::nearest_pattern(dtype, std::abs(value));
}

// f32 arithmetic within `tolerance`, then one rounding. Infinities, and the one NaN of the narrow
// dtypes, bit for bit.
void expect_value(Block& block, uint64_t at, double value, double tolerance) {
  const uint32_t bits = rounded_bits(block.dtype, value);
  reference::store_bits(block.dtype, block.after.data(), at, bits);
  if (block.near.empty()) block.near.resize(block.after.size() / size_bytes(block.dtype));
  const bool narrow = block.dtype != DType::f32;
  const double stored = reference::load_value(block.dtype, block.after.data(), at);
  if (std::isinf(stored) || (narrow && std::isnan(stored))) return;
  if (std::isnan(value)) {
    block.near[at] = {value, 1};
    return;
  }
  const double rounding = narrow ? half_step(block.dtype, std::abs(value) + tolerance) : 0;
  block.near[at] = {value, tolerance + rounding + 1e-30};
}

// Without a weight nothing is multiplied, so there is nothing to offset either.
std::vector<double> weights_of(const RopeCase& c, const Block* block) {
  std::vector<double> weights(c.head_dim, 1.0);
  for (uint64_t i = 0; block != nullptr && i < c.head_dim; ++i) {
    weights[i] =
        reference::load_value(block->dtype, block->before.data(), i) + c.norm->weight_offset;
  }
  return weights;
}

class Expectation {
 public:
  Expectation(const RopeCase& c, const BlockIndex& index, std::vector<Block>& blocks)
      : c_(c), index_(index), blocks_(blocks) {
    if (turns(c)) {
      positions_ = draw_positions(c);
      frequencies_ = frequencies_of(c);
    }
  }

  void fill() {
    for (uint64_t t = 0; t < c_.tokens; ++t) {
      std::vector<reference::RopeTurn> token_turns;
      if (turns(c_)) {
        std::vector<int64_t> at;
        for (const auto& axis : positions_) at.push_back(axis[t]);
        token_turns = reference::rope_turns(c_.options, c_.head_dim, frequencies_, at);
      }
      for (uint64_t s = 0; s < stream_count(c_); ++s) fill_token(kStreams[s], t, token_turns);
    }
  }

 private:
  void fill_token(const RopeStream& s, uint64_t t,
                  std::span<const reference::RopeTurn> token_turns) {
    const KvSide x = side_of(c_, s.x);
    for (uint64_t h = 0; h < x.heads; ++h) {
      auto row = reference::load_row<double>(x, blocks_[index_[s.x]].before, t, h);
      if (c_.norm) {
        const Block* weight = has_weight(c_) ? &blocks_[index_[s.weight]] : nullptr;
        row = reference::head_norm(row, weights_of(c_, weight), c_.norm->epsilon);
      }
      const reference::RopeHead head = reference::rope_head(row, token_turns);
      store(s, s.out, t, h, head);
      if (has_second(c_)) store(s, s.second, t, h, head);
    }
  }

  void store(const RopeStream& s, Operand target, uint64_t t, uint64_t h,
             const reference::RopeHead& head) {
    const KvSide from = side_of(c_, s.x);
    const KvSide to = side_of(c_, target);
    Block& block = blocks_[index_[target]];
    for (uint64_t e = 0; e < c_.head_dim; ++e) {
      if (!head.rotated[e] && !c_.norm) {
        const uint32_t bits = reference::load_bits(from.dtype, blocks_[index_[s.x]].before.data(),
                                                   from.index(t, h, e));
        reference::store_bits(to.dtype, block.after.data(), to.index(t, h, e),
                              reference::convert(from.dtype, to.dtype, bits));
        continue;
      }
      const double normed = c_.norm ? kNormBound * (head.size[e] + std::abs(head.value[e])) : 0;
      expect_value(block, to.index(t, h, e), head.value[e], kTurnBound * head.size[e] + normed);
    }
  }

  const RopeCase& c_;
  const BlockIndex& index_;
  std::vector<Block>& blocks_;
  PositionTable positions_;
  std::vector<long double> frequencies_;
};

RopeInputs rope_inputs(const RopeCase& c, const BlockIndex& index, std::span<const Tensor> t) {
  const auto view = [&](Operand operand) {
    const size_t block = index[operand];
    return block == kAbsent ? Tensor() : kv_view(t[block], side_of(c, operand));
  };
  RopeInputs in{.x = view(kX), .out = view(kOut), .k = view(kK), .k_out = view(kKOut)};
  if (!turns(c)) return in;
  in.positions = position_view(c, t[index[kPositions]]);
  if (index[kFrequencies] != kAbsent) in.frequencies = frequency_view(c, t[index[kFrequencies]]);
  if (index[kFactors] != kAbsent) in.factors = t[index[kFactors]];
  return in;
}

void record_rope(const RopeCase& c, const BlockIndex& index, Encoder& encoder,
                 std::span<const Tensor> t) {
  const RopeInputs in = rope_inputs(c, index, t);
  if (!c.norm) {
    rope(encoder, in, c.options);
    return;
  }
  NormRopeInputs all{.x = in.x,
                     .positions = in.positions,
                     .out = in.out,
                     .k = in.k,
                     .k_out = in.k_out,
                     .frequencies = in.frequencies,
                     .factors = in.factors};
  if (has_weight(c)) all.weight = t[index[kWeight]];
  if (has_second(c)) all.second = kv_view(t[index[kSecond]], side_of(c, kSecond));
  if (has_weight(c) && c.k_heads != 0) all.k_weight = t[index[kKWeight]];
  if (has_second(c) && c.k_heads != 0)
    all.k_second = kv_view(t[index[kKSecond]], side_of(c, kKSecond));
  NormRopeOptions options{.epsilon = c.norm->epsilon, .weight_offset = c.norm->weight_offset};
  options.rope = c.norm->turns ? std::optional(c.options) : std::nullopt;
  norm_rope(encoder, all, options);
}

}  // namespace

std::string types_text(const RopeCase& c) { return str_cat(c.x, "_to_", c.out); }

OpCase make_case(const RopeCase& numbers) {
  OpCase op_case;
  op_case.name = (numbers.norm ? "norm_rope " : "rope ") + numbers.name;
  op_case.supported = [numbers](const Device& device) {
    return supports(device, RopeTypes{numbers.x, numbers.out});
  };
  op_case.make = [numbers] {
    const BlockIndex index = block_index(numbers);
    OpRun run;
    run.blocks = initial_blocks(numbers, index);
    Expectation(numbers, index, run.blocks).fill();
    run.record = [numbers, index](Encoder& encoder, std::span<const Tensor> tensors) {
      record_rope(numbers, index, encoder, tensors);
    };
    return run;
  };
  return op_case;
}

std::vector<OpCase> rope_cases() {
  return make_cases<RopeCase>({rope_convention_cases(), rope_head_dim_cases(), rope_partial_cases(),
                               rope_layout_cases(), rope_position_cases(), rope_section_cases(),
                               rope_frequency_cases(), rope_value_cases()});
}

std::vector<OpCase> norm_rope_cases() {
  return make_cases<RopeCase>({norm_convention_cases(), norm_output_cases(), norm_shape_cases()});
}

}  // namespace gyre::test
