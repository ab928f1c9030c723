#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "attention/attention_reference.h"
#include "kv_codec/kv_codec_case.h"

namespace gyre::test {
namespace {

using reference::AttentionData;
using reference::AttentionShape;
using reference::KvSide;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// One call as numbers; make_case() turns it into memory, call and expected contents.
struct AttentionOpCase {
  std::string name;
  DType q = DType::f32;
  DType out = DType::f32;
  KvFormat k = KvFormat::f16;
  KvFormat v = KvFormat::f16;
  KvLayout q_layout = KvLayout::token_major;
  KvLayout out_layout = KvLayout::token_major;
  KvLayout cache_layout = KvLayout::head_major;  // dense caches
  uint64_t tokens = 3;
  uint64_t heads = 4;
  uint64_t kv_heads = 2;
  uint64_t k_dim = 64;
  uint64_t v_dim = 80;
  uint64_t length = 70;
  uint64_t capacity = 75;
  uint64_t ring_start = 40;
  bool causal = true;
  uint64_t window = 0;
  float soft_cap = 0;
  bool lse = true;
  bool lse_by_head = false;  // [heads, tokens] in memory
  bool sinks = false;
  bool slopes = false;
  bool tree = false;
  uint64_t splits = 0;    // 0: attention; else attention_partial
  uint32_t commands = 1;  // what the call records
};

bool dense(KvFormat format) { return !describe(format).compressed; }

DType dtype_of(KvFormat format) {
  return format == KvFormat::f32 ? DType::f32
                                 : (format == KvFormat::f16 ? DType::f16 : DType::bf16);
}

// Largest errors of a logit and of an average of values near 1. The fast paths round queries and
// probabilities to f16, to bytes or, over bf16, to 17 bits; with f32 caches only f32 arithmetic is
// left.
double logit_bound(const AttentionOpCase& c) {
  if (c.k == KvFormat::f32) return 2e-6;
  return c.k == KvFormat::bf16 ? 8e-6 : 1.5e-3;
}
double value_bound(const AttentionOpCase& c) {
  double bound = logit_bound(c);
  if (c.v == KvFormat::f16) bound += 5e-4;
  if (c.v == KvFormat::bf16) bound += 4e-6;
  // Bytes are off by up to 1/510 of the largest probability of the row, once for each key.
  if (!dense(c.v)) bound += 1.2e-2;
  return bound;
}

// Every block of a call by its place in the list; absent ones keep kNone.
struct Places {
  static constexpr size_t kNone = ~size_t{0};
  size_t q = kNone, k = kNone, k_scales = kNone, v = kNone, v_scales = kNone, out = kNone,
         lse = kNone, sinks = kNone, slopes = kNone, tree = kNone;
};

class Maker {
 public:
  explicit Maker(const AttentionOpCase& c) : c_(c), random_(seed_of(c.name)) {}

  OpRun make() {
    OpRun run;
    at_.q = add_rows(q_side(), data_.q);
    add_cache(false, at_.k, at_.k_scales, data_.k);
    add_cache(true, at_.v, at_.v_scales, data_.v);
    if (c_.sinks) at_.sinks = add_per_head(1.0f, data_.sinks);
    if (c_.slopes) at_.slopes = add_per_head(0.05f, data_.slopes);
    if (c_.tree) add_tree();
    if (c_.splits == 0) {
      expect_outputs();
    } else {
      expect_partial();
    }
    run.blocks = std::move(blocks_);
    run.commands = c_.commands;
    run.record = [c = c_, at = at_](Encoder& encoder, std::span<const Tensor> t) {
      record(c, at, encoder, t);
    };
    return run;
  }

  static AttentionShape shape_of(const AttentionOpCase& c) {
    return {c.tokens,   c.heads,      c.kv_heads,
            c.k_dim,    c.v_dim,      c.length,
            c.capacity, c.ring_start, 1 / std::sqrt(static_cast<double>(c.k_dim)),
            c.causal,   c.window,     double{c.soft_cap}};
  }

 private:
  static std::mt19937 seed_of(const std::string& text) {
    std::seed_seq seed(text.begin(), text.end());
    return std::mt19937(seed);
  }
  static KvShape cache_shape(const AttentionOpCase& c, bool v) {
    return {v ? c.v : c.k, v ? KvRole::v : KvRole::k, c.kv_heads, c.capacity,
            v ? c.v_dim : c.k_dim};
  }
  static KvSide cache_side(const AttentionOpCase& c, bool v) {
    const KvShape shape = cache_shape(c, v);
    return {dtype_of(shape.format), c.cache_layout, c.capacity, c.kv_heads, shape.head_dim, v};
  }
  KvSide q_side() const { return {c_.q, c_.q_layout, c_.tokens, c_.heads, c_.k_dim, 0}; }
  static KvSide out_side(const AttentionOpCase& c) {
    return {c.out, c.out_layout, c.tokens, c.heads, c.v_dim, 0};
  }

  float normal() { return normal_(random_); }

  size_t add(DType dtype, Bytes bytes) {
    Block block;
    block.dtype = dtype;
    block.before = block.after = std::move(bytes);
    blocks_.push_back(std::move(block));
    return blocks_.size() - 1;
  }

  static double store(const KvSide& side, Bytes& memory, uint64_t index, float value) {
    const uint32_t bits =
        reference::convert(DType::f32, side.dtype, std::bit_cast<uint32_t>(value));
    reference::store_bits(side.dtype, memory.data(), index, bits);
    return reference::load_value(side.dtype, memory.data(), index);
  }

  size_t add_rows(const KvSide& side, std::vector<double>& values) {
    Bytes bytes = pattern_bytes(side.elements() * size_bytes(side.dtype), 3);
    for (uint64_t t = 0; t < side.tokens; ++t) {
      for (uint64_t h = 0; h < side.heads; ++h) {
        for (uint64_t e = 0; e < side.head_dim; ++e)
          values.push_back(store(side, bytes, side.index(t, h, e), normal()));
      }
    }
    return add(side.dtype, std::move(bytes));
  }

  bool used(uint64_t slot) const {
    return (slot + c_.capacity - c_.ring_start) % c_.capacity < c_.length;
  }

  // Slots outside the bounds hold NaN.
  std::vector<float> row_of(uint64_t slot, uint64_t head_dim) {
    std::vector<float> row(head_dim, kNaN);
    if (!used(slot)) return row;
    for (float& x : row) x = normal();
    return row;
  }

  void add_cache(bool v, size_t& codes_at, size_t& scales_at, std::vector<double>& values) {
    const KvShape shape = cache_shape(c_, v);
    if (!dense(shape.format)) return add_codes(shape, codes_at, scales_at, values);
    const KvSide side = cache_side(c_, v);
    Bytes bytes = pattern_bytes(side.elements() * size_bytes(side.dtype), 4);
    for (uint64_t slot = 0; slot < c_.capacity; ++slot) {
      for (uint64_t g = 0; g < c_.kv_heads; ++g) {
        const std::vector<float> row = row_of(slot, shape.head_dim);
        for (uint64_t e = 0; e < shape.head_dim; ++e)
          values.push_back(store(side, bytes, side.index(slot, g, e), row[e]));
      }
    }
    codes_at = add(side.dtype, std::move(bytes));
  }

  void add_codes(const KvShape& shape, size_t& codes_at, size_t& scales_at,
                 std::vector<double>& values) {
    const reference::KvPlaces places = places_of(shape);
    Bytes codes = pattern_bytes(c_.kv_heads * places.head_bytes(), 5);
    Bytes scales = pattern_bytes(c_.kv_heads * places.scale_head_bytes(), 6);
    for (uint64_t slot = 0; slot < c_.capacity; ++slot) {
      for (uint64_t g = 0; g < c_.kv_heads; ++g) {
        const reference::KvCodes encoded =
            reference::kv_encode(places.coder, row_of(slot, shape.head_dim));
        reference::kv_store(places, slot, encoded, codes.data() + g * places.head_bytes(),
                            scales.data() + g * places.scale_head_bytes());
        const auto row = reference::kv_restored(reference::kv_rotated(places.coder, encoded));
        values.insert(values.end(), row.begin(), row.end());
      }
    }
    codes_at = add(DType::u8, std::move(codes));
    scales_at = add(DType::u8, std::move(scales));
  }

  size_t add_per_head(float gain, std::vector<double>& values) {
    const KvSide side{DType::f32, KvLayout::token_major, 1, c_.heads, 1, 0};
    Bytes bytes(c_.heads * sizeof(float));
    for (uint64_t h = 0; h < c_.heads; ++h)
      values.push_back(store(side, bytes, h, gain * normal()));
    return add(DType::f32, std::move(bytes));
  }

  void add_tree() {
    Bytes bytes(c_.tokens * c_.tokens);
    for (uint64_t i = 0; i < bytes.size(); ++i) {
      const uint64_t row = i / c_.tokens, column = i % c_.tokens;
      const bool sees = row == column || random_() % 2 == 0;  // later ones too: not causal
      data_.tree.push_back(sees ? 1 : 0);
      bytes[i] = static_cast<std::byte>(sees ? 255 : 0);
    }
    at_.tree = add(DType::u8, std::move(bytes));
  }

  void expect_outputs() {
    const reference::AttentionResult result = reference::attention(shape_of(c_), data_);
    const KvSide side = out_side(c_);
    at_.out = add(c_.out, pattern_bytes(side.elements() * size_bytes(c_.out), 8));
    for (uint64_t i = 0; i < result.out.size(); ++i) {
      const uint64_t row = i / c_.v_dim;
      const uint64_t place = side.index(row / c_.heads, row % c_.heads, i % c_.v_dim);
      expect(at_.out, place, result.out[i], value_bound(c_));
    }
    if (!c_.lse) return;
    at_.lse = add(DType::f32, pattern_bytes(result.lse.size() * sizeof(float), 9));
    for (uint64_t row = 0; row < result.lse.size(); ++row) {
      const uint64_t place = c_.lse_by_head ? row % c_.heads * c_.tokens + row / c_.heads : row;
      expect(at_.lse, place, result.lse[row], logit_bound(c_) + 2e-6);
    }
  }

  void expect(size_t block, uint64_t place, double value, double bound) {
    if (std::isinf(value)) {
      return reference::store_bits(DType::f32, blocks_[block].after.data(), place, 0xFF800000u);
    }
    expect_near(blocks_[block], place, value, bound);
  }

  // Splits are whole blocks of 64 keys, counted from the oldest.
  void expect_partial() {
    const uint64_t blocks = (c_.length + 63) / 64;
    const uint64_t keys = (blocks + c_.splits - 1) / c_.splits * 64;
    const uint64_t rows = c_.tokens * c_.heads;
    at_.out = add(DType::f32, pattern_bytes(c_.splits * rows * (c_.v_dim + 2) * 4, 8));
    for (uint64_t split = 0; split < c_.splits; ++split) {
      for (uint64_t row = 0; row < rows; ++row)
        expect_state(split * rows + row, row, split * keys, (split + 1) * keys);
    }
  }

  void expect_state(uint64_t index, uint64_t row, uint64_t first, uint64_t last) {
    const AttentionShape s = shape_of(c_);
    const uint64_t token = row / c_.heads, head = row % c_.heads;
    const uint64_t kv_head = head / (c_.heads / c_.kv_heads);
    double max = -std::numeric_limits<double>::infinity(), sum = 0;
    std::vector<double> logits(c_.length), acc(c_.v_dim);
    for (uint64_t key = first; key < std::min(last, c_.length); ++key) {
      const uint64_t slot = (c_.ring_start + key) % c_.capacity;
      for (uint64_t e = 0; e < c_.k_dim; ++e) {
        logits[key] += s.scale * data_.q[row * c_.k_dim + e] *
                       data_.k[(slot * c_.kv_heads + kv_head) * c_.k_dim + e];
      }
      if (reference::attention_sees(s, data_, token, key)) max = std::max(max, logits[key]);
    }
    for (uint64_t key = first; key < std::min(last, c_.length); ++key) {
      if (!reference::attention_sees(s, data_, token, key)) continue;
      const uint64_t slot = (c_.ring_start + key) % c_.capacity;
      const double p = std::exp(logits[key] - max);
      sum += p;
      for (uint64_t e = 0; e < c_.v_dim; ++e)
        acc[e] += p * data_.v[(slot * c_.kv_heads + kv_head) * c_.v_dim + e];
    }
    const uint64_t place = index * (c_.v_dim + 2);
    for (uint64_t e = 0; e < c_.v_dim; ++e)
      expect(at_.out, place + e, acc[e], (value_bound(c_) + logit_bound(c_)) * sum + 1e-30);
    expect(at_.out, place + c_.v_dim, max, logit_bound(c_));
    expect(at_.out, place + c_.v_dim + 1, sum, 2 * logit_bound(c_) * sum + 1e-30);
  }

  static KvBuffer buffer_of(const AttentionOpCase& c, bool v, const Tensor& codes,
                            const Tensor& scales) {
    const KvShape shape = cache_shape(c, v);
    if (dense(shape.format))
      return {shape, kv_view(codes, cache_side(c, v)).permute({1, 0, 2}), {}};
    return {shape, codes.reshape(kv_codes_shape(shape)), scales.reshape(kv_scales_shape(shape))};
  }

  static void record(const AttentionOpCase& c, const Places& at, Encoder& encoder,
                     std::span<const Tensor> t) {
    const auto of = [&](size_t place) { return place == Places::kNone ? Tensor() : t[place]; };
    AttentionInputs in;
    in.q = kv_view(t[at.q], {c.q, c.q_layout, c.tokens, c.heads, c.k_dim, 0});
    in.k_cache = buffer_of(c, false, of(at.k), of(at.k_scales));
    in.v_cache = buffer_of(c, true, of(at.v), of(at.v_scales));
    in.sinks = of(at.sinks);
    in.slopes = of(at.slopes);
    if (c.tree) in.tree = t[at.tree].reshape({c.tokens, c.tokens});
    const AttentionOptions options{.length = c.length,
                                   .ring_start = c.ring_start,
                                   .scale = static_cast<float>(shape_of(c).scale),
                                   .causal = c.causal,
                                   .window = c.window,
                                   .soft_cap = c.soft_cap};
    if (c.splits != 0) {
      const Tensor partial =
          t[at.out].reshape(attention_partial_shape(c.splits, in.q.shape(), c.v_dim));
      return attention_partial(encoder, {in.q, in.k_cache, in.v_cache, partial, in.slopes, in.tree},
                               options);
    }
    in.out = kv_view(t[at.out], out_side(c));
    if (c.lse) {
      in.lse = c.lse_by_head ? t[at.lse].reshape({c.heads, c.tokens}).permute({1, 0})
                             : t[at.lse].reshape({c.tokens, c.heads});
    }
    attention(encoder, in, options);
  }

  AttentionOpCase c_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  std::vector<Block> blocks_;
  Places at_;
  AttentionData data_;
};

OpCase make_case(const AttentionOpCase& c) {
  OpCase op_case;
  op_case.name = std::string(c.splits == 0 ? "attention " : "attention_partial ") +
                 std::string(name(c.k)) + "/" + std::string(name(c.v)) + " " + c.name;
  op_case.supported = [c](const Device& device) {
    return device.supports(AttentionTypes{c.q, c.k, c.v, c.splits == 0 ? c.out : DType::f32});
  };
  op_case.make = [c] { return Maker(c).make(); };
  return op_case;
}

struct Pair {
  KvFormat k, v;
};

constexpr Pair kPairs[] = {{KvFormat::f32, KvFormat::f32},   {KvFormat::f16, KvFormat::f16},
                           {KvFormat::bf16, KvFormat::bf16}, {KvFormat::tq8, KvFormat::tq8},
                           {KvFormat::tq4, KvFormat::tq4},   {KvFormat::tq8, KvFormat::f32},
                           {KvFormat::f32, KvFormat::tq4}};

// Dtypes and layouts of everything that has strides, walked through together.
void add_layout_cases(const Pair& pair, std::vector<OpCase>& cases) {
  constexpr KvLayout kLayouts[] = {KvLayout::token_major, KvLayout::head_major, KvLayout::padded,
                                   KvLayout::interleaved};
  for (size_t i = 0; i < 12; ++i) {
    AttentionOpCase c{.k = pair.k, .v = pair.v};
    c.q = kFloats[i % 3];
    c.out = kFloats[i / 3 % 3];
    c.q_layout = kLayouts[i % 4];
    c.out_layout = kLayouts[(i + i / 4 + 1) % 4];
    c.cache_layout = kLayouts[(i + 1) % 4];
    c.lse = i % 3 != 0;
    c.lse_by_head = i % 2 == 0;
    c.name = "q " + std::string(name(c.q)) + " " + layout_name(c.q_layout) + ", out " +
             std::string(name(c.out)) + " " + layout_name(c.out_layout) + ", cache " +
             layout_name(c.cache_layout);
    cases.push_back(make_case(c));
  }
}

// Masks, and every other thing that a call may ask for, one at a time and together.
void add_option_cases(const Pair& pair, std::vector<OpCase>& cases) {
  const auto add = [&](const char* what, AttentionOpCase c) {
    c.k = pair.k;
    c.v = pair.v;
    c.name = what;
    cases.push_back(make_case(c));
  };
  add("sinks", {.sinks = true});
  add("slopes", {.slopes = true});
  add("soft cap", {.soft_cap = 1.5f});
  add("tree", {.tokens = 5, .tree = true});
  add("window", {.window = 17});
  add("window of one", {.tokens = 7, .window = 1});
  add("not causal", {.tokens = 5, .causal = false});
  add("more queries than keys", {.tokens = 6, .length = 4, .sinks = true});
  add("nothing in the cache", {.length = 0});
  add("no slots", {.length = 0, .capacity = 0, .ring_start = 0});
  add("nothing but sinks", {.length = 0, .sinks = true});
  add("no queries", {.tokens = 0, .commands = 0});
  add("one query", {.tokens = 1, .length = 75});
  add("many queries", {.tokens = 37});
  add("many queries, everything",
      {.tokens = 37, .window = 30, .soft_cap = 2, .sinks = true, .slopes = true, .tree = true});
  add("few queries, everything",
      {.tokens = 5, .window = 30, .soft_cap = 2, .sinks = true, .slopes = true, .tree = true});
  // Long enough for two splits, which are merged.
  add("two splits", {.tokens = 1,
                     .k_dim = 16,
                     .v_dim = 16,
                     .length = 1100,
                     .capacity = 1101,
                     .sinks = true,
                     .commands = 2});
}

}  // namespace

std::vector<OpCase> attention_cases() {
  std::vector<OpCase> cases;
  for (const Pair& pair : kPairs) {
    add_layout_cases(pair, cases);
    add_option_cases(pair, cases);
  }
  return cases;
}

std::vector<OpCase> attention_partial_cases() {
  std::vector<OpCase> cases;
  for (const Pair& pair : kPairs) {
    for (const uint64_t tokens : {1u, 3u, 20u}) {
      for (const uint64_t splits : {1u, 2u, 3u}) {  // the third has no keys
        AttentionOpCase c{.k = pair.k, .v = pair.v, .tokens = tokens, .splits = splits};
        c.length = 75;
        c.q = kFloats[splits - 1];
        c.name = "tokens " + std::to_string(tokens) + " splits " + std::to_string(splits);
        cases.push_back(make_case(c));
      }
    }
  }
  return cases;
}

}  // namespace gyre::test
