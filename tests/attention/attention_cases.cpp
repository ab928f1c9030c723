// attention and attention_partial for any shape; attention_decode_cases.cpp has those for few rows.
#include "attention/attention_op_case.h"
#include "kv_codec/kv_codec_case.h"

namespace gyre::test {
namespace {

struct Pair {
  KvFormat k, v;
};

constexpr Pair kPairs[] = {{KvFormat::f32, KvFormat::f32},   {KvFormat::f16, KvFormat::f16},
                           {KvFormat::bf16, KvFormat::bf16}, {KvFormat::tq8, KvFormat::tq8},
                           {KvFormat::tq4, KvFormat::tq4},   {KvFormat::tq8, KvFormat::f32},
                           {KvFormat::f32, KvFormat::tq4}};

// Every pair of classes, with formats that change from case to case.
template <class Add>
void for_each_class_pair(const Add& add) {
  size_t index = 0;
  for (const FormatClass k : kFormatClasses) {
    for (const FormatClass v : kFormatClasses) add(k, v, index++);
  }
}

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
    c.name = str_cat("q ", c.q, " ", layout_name(c.q_layout), ", out ", c.out, " ",
                     layout_name(c.out_layout), ", cache ", layout_name(c.cache_layout));
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
  add("sink_logits", {.sink_logits = true});
  add("alibi_slopes", {.alibi_slopes = true});
  add("soft cap", {.soft_cap = 1.5f});
  add("tree_mask", {.tokens = 5, .tree_mask = true});
  add("window", {.window = 17});
  add("window of one", {.tokens = 7, .window = 1});
  add("not causal", {.tokens = 5, .causal = false});
  add("more queries than keys", {.tokens = 6, .length = 4, .sink_logits = true});
  add("nothing in the cache", {.length = 0});
  add("no slots", {.length = 0, .capacity = 0, .ring_start = 0});
  add("nothing but sink_logits", {.length = 0, .sink_logits = true});
  add("no queries", {.tokens = 0, .commands = 0});
  add("one query", {.tokens = 1, .length = 75});
  add("many queries", {.tokens = 37});
  add("many queries, everything", {.tokens = 37,
                                   .window = 30,
                                   .soft_cap = 2,
                                   .sink_logits = true,
                                   .alibi_slopes = true,
                                   .tree_mask = true});
  add("few queries, everything", {.tokens = 5,
                                  .window = 30,
                                  .soft_cap = 2,
                                  .sink_logits = true,
                                  .alibi_slopes = true,
                                  .tree_mask = true});
}

// Long enough for two splits, which are merged.
void add_split_cases(std::vector<OpCase>& cases) {
  for_each_class_pair([&](FormatClass k, FormatClass v, size_t i) {
    AttentionOpCase c{
        .name = "two splits", .k = format_of(k, i), .v = format_of(v, i / 5), .tokens = 1};
    c.k_dim = k == FormatClass::mlx_native ? 256 : 16;
    c.v_dim = v == FormatClass::mlx_native ? 256 : 16;
    c.length = 1100;
    c.capacity = 1101;
    c.sink_logits = true;
    c.commands = {};  // the kernel merges, or a second command
    cases.push_back(make_case(c));
  });
}

// Short enough for one split on any device.
void add_short_cases(std::vector<OpCase>& cases) {
  for_each_class_pair([&](FormatClass k, FormatClass v, size_t i) {
    AttentionOpCase c{.name = "one split", .k = format_of(k, i), .v = format_of(v, i / 5)};
    c.tokens = 1 + i % 3;
    c.k_dim = k == FormatClass::mlx_native ? 256 : 40;
    c.v_dim = v == FormatClass::mlx_native ? 256 : 24;
    cases.push_back(make_case(c));
  });
}

// K and V of one size: every pair of classes at every size, over rows, masks and dtypes that change
// from case to case.
void add_shape_cases(std::vector<OpCase>& cases) {
  constexpr uint64_t kGroups[] = {1, 6, 4, 7, 12, 3, 16, 2};
  constexpr uint64_t kTokens[] = {1, 2, 1, 1, 1, 5, 1, 8, 20};
  size_t i = 0;
  for (const uint64_t dim : {64u, 80u, 96u, 128u, 192u, 256u, 512u, 1024u}) {
    for_each_class_pair([&](FormatClass k, FormatClass v, size_t pair) {
      ++i;
      AttentionOpCase c{.k = format_of(k, i), .v = format_of(v, i + pair / 5)};
      // At 1024 mlx_native4 is the only mlx-native format.
      if (dim == 1024 && k == FormatClass::mlx_native) c.k = KvFormat::mlx_native4;
      if (dim == 1024 && v == FormatClass::mlx_native) c.v = KvFormat::mlx_native4;
      if (!stores(c.k, dim) || !stores(c.v, dim)) return;
      if (dim == 512) c.scale_factor = i % 3 == 0 ? 1 : 0.8f;
      c.q = kFloats[i % 3];
      c.out = kFloats[i / 3 % 3];
      c.tokens = kTokens[i % 9];
      c.kv_heads = 1 + i % 2;
      c.heads = c.kv_heads * kGroups[i % 8];
      c.k_dim = c.v_dim = dim;
      c.length = 70 + 11 * (i % 13);
      c.capacity = c.length + i % 4;
      c.ring_start = i % 3 == 0 ? 0 : c.capacity / 3;
      c.window = i % 5 == 2 ? c.length - 30 : 0;
      c.soft_cap = i % 7 == 3 ? 20.0f : 0.0f;
      c.sink_logits = i % 4 == 1;
      c.alibi_slopes = i % 6 == 5;
      c.tree_mask = i % 8 == 4;
      c.lse = i % 3 != 2;
      c.aligned = true;
      c.commands = std::nullopt;
      c.name = str_cat(c.tokens, "x", c.heads, "/", c.kv_heads, "/", dim, " length ", c.length,
                       c.window != 0 ? " window" : "", c.soft_cap != 0 ? " soft cap" : "",
                       c.sink_logits ? " sink_logits" : "", c.alibi_slopes ? " alibi_slopes" : "",
                       c.tree_mask ? " tree_mask" : "");
      cases.push_back(make_case(c));
    });
  }
}

void add_partial_cases(const Pair& pair, std::vector<OpCase>& cases) {
  for (const uint64_t tokens : {1u, 3u, 20u}) {
    for (const uint64_t splits : {1u, 2u, 3u}) {  // the third has no keys
      AttentionOpCase c{.k = pair.k, .v = pair.v, .tokens = tokens, .splits = splits};
      c.length = 75;
      c.q = kFloats[splits - 1];
      c.name = str_cat("tokens ", tokens, " splits ", splits);
      cases.push_back(make_case(c));
    }
  }
}

}  // namespace

std::vector<OpCase> attention_cases() {
  std::vector<OpCase> cases;
  for (const Pair& pair : kPairs) {
    add_layout_cases(pair, cases);
    add_option_cases(pair, cases);
  }
  add_short_cases(cases);
  add_split_cases(cases);
  add_shape_cases(cases);
  for (const OpCase& c : attention_decode_cases()) cases.push_back(c);
  for (const OpCase& c : attention_rows_cases()) cases.push_back(c);
  return cases;
}

std::vector<OpCase> attention_partial_cases() {
  std::vector<OpCase> cases;
  for (const Pair& pair : kPairs) add_partial_cases(pair, cases);
  for_each_class_pair([&](FormatClass k, FormatClass v, size_t i) {
    AttentionOpCase c{.k = format_of(k, i), .v = format_of(v, i / 5), .k_dim = 256, .v_dim = 256};
    c.splits = 1 + i % 3;
    c.length = 200;
    c.capacity = 203;
    c.window = i % 2 == 0 ? 150 : 0;
    c.alibi_slopes = i % 3 == 1;
    c.name = str_cat("window ", c.window, " splits ", c.splits);
    cases.push_back(make_case(c));
  });
  for (const OpCase& c : attention_decode_partial_cases()) cases.push_back(c);
  return cases;
}

}  // namespace gyre::test
