#include "rope_append/rope_append_case.h"

#include <cstring>
#include <random>
#include <stdexcept>

#include "abi/rope_append.h"
#include "ops/cache_ops.h"
#include "pages/page_memory.h"
#include "rope/rope_reference.h"

namespace gyre::test {
namespace {

using reference::KvSide;

constexpr KvLayout kCacheLayout = KvLayout::head_major;
constexpr uint64_t kPages = 4, kPageTokens = 16;

// Blocks of a run, in this order; pages or the two halves of a cache follow.
enum At : size_t {
  kQ,
  kQOut,
  kK,
  kV,
  kPositions,
  kFrequencies,
  kFactors,
  kQWeight,
  kKWeight,
  kWhere,
  kMemory
};

KvShape row_shape(const RopeAppendCase& c, KvRole role, uint64_t slots) {
  const bool v = role == KvRole::v;
  return {v ? c.v : c.k, role, c.kv_heads, slots, v ? c.v_dim : c.k_dim};
}

KvSide side_of(const RopeAppendCase& c, At at) {
  const bool is_q = at == kQ || at == kQOut;
  return {c.dtype, c.layout, c.tokens, is_q ? c.heads : c.kv_heads, at == kV ? c.v_dim : c.k_dim,
          0};
}

// What the options make of a head, in exact arithmetic.
class Rotation {
 public:
  Rotation(const RopeAppendCase& c, std::mt19937& random) : c_(c) {
    const uint32_t axes = c.rotates ? reference::rope_axes(c.options.mode) : 1;
    for (uint64_t i = 0; i < axes * c.tokens; ++i)
      positions_.push_back(static_cast<int32_t>(random() % 4096) - 2048);
    for (uint64_t p = 0; p < pairs(); ++p) {
      // Quarter turns per position. Divided by a half, an eighth is one.
      const bool half = c.factors && p % 3 == 1;
      quarters_.push_back(half ? 1 : static_cast<uint32_t>(random() % (c.factors ? 2 : 4)));
      factors_.push_back(half ? 0.5f : 1.0f);
    }
    for (std::vector<float>& weight : weights_) {
      for (uint64_t e = 0; e < c.k_dim; ++e)
        weight.push_back(std::ldexp(1.0f, static_cast<int>(random() % 3) - 1));
    }
  }

  static constexpr float kOffset = 1.0f;
  const std::vector<int32_t>& positions() const { return positions_; }
  const std::vector<float>& factors() const { return factors_; }
  // As models store them: less 1.
  std::vector<float> stored_weight(uint32_t stream) const {
    std::vector<float> stored = weights_[stream];
    for (float& w : stored) w -= kOffset;
    return stored;
  }
  // 64-bit fractions of a turn, low words first.
  std::vector<uint32_t> table() const {
    std::vector<uint32_t> words;
    for (uint64_t p = 0; p < pairs(); ++p) {
      words.push_back(0);
      words.push_back(quarters_[p] << (factors_[p] == 1 ? 30 : 29));
    }
    return words;
  }

  std::vector<float> head(std::vector<float> x, uint64_t token, uint32_t stream) const {
    if (c_.norm) {
      for (uint64_t e = 0; e < c_.k_dim; ++e)
        x[e] *= 0.5f * (c_.weights ? weights_[stream][e] : 1.0f);  // all are +-2
    }
    for (uint64_t p = 0; p < pairs(); ++p) {
      const reference::RopePair pair = reference::rope_pair(c_.options, c_.k_dim, p);
      const uint64_t axis = reference::rope_axis(c_.options, c_.k_dim, p);
      const auto turn =
          static_cast<uint32_t>(positions_[axis * c_.tokens + token]) * quarters_[p] & 3;
      const float u = x[pair.u], v = x[pair.v], m = c_.options.magnitude;
      const float all[4][2] = {{u, v}, {-v, u}, {-u, -v}, {v, -u}};
      x[pair.u] = all[turn][0] * m, x[pair.v] = all[turn][1] * m;
    }
    return x;
  }

 private:
  uint64_t pairs() const { return c_.rotates ? reference::rope_pairs(c_.options, c_.k_dim) : 0; }

  const RopeAppendCase& c_;
  std::vector<int32_t> positions_;
  std::vector<uint32_t> quarters_;
  std::vector<float> factors_;
  std::vector<float> weights_[2];  // of q, of k
};

// No zeros: their sign would be in doubt. mlx-native formats' norms must not be rounded.
std::vector<float> draw_row(const RopeAppendCase& c, At at, std::mt19937& random) {
  const KvFormat format = at == kV ? c.v : c.k;
  std::normal_distribution<float> normal;
  std::vector<float> row(side_of(c, at).head_dim);
  for (float& x : row) {
    const float sign = random() % 2 == 0 ? 1.0f : -1.0f;
    do {
      x = class_of(format) == FormatClass::mlx_native ? sign * static_cast<float>(1 + random() % 6)
                                                      : normal(random);
      if (c.norm && at != kV) x = 2 * sign;
      x = reference::rounded(c.dtype, x);
    } while (x == 0);
  }
  return row;
}

class Run {
 public:
  explicit Run(const RopeAppendCase& c) : c_(c), random_(random_of(c.name)), rotation_(c, random_) {
    blocks_.resize(kMemory);
    fill_inputs();
    draw_queries();
    if (c.paged()) {
      fill_pages();
    } else {
      fill_cache();
    }
  }

  std::vector<Block> take() { return std::move(blocks_); }

 private:
  void fill_inputs() {
    for (const At at : {kQ, kQOut, kK, kV}) {
      const KvSide side = side_of(c_, at);
      blocks_[at] = plain_block(c_.dtype, pattern_bytes(side.elements() * size_bytes(c_.dtype), 5));
    }
    blocks_[kPositions] = plain_block(DType::i32, rotation_.positions());
    blocks_[kFrequencies] = plain_block(DType::u32, rotation_.table());
    blocks_[kFactors] = plain_block(DType::f32, rotation_.factors());
    blocks_[kQWeight] = plain_block(DType::f32, rotation_.stored_weight(0));
    blocks_[kKWeight] = plain_block(DType::f32, rotation_.stored_weight(1));
  }

  void put(At at, uint64_t token, uint64_t head, const std::vector<float>& row, bool result) {
    const KvSide side = side_of(c_, at);
    reference::store_row(side, blocks_[at].after, token, head, row);
    if (!result) reference::store_row(side, blocks_[at].before, token, head, row);
  }

  void draw_queries() {
    const At out = c_.in_place ? kQ : kQOut;
    for (uint64_t t = 0; t < c_.tokens; ++t) {
      for (uint64_t h = 0; h < c_.heads; ++h) {
        const std::vector<float> row = draw_row(c_, kQ, random_);
        put(kQ, t, h, row, false);
        put(out, t, h, rotation_.head(row, t, 0), true);
      }
    }
  }

  // What must be stored for a token; its source is put where it belongs.
  std::vector<float> stored_row(KvRole role, uint64_t token, uint64_t head) {
    const At at = role == KvRole::k ? kK : kV;
    const KvShape shape = row_shape(c_, role, 8);
    for (int i = 0; i < 1000; ++i) {
      const std::vector<float> row = draw_row(c_, at, random_);
      std::vector<float> stored = role == KvRole::k ? rotation_.head(row, token, 1) : row;
      if (!has_codes(shape, stored)) continue;
      put(at, token, head, row, false);
      return stored;
    }
    throw std::logic_error("no row whose codes are certain");
  }

  template <class Store>
  void store_rows(KvRole role, const Store& store) {
    for (uint64_t t = 0; t < c_.tokens; ++t) {
      for (uint64_t h = 0; h < c_.kv_heads; ++h) store(t, h, stored_row(role, t, h));
    }
  }

  void fill_pages() {
    blocks_[kWhere] = slot_block(c_.slot_type, c_.slots);
    PageMemory memory({c_.k, c_.v, c_.kv_heads, c_.k_dim, c_.v_dim, kPageTokens}, kPages, 48);
    Block pages = plain_block(DType::u8, memory.bytes());
    pages.aligned = true;
    for (const KvRole role : {KvRole::k, KvRole::v}) {
      store_rows(role, [&](uint64_t t, uint64_t h, const std::vector<float>& row) {
        const int64_t slot = c_.slots[t];
        if (slot >= 0 && static_cast<uint64_t>(slot) < kPages * kPageTokens)
          memory.write(role, static_cast<uint64_t>(slot), h, row);
      });
    }
    pages.after = memory.bytes();
    blocks_.push_back(std::move(pages));
  }

  void fill_cache() {
    const uint64_t end = c_.start + c_.tokens;
    const abi::KvState state{c_.start, end + c_.unseen, 0};
    blocks_[kWhere] = plain_block(DType::u8, std::vector{state});
    blocks_[kWhere].aligned = true;  // as every cache has its state
    for (const KvRole role : {KvRole::k, KvRole::v}) fill_half(role);
  }

  void fill_half(KvRole role) {
    const uint64_t tail_slots = c_.tail == 0 ? 0 : c_.tail + c_.tokens;
    KvShape body = row_shape(c_, role, c_.body), sink_tokens = body, tail = body;
    sink_tokens.format = tail.format = KvFormat::f16;
    sink_tokens.capacity = c_.sink_tokens, tail.capacity = tail_slots;
    KvMemory of_body = kv_memory(body, kCacheLayout),
             of_sinks = kv_memory(sink_tokens, kCacheLayout),
             of_tail = kv_memory(tail, kCacheLayout);
    store_rows(role, [&](uint64_t t, uint64_t h, const std::vector<float>& row) {
      const uint64_t key = c_.start + t;
      if (key < c_.sink_tokens)
        return expect_kv_row(sink_tokens, kCacheLayout, {key, h}, row, of_sinks);
      expect_kv_row(body, kCacheLayout, {(key - c_.sink_tokens) % c_.body, h}, row, of_body);
      if (tail_slots != 0) expect_kv_row(tail, kCacheLayout, {key % tail_slots, h}, row, of_tail);
    });
    Block near = plain_block(DType::f16, of_sinks.codes.before);
    near.after = of_sinks.codes.after;
    near.before.insert(near.before.end(), of_tail.codes.before.begin(), of_tail.codes.before.end());
    near.after.insert(near.after.end(), of_tail.codes.after.begin(), of_tail.codes.after.end());
    of_body.codes.aligned = of_body.scales.aligned = true;  // as every cache has them
    blocks_.push_back(std::move(of_body.codes));
    blocks_.push_back(std::move(of_body.scales));
    blocks_.push_back(std::move(near));
  }

  const RopeAppendCase& c_;
  std::mt19937 random_;
  Rotation rotation_;
  std::vector<Block> blocks_;
};

RopeAppendInputs inputs_of(const RopeAppendCase& c, std::span<const Tensor> t) {
  RopeAppendInputs in{.k = kv_view(t[kK], side_of(c, kK)), .v = kv_view(t[kV], side_of(c, kV))};
  if (c.heads != 0) {
    in.q = kv_view(t[kQ], side_of(c, kQ));
    in.q_out = c.in_place ? in.q : kv_view(t[kQOut], side_of(c, kQOut));
  }
  if (c.norm && c.weights) {
    in.k_weight = t[kKWeight];
    if (c.heads != 0) in.q_weight = t[kQWeight];
  }
  if (!c.rotates) return in;
  const uint64_t axes = reference::rope_axes(c.options.mode);
  in.positions = axes == 1 ? t[kPositions] : t[kPositions].reshape({axes, c.tokens});
  in.frequencies = t[kFrequencies].reshape({t[kFrequencies].elements() / 2, 2});
  if (c.factors) in.factors = t[kFactors];
  return in;
}

void record(const RopeAppendCase& c, Encoder& encoder, std::span<const Tensor> t) {
  RopeAppendOptions options;
  options.rope = c.rotates ? std::optional(c.options) : std::nullopt;
  if (c.norm) options.norm = gyre::RopeNorm{.epsilon = 0, .weight_offset = Rotation::kOffset};
  const RopeAppendInputs in = inputs_of(c, t);
  if (c.paged()) {
    const PageMemory memory({c.k, c.v, c.kv_heads, c.k_dim, c.v_dim, kPageTokens}, kPages, 48);
    return rope_append(encoder, in, {pages_of(memory, t[kMemory]), t[kWhere]}, options);
  }
  const abi::KvPlaces places{c.sink_tokens, c.tail, c.tail == 0 ? 0 : c.tail + c.tokens, c.body};
  CacheSegments segments;
  segments.of[0] = {
      kv_buffer(row_shape(c, KvRole::k, c.body), kCacheLayout, t[kMemory], t[kMemory + 1]),
      kv_buffer(row_shape(c, KvRole::v, c.body), kCacheLayout, t[kMemory + 3], t[kMemory + 4]),
      {t[kWhere], places, abi::kSegmentBody}};
  if (c.sink_tokens != 0 || c.tail != 0) add_f16(segments, t[kMemory + 2], t[kMemory + 5]);
  rope_append_cache(encoder, in, options, segments);
}

}  // namespace

OpCase make_case(const RopeAppendCase& numbers) {
  return kernel_case("rope_append", numbers.name, [numbers] {
    OpRun run;
    run.blocks = Run(numbers).take();
    const abi::KvRowShape rows{static_cast<uint32_t>(numbers.k), static_cast<uint32_t>(numbers.v),
                               numbers.k_dim, numbers.v_dim};
    if (numbers.tokens > abi::kRopeFewTokens || abi::kv_lane_quads(rows) == 0) run.commands = {};
    run.record = [numbers](Encoder& encoder, std::span<const Tensor> t) {
      record(numbers, encoder, t);
    };
    return run;
  });
}

}  // namespace gyre::test
