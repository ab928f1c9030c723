#include "rope/rope_operands.h"

#include "gyre_test.h"
#include "rope/rope_reference.h"

namespace gyre::test {
namespace {

using reference::KvSide;

int64_t draw_position(RopePositions kind, std::mt19937& random) {
  constexpr int64_t kExtremes[] = {0,
                                   1,
                                   -1,
                                   65535,
                                   65536,
                                   1 << 20,
                                   -(1 << 20),
                                   1 << 30,
                                   std::numeric_limits<int32_t>::max(),
                                   std::numeric_limits<int32_t>::min()};
  switch (kind) {
    case RopePositions::extreme:
      return kExtremes[random() % std::size(kExtremes)];
    case RopePositions::unsigned_top:
      return static_cast<int64_t>(random() | 0x80000000u);
    case RopePositions::mixed:
      break;
  }
  const uint64_t shift = 11 + random() % 21;
  const auto value = static_cast<int64_t>(random() >> shift);
  return random() % 2 == 0 ? value : -value;
}

// Positions lie [axes, tokens], or with every second element and the end of each row left out.
uint64_t position_row(const RopeCase& c) { return c.positions_apart ? 2 * c.tokens + 3 : c.tokens; }
uint64_t position_step(const RopeCase& c) { return c.positions_apart ? 2 : 1; }

Block position_block(const RopeCase& c) {
  const PositionTable table = draw_positions(c);
  Block block;
  block.dtype = c.positions == RopePositions::unsigned_top ? DType::u32 : DType::i32;
  block.before = pattern_bytes(table.size() * position_row(c) * 4, 3);
  for (uint64_t axis = 0; axis < table.size(); ++axis) {
    for (uint64_t t = 0; t < c.tokens; ++t) {
      const uint64_t at = axis * position_row(c) + t * position_step(c);
      reference::store_bits(block.dtype, block.before.data(), at,
                            static_cast<uint32_t>(table[axis][t]));
    }
  }
  return block;
}

// Not what any base gives. Factors divide a table's entries, which know no whole turns.
std::vector<double> own_frequencies(const RopeCase& c) {
  std::vector<double> radians;
  const bool plain = c.frequencies == RopeFrequencySource::table && !c.factors.empty();
  for (const long double f : reference::rope_frequencies(c.options, c.head_dim)) {
    const size_t p = radians.size();
    double own = 0.75 * static_cast<double>(f);
    if (!plain && p == 0) own = 9.5;
    if (!plain && p % 5 == 3) own = -own;
    radians.push_back(c.frequencies == RopeFrequencySource::radians ? static_cast<float>(own)
                                                                    : own);
  }
  return radians;
}

// A table's entries are 8 bytes each; one element in front keeps them aligned between the guards.
Block frequency_block(const RopeCase& c) {
  const std::vector<double> own = own_frequencies(c);
  if (c.frequencies == RopeFrequencySource::radians)
    return plain_block(DType::f32, std::vector<float>(own.begin(), own.end()));
  const Bytes table = read_bytes(rope_table(Device::open("cpu", {.threads = 1}), own));
  Block block;
  block.dtype = DType::u32;
  block.before.resize(4);
  block.before.insert(block.before.end(), table.begin(), table.end());
  return block;
}

Block weight_block(const RopeCase& c, const char* what) {
  std::mt19937 random = random_of(c.name + what);
  std::uniform_real_distribution<float> values(-2, 2);
  std::vector<float> weights(c.head_dim);
  for (float& weight : weights) weight = values(random);
  return plain_block(*c.norm->weight, reference::stored(*c.norm->weight, weights));
}

std::vector<bool> rotated_coordinates(const RopeCase& c) {
  std::vector<bool> rotated(c.head_dim, false);
  for (uint64_t p = 0; p < reference::rope_pairs(c.options, c.head_dim); ++p) {
    const reference::RopePair pair = reference::rope_pair(c.options, c.head_dim, p);
    rotated[pair.u] = rotated[pair.v] = true;
  }
  return rotated;
}

float draw_value(const RopeCase& c, std::mt19937& random) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kSpecials[] = {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN(),
                                 0.0f,      -0.0f,      1e6f,
                                 -3e8f,     1e-7f};
  if (c.specials && random() % 8 == 0) return kSpecials[random() % std::size(kSpecials)];
  return std::uniform_real_distribution<float>(-1, 1)(random) * c.size;
}

// Unit values where arithmetic is done; any bits, NaN payloads among them, where it is not.
void fill_input(const RopeCase& c, Operand operand, Block& block) {
  const KvSide side = side_of(c, operand);
  block.dtype = side.dtype;
  if (block.before.empty())
    block.before = pattern_bytes(side.elements() * size_bytes(side.dtype), 7);
  std::mt19937 random = random_of(c.name + (operand == kX ? "x" : "k"));
  const std::vector<bool> rotated = rotated_coordinates(c);
  for (uint64_t t = 0; t < c.tokens; ++t) {
    for (uint64_t h = 0; h < side.heads; ++h) {
      for (uint64_t e = 0; e < c.head_dim; ++e) {
        const auto value = std::bit_cast<uint32_t>(draw_value(c, random));
        const bool any = !c.norm && !rotated[e];
        const uint32_t bits = any ? static_cast<uint32_t>(random())
                                  : reference::convert(DType::f32, side.dtype, value);
        reference::store_bits(side.dtype, block.before.data(), side.index(t, h, e), bits);
      }
    }
  }
}

size_t block_count(const BlockIndex& index) {
  size_t count = 0;
  for (const size_t i : index) {
    if (i != kAbsent) count = std::max(count, i + 1);
  }
  return count;
}

}  // namespace

// Where each operand lies: in place the output is the input, interleaved K lies beside x.
BlockIndex block_index(const RopeCase& c) {
  BlockIndex index;
  index.fill(kAbsent);
  size_t next = 0;
  for (const RopeStream& s : kStreams) {
    if (&s == &kStreams[1] && c.k_heads == 0) break;
    const bool second_stream = &s == &kStreams[1];
    const bool beside_x = second_stream && c.x_layout == KvLayout::interleaved;
    const bool beside_out = second_stream && c.out_layout == KvLayout::interleaved;
    index[s.x] = beside_x ? index[kX] : next++;
    if (c.in_place) {
      index[s.out] = index[s.x];
    } else {
      index[s.out] = beside_out ? index[kOut] : next++;
    }
    if (has_second(c)) index[s.second] = next++;
    if (has_weight(c)) index[s.weight] = next++;
  }
  if (turns(c)) {
    index[kPositions] = next++;
    if (c.frequencies != RopeFrequencySource::base) index[kFrequencies] = next++;
    if (!c.factors.empty()) index[kFactors] = next++;
  }
  return index;
}

KvSide side_of(const RopeCase& c, Operand operand) {
  const uint64_t stream = operand >= kK ? 1 : 0;
  KvSide side{c.x, c.x_layout, c.tokens, stream == 0 ? c.heads : c.k_heads, c.head_dim, stream};
  if (operand == kOut || operand == kKOut) {
    side.dtype = c.out;
    side.layout = c.in_place ? c.x_layout : c.out_layout;
  } else if (operand == kSecond || operand == kKSecond) {
    side.dtype = *c.norm->second;
    side.layout = c.norm->second_layout;
  }
  return side;
}

PositionTable draw_positions(const RopeCase& c) {
  std::mt19937 random = random_of(c.name + "positions");
  PositionTable table(reference::rope_axes(c.options.mode));
  for (auto& axis : table) {
    for (uint64_t t = 0; t < c.tokens; ++t) axis.push_back(draw_position(c.positions, random));
  }
  return table;
}

Tensor position_view(const RopeCase& c, const Tensor& flat) {
  const uint64_t axes = reference::rope_axes(c.options.mode);
  if (axes == 1) return flat.strided({c.tokens}, {position_step(c)});
  return flat.strided({axes, c.tokens}, {position_row(c), position_step(c)});
}

std::vector<long double> frequencies_of(const RopeCase& c) {
  std::vector<long double> radians = reference::rope_frequencies(c.options, c.head_dim);
  if (c.frequencies != RopeFrequencySource::base) {
    const std::vector<double> own = own_frequencies(c);
    radians.assign(own.begin(), own.end());
  }
  for (size_t p = 0; p < c.factors.size(); ++p) radians[p] /= c.factors[p];
  return radians;
}

Tensor frequency_view(const RopeCase& c, const Tensor& flat) {
  if (c.frequencies == RopeFrequencySource::radians) return flat;
  return flat.slice(0, 1, flat.elements() - 1).reshape({flat.elements() / 2, 2});
}

std::vector<Block> initial_blocks(const RopeCase& c, const BlockIndex& index) {
  std::vector<Block> blocks(block_count(index));
  for (uint64_t s = 0; s < stream_count(c); ++s) {
    const RopeStream& stream = kStreams[s];
    fill_input(c, stream.x, blocks[index[stream.x]]);
    for (const Operand target : {stream.out, stream.second}) {
      if (index[target] == kAbsent || index[target] == index[stream.x]) continue;
      const KvSide side = side_of(c, target);
      blocks[index[target]].dtype = side.dtype;
      blocks[index[target]].before = pattern_bytes(side.elements() * size_bytes(side.dtype), 5);
    }
    if (has_weight(c))
      blocks[index[stream.weight]] = weight_block(c, s == 0 ? "weight" : "k_weight");
  }
  if (index[kPositions] != kAbsent) blocks[index[kPositions]] = position_block(c);
  if (index[kFrequencies] != kAbsent) blocks[index[kFrequencies]] = frequency_block(c);
  if (index[kFactors] != kAbsent) blocks[index[kFactors]] = plain_block(DType::f32, c.factors);
  for (Block& block : blocks) block.after = block.before;
  return blocks;
}

}  // namespace gyre::test
