#include "attention/attention_op_case.h"

#include "attention/attention_expected.h"
#include "gyre_test.h"
#include "kv_codec/kv_memory.h"

namespace gyre::test {
namespace {

using reference::AttentionData;
using reference::AttentionShape;
using reference::KvLayout;
using reference::KvSide;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

AttentionShape shape_of(const AttentionOpCase& c) {
  return {c.tokens,   c.heads,      c.kv_heads,
          c.q_dim(),  c.out_dim(),  c.length,
          c.capacity, c.ring_start, 1 / std::sqrt(static_cast<double>(c.q_dim())),
          c.causal,   c.window,     double{c.soft_cap}};
}

KvShape cache_shape(const AttentionOpCase& c, KvRole role) {
  const bool v = role == KvRole::v;
  KvShape shape{v ? c.v : c.k, role, c.kv_heads, c.capacity, v ? c.v_dim : c.k_dim};
  if (class_of(shape.format) == FormatClass::mlx_native) shape.scale_factor = c.scale_factor;
  return shape;
}

KvSide q_side(const AttentionOpCase& c) {
  return {c.q, c.q_layout, c.tokens, c.heads, c.q_dim(), 0};
}
KvSide out_side(const AttentionOpCase& c) {
  return {c.out, c.out_layout, c.tokens, c.heads, c.out_dim(), 0};
}

// Splits are whole blocks of 64 keys, counted from the oldest that a query's window reaches.
struct Splits {
  uint64_t count, first, keys;
};
Splits splits_of(const AttentionOpCase& c) {
  if (c.splits == 0) return {1, 0, c.length};
  const uint64_t before = c.tokens <= c.length ? c.length - c.tokens + 1 : 0;
  const uint64_t first = c.window != 0 && before > c.window ? before - c.window : 0;
  const uint64_t blocks = (c.length - first + 63) / 64;
  return {c.splits, first, (blocks + c.splits - 1) / c.splits * 64};
}

// Every block of a call by its place in the list; absent ones keep kNone.
struct Places {
  static constexpr size_t kNone = ~size_t{0};
  size_t q = kNone, k = kNone, k_scales = kNone, v = kNone, v_scales = kNone, out = kNone,
         lse = kNone, sink_logits = kNone, alibi_slopes = kNone, tree_mask = kNone;
};

enum class Contents : bool { none, random };

// A call's memory before it runs, and its inputs in the clear.
class Maker {
 public:
  Maker(const AttentionOpCase& c, Contents contents)
      : c_(c), contents_(contents), random_(random_of(c.name)) {
    at.q = add_rows(q_side(c_), data.q);
    add_cache(KvRole::k, at.k, at.k_scales, data.k);
    add_cache(KvRole::v, at.v, at.v_scales, data.v);
    if (c_.latent) reference::join_latent(c_.k_dim, c_.v_dim, data);
    const auto per_head = [&](float gain, std::vector<double>& values) {
      return add(per_head_block(
          c_.heads, gain, [&] { return normal(); }, values));
    };
    if (c_.sink_logits) at.sink_logits = per_head(1.0f, data.sink_logits);
    if (c_.alibi_slopes) at.alibi_slopes = per_head(0.05f, data.alibi_slopes);
    if (c_.tree_mask) add_tree();
    const uint64_t rows = c_.tokens * c_.heads;
    if (c_.splits != 0) {
      const uint64_t bytes = c_.splits * rows * (c_.out_dim() + 2) * sizeof(float);
      at.out = add(plain_block(DType::f32, pattern_bytes(bytes, 8)));
      return;
    }
    at.out =
        add(plain_block(c_.out, pattern_bytes(out_side(c_).elements() * size_bytes(c_.out), 8)));
    if (c_.lse) at.lse = add(plain_block(DType::f32, pattern_bytes(rows * sizeof(float), 9)));
  }

  std::vector<Block> blocks;
  Places at;
  AttentionData data;

 private:
  float normal() { return normal_(random_); }

  size_t add(Block block) {
    blocks.push_back(std::move(block));
    return blocks.size() - 1;
  }

  size_t add_rows(const KvSide& side, std::vector<double>& values) {
    Bytes bytes = pattern_bytes(side.elements() * size_bytes(side.dtype), 3);
    for (uint64_t t = 0; t < side.tokens; ++t) {
      for (uint64_t h = 0; h < side.heads; ++h) {
        std::vector<float> row(side.head_dim);
        for (float& x : row) x = normal();
        reference::store_row(side, bytes, t, h, row);
        for (const float x : row) values.push_back(reference::rounded(side.dtype, x));
      }
    }
    return add(plain_block(side.dtype, std::move(bytes)));
  }

  bool used(uint64_t slot) const {
    return (slot + c_.capacity - c_.ring_start) % c_.capacity < c_.length;
  }

  void add_cache(KvRole role, size_t& codes_at, size_t& scales_at, std::vector<double>& values) {
    const KvShape shape = cache_shape(c_, role);
    const auto row_of = [&](uint64_t slot) {
      std::vector<float> row(shape.head_dim, kNaN);
      for (uint64_t e = 0; e < row.size() && used(slot); ++e) row[e] = normal();
      return row;
    };
    KvMemory memory = contents_ == Contents::random ? kv_memory(shape, c_.cache_layout, row_of)
                                                    : kv_memory(shape, c_.cache_layout);
    memory.codes.aligned = memory.scales.aligned = c_.aligned;
    values = std::move(memory.values);
    codes_at = add(std::move(memory.codes));
    if (describe(shape.format).compressed) scales_at = add(std::move(memory.scales));
  }

  void add_tree() {
    Bytes bytes(c_.tokens * c_.tokens);
    for (uint64_t i = 0; i < bytes.size(); ++i) {
      const uint64_t row = i / c_.tokens, column = i % c_.tokens;
      const bool sees = row == column || random_() % 2 == 0;  // later ones too: not causal
      data.tree_mask.push_back(sees ? 1 : 0);
      bytes[i] = static_cast<std::byte>(sees ? 255 : 0);
    }
    at.tree_mask = add(plain_block(DType::u8, std::move(bytes)));
  }

  AttentionOpCase c_;
  Contents contents_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
};

// What the call must leave, within the bounds of the arithmetic that the device uses.
class Expected {
 public:
  Expected(const AttentionOpCase& c, const Places& at, const AttentionData& data) : c_(c), at_(at) {
    const auto [splits, first, keys] = splits_of(c);
    for (uint64_t split = 0; split < splits; ++split) {
      const uint64_t begin = first + split * keys;
      for (uint64_t row = 0; row < c.tokens * c.heads; ++row)
        rows_.push_back(reference::attention_state(shape_of(c), data, row / c.heads, row % c.heads,
                                                   begin, begin + keys));
    }
    sinks_ = data.sink_logits;
  }

  std::string fill(std::vector<Block>& blocks, const std::string& description) const {
    const AttentionTolerance bounds =
        attention_tolerance(description, c_.k, c_.latent ? c_.k : c_.v,
                            {.softened = c_.soft_cap != 0 || c_.alibi_slopes});
    for (uint64_t i = 0; i < rows_.size(); ++i) {
      if (c_.splits == 0) {
        fill_row(blocks, i, bounds);
      } else {
        fill_state(blocks, i, bounds);
      }
    }
    double& nmse = blocks[at_.out].nmse;
    if (c_.splits == 0) {
      nmse = bounds.nmse + out_rounding(c_.out);
      return c_.out == DType::f32 ? bounds.name : str_cat(bounds.name, " to ", c_.out);
    }
    // A split's values follow its maximum, which has an error of its own.
    nmse = bounds.nmse + bounds.lse * bounds.lse / 10;
    return bounds.name + " partial";
  }

 private:
  void fill_row(std::vector<Block>& blocks, uint64_t row, const AttentionTolerance& bounds) const {
    reference::AttentionState state = rows_[row];
    if (!sinks_.empty()) reference::add_sink(state, sinks_[row % c_.heads]);
    const uint64_t place = c_.lse_by_head ? row % c_.heads * c_.tokens + row / c_.heads : row;
    expect_attention_row(
        state, row, bounds,
        {blocks[at_.out], out_side(c_), c_.lse ? &blocks[at_.lse] : nullptr, place});
  }

  void fill_state(std::vector<Block>& blocks, uint64_t index,
                  const AttentionTolerance& bounds) const {
    const reference::AttentionState& state = rows_[index];
    const uint64_t dim = c_.out_dim(), place = index * (dim + 2);
    const double bound = bounds.of_row * rms(state.values);
    for (uint64_t e = 0; e < dim; ++e)
      expect_attention(blocks[at_.out], place + e, state.values[e],
                       bound + bounds.lse * std::fabs(state.values[e]));
    expect_attention(blocks[at_.out], place + dim, state.max, bounds.lse);
    expect_attention(blocks[at_.out], place + dim + 1, state.sum, 2 * bounds.lse * state.sum);
    for (const uint64_t e : {dim, dim + 1}) blocks[at_.out].near[place + e].counts = false;
  }

  AttentionOpCase c_;
  Places at_;
  std::vector<reference::AttentionState> rows_;  // [splits, tokens, heads]
  std::vector<double> sinks_;
};

void record(const AttentionOpCase& c, const Places& at, Encoder& encoder,
            std::span<const Tensor> t) {
  const auto of = [&](size_t place) { return place == Places::kNone ? Tensor() : t[place]; };
  AttentionInputs in;
  in.latent = c.latent;
  in.q = kv_view(t[at.q], q_side(c));
  in.k_cache = kv_buffer(cache_shape(c, KvRole::k), c.cache_layout, of(at.k), of(at.k_scales));
  in.v_cache = kv_buffer(cache_shape(c, KvRole::v), c.cache_layout, of(at.v), of(at.v_scales));
  AttentionOptions options{
      .length = c.length,
      .ring_start = c.ring_start,
      .scale = static_cast<float>(shape_of(c).scale),
      .mask = {.causal = c.causal, .window = c.window, .soft_cap = c.soft_cap}};
  options.mask.alibi_slopes = of(at.alibi_slopes);
  if (c.tree_mask) options.mask.tree_mask = t[at.tree_mask].reshape({c.tokens, c.tokens});
  if (c.splits != 0) {
    const Tensor partial =
        t[at.out].reshape(attention_partial_shape(c.splits, in.q.shape(), c.out_dim()));
    return attention_partial(encoder, {in.q, in.k_cache, in.v_cache, partial, c.latent}, options);
  }
  options.mask.sink_logits = of(at.sink_logits);
  in.out = kv_view(t[at.out], out_side(c));
  if (c.lse) {
    in.lse = c.lse_by_head ? t[at.lse].reshape({c.heads, c.tokens}).permute({1, 0})
                           : t[at.lse].reshape({c.tokens, c.heads});
  }
  attention(encoder, in, options);
}

OpRun make_run(const AttentionOpCase& c, Contents contents) {
  Maker maker(c, contents);
  OpRun run;
  run.commands = c.commands;
  run.record = [c, at = maker.at](Encoder& encoder, std::span<const Tensor> t) {
    record(c, at, encoder, t);
  };
  if (contents == Contents::random) {
    const auto expected = std::make_shared<const Expected>(c, maker.at, maker.data);
    run.expect = [expected](std::vector<Block>& blocks, const std::string& description) {
      return expected->fill(blocks, description);
    };
  }
  run.blocks = std::move(maker.blocks);
  return run;
}

}  // namespace

OpCase make_case(const AttentionOpCase& c) {
  const AttentionTypes types{c.q, c.k, c.v, c.splits == 0 ? c.out : DType::f32, false, c.latent};
  return {.name = str_cat(c.latent ? "latent " : "",
                          c.splits == 0 ? "attention " : "attention_partial ", c.k, "/", c.v, " ",
                          c.name),
          .supported = [types](const Device& device) { return supports(device, types); },
          .make = [c] { return make_run(c, Contents::random); },
          .only_with = c.only_with,
          .outline = [c] { return make_run(c, Contents::none); }};
}

}  // namespace gyre::test
