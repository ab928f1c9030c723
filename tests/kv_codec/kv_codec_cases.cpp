
#include "gyre_test.h"
#include "kv_codec/kv_codec_case.h"

namespace gyre::test {
namespace {

constexpr uint64_t kHeadDims = std::size(kCodecHeadDims);

std::string text(const KvStream& stream) { return str_cat(stream.format, "/", stream.head_dim); }

KvFormat native(uint64_t index) { return format_of(FormatClass::levels, index); }

// Both streams, of formats and head dims that walk through all pairs.
KvQuantizeCase slot_case(uint64_t capacity, CacheKind kind, uint64_t position, uint64_t tokens) {
  KvQuantizeCase c{.source_tokens = tokens, .capacity = capacity};
  const uint64_t i = position + tokens;
  c.k = {native(i), i % 2 == 0 ? 16u : 24u};
  c.v = KvStream{native(i + position), i % 2 == 0 ? 24u : 16u};
  c.heads = 1 + i % 2;
  c.layout = kPlainLayouts[i % 2];
  c.options = {.position = position, .cache = kind};
  c.name = str_cat(kind == CacheKind::ring ? "ring" : "linear", " capacity ", capacity,
                   " position ", position, " tokens ", tokens, " ", text(*c.k), " ", text(*c.v));
  return c;
}

}  // namespace

// Every format in either role at every head_dim from every dtype and layout; rows of every kind. V
// rides with a K of another format and head_dim.
std::vector<KvQuantizeCase> kv_format_cases() {
  std::vector<KvQuantizeCase> cases;
  constexpr KvValues kKinds[] = {KvValues::everyday, KvValues::extreme, KvValues::ties};
  for (uint64_t f = 0; f < native_formats().size(); ++f) {
    for (uint64_t d = 0; d < kHeadDims; ++d) {
      for (uint64_t i = 0; i < 9; ++i) {
        KvQuantizeCase c;
        c.source = kFloats[i % 3];
        c.values = kKinds[i / 3];
        c.layout = (i + d) % 3 == 2 ? KvLayout::padded : kPlainLayouts[(i + d) % 3];
        c.k = {native(f), kCodecHeadDims[d]};
        c.v = KvStream{native(f + i), kCodecHeadDims[(d + i) % kHeadDims]};
        c.options.position = 3 + i % 2;
        if (c.values == KvValues::extreme) c.source_tokens = 10, c.capacity = 14;
        c.name = str_cat(text(*c.k), " ", text(*c.v), " from ", c.source, " ",
                         layout_name(c.layout), " values ", i / 3);
        cases.push_back(c);
      }
    }
  }
  return cases;
}

// The order of every sum, at every size of a scale block, and where V's factor comes in.
std::vector<KvQuantizeCase> kv_scale_edge_cases() {
  std::vector<KvQuantizeCase> cases;
  for (const uint64_t head_dim : {16u, 24u, 32u, 64u, 128u, 256u, 512u, 1024u}) {
    for (const KvFormat format : {KvFormat::tq4, KvFormat::tq8}) {
      KvQuantizeCase c{.source_tokens = 16, .capacity = 16, .heads = 1};
      c.k = c.v = {format, head_dim};
      c.values = KvValues::scale_edges;
      c.name = text(*c.k) + " at the edges of scales";
      cases.push_back(c);
    }
  }
  return cases;
}

// K alone, V alone, and every pair of formats.
std::vector<KvQuantizeCase> kv_pair_cases() {
  std::vector<KvQuantizeCase> cases;
  for (const KvFormat k : native_formats()) {
    for (const DType source : kFloats) {
      for (const KvLayout layout : kPlainLayouts) {
        for (const bool v_alone : {false, true}) {
          KvQuantizeCase c{.source = source, .layout = layout};
          const KvStream stream{k, source == DType::f16 ? 128u : 80u};
          c.k = v_alone ? std::nullopt : std::optional(stream);
          c.v = v_alone ? std::optional(stream) : std::nullopt;
          c.options.position = 2;
          c.name = str_cat(text(stream), v_alone ? " V" : " K", " alone from ", source, " ",
                           layout_name(layout));
          cases.push_back(c);
        }
      }
    }
    for (const KvFormat v : native_formats()) {
      KvQuantizeCase c;
      c.k = {k, 64};
      c.v = KvStream{v, 128};
      c.options = {.position = 7, .cache = CacheKind::ring};
      c.name = text(*c.k) + " with " + text(*c.v);
      cases.push_back(c);
    }
  }
  return cases;
}

// Every position and count on caches around the tile size. Rings take up to twice their slots, and
// positions that do not fit 32 bits.
std::vector<KvQuantizeCase> kv_slot_cases() {
  std::vector<KvQuantizeCase> cases;
  for (const uint64_t capacity : {1u, 7u, 8u, 9u, 16u, 33u}) {
    for (uint64_t position = 0; position < capacity; ++position) {
      for (uint64_t tokens = 1; tokens <= capacity - position; ++tokens)
        cases.push_back(slot_case(capacity, CacheKind::linear, position, tokens));
      for (uint64_t tokens = 1; tokens <= 2 * capacity + 1; ++tokens) {
        const bool around = tokens % 8 <= 1 || tokens % 8 == 7 || tokens <= 9;
        if (position + tokens <= capacity || (capacity == 33 && !around)) continue;
        cases.push_back(slot_case(capacity, CacheKind::ring, position, tokens));
      }
    }
    cases.push_back(slot_case(capacity, CacheKind::ring, ~uint64_t{0}, 5));
  }
  return cases;
}

// Parts of the source, nothing at all, and calls that are cut into many tasks.
std::vector<KvQuantizeCase> kv_codec_range_cases() {
  std::vector<KvQuantizeCase> cases;
  for (uint64_t begin = 0; begin <= 5; ++begin) {
    for (uint64_t tokens = 0; tokens <= 5 - begin; ++tokens) {
      KvQuantizeCase c;
      c.k = {KvFormat::tq3, 40};
      c.v = KvStream{KvFormat::tq6, 24};
      c.layout = kPlainLayouts[begin % 2];
      c.options = {.position = 3, .source_begin = begin, .tokens = tokens};
      c.name = str_cat("begin ", begin, " tokens ", tokens);
      cases.push_back(c);
    }
  }
  cases.push_back({.name = "no heads", .heads = 0});
  for (const KvFormat format : native_formats()) {
    KvQuantizeCase c{.source_tokens = 70, .capacity = 61, .heads = 3};
    c.k = {format, 128};
    c.v = KvStream{format, 192};
    c.options = {.position = 50, .cache = CacheKind::ring};
    c.name = "many tasks " + text(*c.k);
    cases.push_back(c);
  }
  return cases;
}

// Every format, role, head_dim, output dtype and domain; rows of every kind.
std::vector<KvDequantizeCase> kv_decode_cases() {
  std::vector<KvDequantizeCase> cases;
  for (const KvFormat format : native_formats()) {
    for (const uint64_t head_dim : kCodecHeadDims) {
      for (uint64_t i = 0; i < 12; ++i) {
        KvDequantizeCase c{.out = kFloats[i % 3], .capacity = 12, .tokens = 10};
        c.role = i / 3 % 2 == 0 ? KvRole::k : KvRole::v;
        c.options.domain = i / 6 == 0 ? KvDomain::restored : KvDomain::rotated;
        c.options.first_slot = 2;
        c.layout = i % 4 == 3 ? KvLayout::padded : kPlainLayouts[i % 2];
        c.values = i % 5 == 0 ? KvValues::extreme : KvValues::everyday;
        c.stream = {format, head_dim};
        c.name = str_cat(text(c.stream), c.role == KvRole::k ? " k" : " v", " to ", c.out,
                         i / 6 == 0 ? " restored" : " rotated");
        cases.push_back(c);
      }
    }
  }
  return cases;
}

// Every range of slots.
std::vector<KvDequantizeCase> kv_decode_slot_cases() {
  std::vector<KvDequantizeCase> cases;
  for (const uint64_t capacity : {1u, 9u, 19u}) {
    for (uint64_t first = 0; first <= capacity; ++first) {
      for (uint64_t tokens = 0; tokens <= capacity - first; ++tokens) {
        KvDequantizeCase c{.capacity = capacity, .tokens = tokens};
        c.role = (first + tokens) % 2 == 0 ? KvRole::k : KvRole::v;
        c.stream = {native(first + tokens / 2), 24};
        c.options = {.first_slot = first, .domain = KvDomain::rotated};
        c.name = str_cat("capacity ", capacity, " first ", first, " tokens ", tokens, " ",
                         text(c.stream));
        cases.push_back(c);
      }
    }
  }
  return cases;
}

// Rows that only devices with subnormals tell from zeros.
std::vector<KvQuantizeCase> kv_feedback_subnormal_cases() {
  std::vector<KvQuantizeCase> cases;
  for (const KvFormat format : native_formats()) {
    for (const uint64_t head_dim : {24u, 80u, 128u, 576u}) {
      KvQuantizeCase c{.values = KvValues::subnormal};
      c.k = c.v = {format, head_dim};
      c.name = "subnormal " + text(*c.k);
      cases.push_back(c);
    }
  }
  return cases;
}

// Levels times scales that f32 cannot hold: the product is rounded once.
std::vector<KvDequantizeCase> kv_decode_subnormal_cases() {
  std::vector<KvDequantizeCase> cases;
  for (const KvFormat format : native_formats()) {
    for (const KvRole role : {KvRole::k, KvRole::v}) {
      KvDequantizeCase c{.role = role, .stream = {format, 80}};
      c.options.domain = KvDomain::rotated;
      c.values = KvValues::subnormal;
      c.name = "subnormal " + text(c.stream) + (role == KvRole::k ? " k" : " v");
      cases.push_back(c);
    }
  }
  return cases;
}

std::vector<OpCase> kv_quantize_cases() {
  std::vector<OpCase> cases = make_cases<KvQuantizeCase>(
      {kv_format_cases(), kv_scale_edge_cases(), kv_pair_cases(), kv_slot_cases(),
       kv_codec_range_cases(), kv_feedback_subnormal_cases()});
  for (OpCase& c : kv_mlx_native_quantize_cases()) cases.push_back(std::move(c));
  return cases;
}

std::vector<OpCase> kv_dequantize_cases() {
  std::vector<OpCase> cases = make_cases<KvDequantizeCase>(
      {kv_decode_cases(), kv_decode_slot_cases(), kv_decode_subnormal_cases()});
  for (OpCase& c : kv_mlx_native_dequantize_cases()) cases.push_back(std::move(c));
  return cases;
}

}  // namespace gyre::test
