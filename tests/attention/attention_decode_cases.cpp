// Few rows over K and V of one size, aligned as cp.async wants them: what a GPU's decode kernel
// takes. Lengths and KV heads are chosen so that a GPU of 84 to 160 multiprocessors reduces each
// case as its Mode says; variant_classes_test checks that.
#include "attention/attention_op_case.h"
#include "kv_codec/kv_codec_case.h"

namespace gyre::test {
namespace {

// Who reduces the splits of the keys.
enum class Mode : uint8_t {
  whole,    // there is one split
  partial,  // nobody: attention_partial
  merged,   // the last block to end
  pair,     // pairs of blocks, then the last pair
  cluster,  // a cluster of eight blocks
};
constexpr const char* kModeNames[] = {"whole", "partial", "merged", "pairs", "cluster"};

struct Rows {
  uint64_t tokens, group;
};

// Rows that a block of 4, 8, 12 or 16 takes.
constexpr Rows kRows[4][7] = {
    {{1, 1}, {1, 3}, {2, 2}, {1, 4}, {4, 1}, {1, 2}, {3, 1}},
    {{1, 6}, {1, 7}, {2, 4}, {1, 8}, {4, 2}, {1, 5}, {2, 3}},
    {{1, 12}, {2, 6}, {1, 10}, {3, 4}, {1, 9}, {3, 3}, {1, 11}},
    {{1, 16}, {2, 7}, {1, 14}, {2, 8}, {1, 13}, {3, 5}, {1, 15}},
};

bool is_levels(KvFormat format) { return class_of(format) == FormatClass::levels; }

// The blocks of rows that a decode kernel has for these values: as many as registers hold.
std::vector<uint64_t> row_blocks(KvFormat v, uint64_t dim) {
  if (!is_levels(v)) return {8, 16};
  return dim <= 128 ? std::vector<uint64_t>{4, 8, 12, 16} : std::vector<uint64_t>{4, 8};
}

Rows rows_of(uint64_t block, size_t i) {
  const auto& choice = kRows[block / 4 - 1];
  return choice[i % std::size(choice)];
}

// Keys and KV heads for a mode.
void set_keys(Mode mode, size_t i, AttentionOpCase& c) {
  switch (mode) {
    case Mode::whole:
      c.kv_heads = 2;
      c.length = 90 + 7 * (i % 6);  // a GPU splits from 129 on
      break;
    case Mode::partial:
      c.kv_heads = 1;
      c.splits = 1 + i % 3;
      c.length = 300 * c.splits + 50;  // every warp has keys, some have more than one chunk
      break;
    case Mode::merged:
      c.kv_heads = c.tokens > 4 ? 2 : 1;  // more tokens: several blocks of rows
      c.length = 380;                     // three splits of 128
      break;
    case Mode::pair:
      c.kv_heads = 1;
      c.length = 500;  // four
      break;
    case Mode::cluster:
      c.kv_heads = 5;  // 40 blocks: more than a quarter of the multiprocessors
      c.length = c.k_dim == 512 ? 300 : 500 + 70 * (i % 2);  // 64 or 128 keys each, or none
      break;
  }
  c.capacity = c.length + 1 + i % 8;
  c.ring_start = i % 3 == 0 ? 0 : c.capacity / 2;
}

void set_options(size_t i, AttentionOpCase& c) {
  constexpr KvLayout kLayouts[] = {KvLayout::token_major, KvLayout::head_major, KvLayout::padded};
  c.q = kFloats[i % 3];
  c.out = kFloats[(i + i / 3) % 3];
  c.q_layout = kLayouts[i % 2];
  c.out_layout = kLayouts[i / 2 % 3];
  c.cache_layout = kLayouts[i / 3 % 2];
  c.window = i % 4 == 1 ? c.length - 30 : 0;
  c.soft_cap = i % 7 == 2 ? 20.0f : 0.0f;
  c.alibi_slopes = i % 5 == 3;
  c.sink_logits = i % 2 == 0;
  c.lse = i % 3 != 1;
  c.causal = i % 11 != 5;
}

// Pairs pay where a block has many sums.
bool is_mode_of(Mode mode, uint64_t block, uint64_t dim) {
  return mode != Mode::pair || block * dim >= uint64_t{12} * 128;
}

struct Variant {
  KvFormat k, v;
  uint64_t dim;
  uint64_t rows;  // of a block
  Mode mode;
  uint64_t value_dim = 0;  // 0: dim
};

// `i` walks through lengths and options.
void add_case(const Variant& variant, const Rows& rows, size_t i, std::vector<OpCase>& cases) {
  const auto [k, v, dim, block, mode, value_dim] = variant;
  AttentionOpCase c{.k = k, .v = v};
  c.k_dim = dim, c.v_dim = value_dim != 0 ? value_dim : dim;
  c.tokens = rows.tokens;
  set_keys(mode, i, c);
  c.heads = rows.group * c.kv_heads;
  set_options(i, c);
  c.aligned = true;
  c.commands = std::nullopt;
  if (mode != Mode::whole) c.only_with = "attention_decode";
  // The name seeds the data: bounds were measured with these words.
  c.name = str_cat(dim, "/", c.v_dim, ", ", rows.tokens, "x", rows.group, " rows, ",
                   kModeNames[static_cast<size_t>(mode)], " of ", c.length,
                   c.window != 0 ? ", window" : "", c.soft_cap != 0 ? ", soft cap" : "",
                   c.alibi_slopes ? ", slopes" : "", c.sink_logits ? ", sinks" : "",
                   c.causal ? "" : ", not causal", " #", i);
  cases.push_back(make_case(c));
}
void add_case(const Variant& variant, size_t i, std::vector<OpCase>& cases) {
  add_case(variant, rows_of(variant.rows, i), i, cases);
}

constexpr FormatClass kClasses[] = {FormatClass::levels, FormatClass::f16, FormatClass::bf16};
constexpr uint64_t kDims[] = {64, 96, 128, 256, 512};
constexpr uint64_t kOtherDims[] = {48, 80, 112, 160, 192, 240};

// Every pair of classes at every size, with blocks of each number of rows, in each mode.
void add_classes(bool partial, std::vector<OpCase>& cases) {
  constexpr Mode kModes[] = {Mode::whole, Mode::partial, Mode::merged, Mode::pair, Mode::cluster};
  for (const FormatClass k_class : kClasses) {
    for (const FormatClass v_class : kClasses) {
      size_t i = 0;
      for (const uint64_t dim : kDims) {
        for (const uint64_t block : row_blocks(format_of(v_class, 0), dim)) {
          for (const Mode mode : kModes) {
            if (!is_mode_of(mode, block, dim)) continue;
            const Variant variant{format_of(k_class, i), format_of(v_class, i + i / 6), dim, block,
                                  mode};
            if ((mode == Mode::partial) == partial) add_case(variant, i, cases);
            ++i;
          }
        }
      }
    }
  }
}

// Every pair of formats, and every format at every size.
void add_formats(std::vector<OpCase>& cases) {
  std::vector<KvFormat> formats;
  for (const FormatClass format_class : kClasses) {
    for (const KvFormat format : formats_of(format_class)) formats.push_back(format);
  }
  size_t i = 1000;  // apart from the names above
  for (const KvFormat k : formats) {
    for (const KvFormat v : formats) {
      add_case({k, v, kDims[i % std::size(kDims)], 8, Mode::whole}, i, cases);
      ++i;
    }
    for (const uint64_t dim : kDims)
      add_case({k, k, dim, row_blocks(k, dim)[0], Mode::merged}, i++, cases);
    for (const uint64_t dim : kOtherDims)
      add_case({k, k, dim, row_blocks(k, dim)[0], Mode::merged}, i++, cases);
    add_case({k, k, 192, row_blocks(k, 192)[0], Mode::merged, 128}, i++, cases);
  }
}

// More rows over levels than one block takes.
void add_blocks_of_rows(bool partial, std::vector<OpCase>& cases) {
  constexpr Rows kManyRows[] = {{5, 4}, {16, 4}, {9, 3}, {21, 3}, {17, 1}, {4, 8}};
  constexpr Mode kModes[] = {Mode::whole, Mode::partial, Mode::merged, Mode::pair, Mode::cluster};
  const std::vector<KvFormat> formats = formats_of(FormatClass::levels);
  size_t i = 2000;
  for (const uint64_t dim : {64, 80, 128, 256}) {
    for (const Mode mode : kModes) {
      const Rows& rows = kManyRows[i % (dim == 256 ? 1 : std::size(kManyRows))];
      const uint64_t block = dim == 256 ? 8 : 16;
      const Variant variant{formats[i % formats.size()], formats[i / 2 % formats.size()], dim,
                            block, mode};
      ++i;
      if (mode == Mode::cluster || !is_mode_of(mode, block, dim)) continue;  // of one block alone
      if ((mode == Mode::partial) == partial) add_case(variant, rows, i, cases);
    }
  }
}

}  // namespace

std::vector<OpCase> attention_decode_cases() {
  std::vector<OpCase> cases;
  add_classes(false, cases);
  add_formats(cases);
  add_blocks_of_rows(false, cases);
  return cases;
}

std::vector<OpCase> attention_decode_partial_cases() {
  std::vector<OpCase> cases;
  add_classes(true, cases);
  add_blocks_of_rows(true, cases);
  return cases;
}

}  // namespace gyre::test
