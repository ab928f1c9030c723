
#include "gyre_test.h"
#include "kv_copy/kv_copy_case.h"
#include "rounding.h"

namespace gyre::test {
namespace {

std::string types_text(DType source, DType cache) { return str_cat(source, "_to_", cache); }

struct Conversion {
  DType source, cache;
  const std::vector<uint32_t>& (*bits)();
};

const std::vector<uint32_t>& around_f16() {
  static const std::vector<uint32_t> bits = rounding_boundaries(DType::f16);
  return bits;
}
const std::vector<uint32_t>& around_bf16() {
  static const std::vector<uint32_t> bits = rounding_boundaries(DType::bf16);
  return bits;
}
const std::vector<uint32_t>& any_16_bits() {
  static const std::vector<uint32_t> bits = all_16_bit_patterns();
  return bits;
}

constexpr Conversion kConversions[] = {
    {DType::f32, DType::f32, around_f16},    {DType::f32, DType::f16, around_f16},
    {DType::f32, DType::bf16, around_bf16},  {DType::f16, DType::f32, any_16_bits},
    {DType::f16, DType::f16, any_16_bits},   {DType::f16, DType::bf16, any_16_bits},
    {DType::bf16, DType::f32, any_16_bits},  {DType::bf16, DType::f16, any_16_bits},
    {DType::bf16, DType::bf16, any_16_bits},
};

KvCopyCase conversion_case(const Conversion& conversion, uint64_t row) {
  const auto& [source, cache, bits] = conversion;
  const uint64_t tokens = (bits().size() + row - 1) / row;
  return {.name = str_cat("every ", types_text(source, cache), " rows of ", row),
          .source = source,
          .cache = cache,
          // Padding keeps the rows apart, however a kernel joins what lies side by side.
          .cache_layout = KvLayout::padded,
          .source_tokens = tokens,
          .capacity = tokens,
          .heads = 1,
          .k_dim = row,
          .source_bits = bits};
}

}  // namespace

// Every pair of dtypes with every layout, K alone and with V, linear and ring.
std::vector<KvCopyCase> kv_layout_cases() {
  std::vector<KvCopyCase> cases;
  for (int i = 0; i < 9 * 16; ++i) {
    KvCopyCase c;
    c.source = kFloats[i / 16 / 3];
    c.cache = kFloats[i / 16 % 3];
    c.source_layout = kPlainLayouts[i & 1];
    c.cache_layout = kPlainLayouts[i >> 1 & 1];
    if ((i & 4) != 0) c.v_dim = 8;
    c.options.cache = (i & 8) != 0 ? CacheKind::ring : CacheKind::linear;
    c.options.position = (i & 8) != 0 ? 7 : 4;
    c.name = str_cat(types_text(c.source, c.cache), " ", layout_name(c.source_layout), " to ",
                     layout_name(c.cache_layout), c.v_dim ? " k+v" : " k",
                     (i & 8) != 0 ? " ring" : " linear");
    cases.push_back(c);
  }
  // Rows of every length that a vector loop or its tail may get wrong, V of another length than K.
  constexpr uint64_t kHeadDims[] = {1, 3, 8, 64, 80, 128, 257, 576};
  for (const DType source : kFloats) {
    for (const DType cache : kFloats) {
      for (size_t i = 0; i < std::size(kHeadDims); ++i) {
        KvCopyCase c{.source = source, .cache = cache, .k_dim = kHeadDims[i]};
        c.v_dim = kHeadDims[(i + 3) % std::size(kHeadDims)];
        c.source_layout = kPlainLayouts[i & 1];
        c.cache_layout = kPlainLayouts[i >> 1 & 1];
        c.options.position = 2;
        c.name = str_cat(types_text(source, cache), " k_dim ", c.k_dim, " v_dim ", *c.v_dim);
        cases.push_back(c);
      }
    }
  }
  // K and V in one buffer, and rows with gaps that must survive.
  for (const KvLayout source : {KvLayout::token_major, KvLayout::interleaved, KvLayout::padded}) {
    for (const KvLayout cache : {KvLayout::head_major, KvLayout::interleaved, KvLayout::padded}) {
      KvCopyCase c{.source_layout = source, .cache_layout = cache};
      c.v_dim = c.k_dim;
      c.options = {.position = 6, .cache = CacheKind::ring};
      c.name = layout_name(source) + " to " + layout_name(cache);
      cases.push_back(c);
    }
  }
  // V behind K in every row of one buffer, the two of different length.
  for (const KvLayout source : {KvLayout::token_major, KvLayout::packed}) {
    for (const auto& [k_dim, v_dim] : {std::pair{64u, 32u}, {3u, 8u}, {16u, 16u}}) {
      KvCopyCase c{.source_layout = source, .cache_layout = KvLayout::packed};
      c.k_dim = k_dim, c.v_dim = v_dim;
      c.options = {.position = 6, .cache = CacheKind::ring};
      c.name = str_cat(layout_name(source), " to packed k_dim ", k_dim, " v_dim ", v_dim);
      cases.push_back(c);
    }
  }
  return cases;
}

// Parts of the source, and calls large enough to be cut into many tasks.
std::vector<KvCopyCase> kv_range_cases() {
  std::vector<KvCopyCase> cases;
  // More heads than a grid has groups for.
  cases.push_back({.name = "5000 heads", .source_tokens = 2, .heads = 5000, .k_dim = 1});
  for (uint64_t begin = 0; begin <= 5; ++begin) {
    for (uint64_t tokens = 0; tokens <= 5 - begin; ++tokens) {
      for (const KvLayout layout : kPlainLayouts) {
        cases.push_back(
            {.name = str_cat("from ", layout_name(layout), " begin ", begin, " tokens ", tokens),
             .source_layout = layout,
             .v_dim = 4,
             .options = {.position = 3, .source_begin = begin, .tokens = tokens}});
      }
    }
    cases.push_back({.name = str_cat("all from ", begin), .options = {.source_begin = begin}});
  }
  for (const uint64_t capacity : {1u, 2u, 7u}) {
    for (uint64_t position = 0; position <= capacity; ++position) {
      for (uint64_t tokens = 0; tokens <= capacity - position; ++tokens) {
        cases.push_back(
            {.name = str_cat("linear cache of ", capacity, " at ", position, " tokens ", tokens),
             .source_tokens = tokens,
             .capacity = capacity,
             .options = {.position = position}});
      }
    }
  }
  for (const DType cache : kFloats) {
    for (const KvLayout source : kPlainLayouts) {
      for (const KvLayout layout : kPlainLayouts) {
        KvCopyCase c{.cache = cache, .source_layout = source, .cache_layout = layout};
        c.name = str_cat("large ", layout_name(source), " to ", layout_name(layout), " ", cache);
        c.source_tokens = 97, c.capacity = 101;
        c.heads = 5, c.k_dim = 128, c.v_dim = 64;
        c.options = {.position = 50, .cache = CacheKind::ring};
        cases.push_back(c);
      }
    }
  }
  return cases;
}

// Row lengths: below every vector; pairs of vectors, one vector and a tail on targets of 4, 8 and
// 16 lanes; long.
std::vector<KvCopyCase> kv_conversion_cases() {
  std::vector<KvCopyCase> cases;
  for (const uint64_t row : {3u, 28u, 1024u}) {
    for (const Conversion& conversion : kConversions)
      cases.push_back(conversion_case(conversion, row));
  }
  return cases;
}

// The last token to reach a slot stays, for every position and count.
std::vector<KvCopyCase> kv_ring_cases() {
  std::vector<KvCopyCase> cases;
  for (const uint64_t capacity : {1u, 2u, 7u, 32u, 33u}) {
    for (uint64_t position = 0; position < capacity; ++position) {
      for (uint64_t tokens = 0; tokens <= 2 * capacity + 1; ++tokens) {
        KvCopyCase c{.source_tokens = tokens, .capacity = capacity, .heads = 2, .k_dim = 3};
        c.name = str_cat("ring of ", capacity, " at ", position, " tokens ", tokens);
        c.cache_layout = kPlainLayouts[tokens & 1];
        if (position % 3 == 0) c.v_dim = 2;
        // Whole turns of the ring make no difference.
        c.options = {.position = position + capacity * (tokens % 5) * 1000003,
                     .cache = CacheKind::ring};
        cases.push_back(c);
      }
    }
  }
  for (uint64_t back = 1; back <= 9; ++back) {
    for (const uint64_t tokens : {1u, 6u, 7u, 8u, 20u}) {
      cases.push_back({.name = str_cat("ring of 7 at 2^64 - ", back, " tokens ", tokens),
                       .source_tokens = tokens,
                       .capacity = 7,
                       .options = {.position = uint64_t{0} - back, .cache = CacheKind::ring}});
    }
  }
  return cases;
}

// Nothing to copy: nothing is recorded, wherever the position points.
std::vector<KvCopyCase> kv_empty_cases() {
  std::vector<KvCopyCase> cases;
  const auto add = [&](const char* text, const auto& change) {
    for (const bool pair : {false, true}) {
      for (const CacheKind kind : {CacheKind::linear, CacheKind::ring}) {
        KvCopyCase c;
        if (pair) c.v_dim = 4;
        c.options.cache = kind;
        change(c);
        c.name = str_cat("empty: ", text, pair ? " k+v" : " k",
                         kind == CacheKind::ring ? " ring" : " linear");
        cases.push_back(c);
      }
    }
  };
  add("source without tokens", [](KvCopyCase& c) { c.source_tokens = 0; });
  add("no tokens asked for", [](KvCopyCase& c) { c.options.tokens = 0; });
  add("source_begin at the end", [](KvCopyCase& c) { c.options.source_begin = c.source_tokens; });
  add("no heads", [](KvCopyCase& c) { c.heads = 0; });
  add("no coordinates", [](KvCopyCase& c) {
    c.k_dim = 0;
    if (c.v_dim) c.v_dim = 0;
  });
  add("no tokens, no slots", [](KvCopyCase& c) { c.source_tokens = c.capacity = 0; });
  add("no tokens past the end", [](KvCopyCase& c) {
    c.source_tokens = 0;
    c.options.position = ~uint64_t{0};
  });
  // Only one of the two has coordinates: the other is still copied.
  cases.push_back({.name = "k without coordinates", .k_dim = 0, .v_dim = 8});
  cases.push_back({.name = "v without coordinates", .v_dim = 0});
  return cases;
}

}  // namespace gyre::test
