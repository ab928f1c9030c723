// Attention over pages against double precision over what the pages hold.
#include <string>

#include "pages/paged_attention_case.h"

namespace gyre::test {
namespace {

using Cases = std::vector<PagedAttentionCase>;

constexpr uint64_t kPageTokens[] = {8, 16, 64, 128};

std::string text(const KvPageShape& s) {
  return str_cat(s.head_dim, "/", v_dim_of(s), " pages of ", s.page_tokens);
}

// Lengths around a page's end, none, one; a few queries and many.
std::vector<PagedSequence> ragged(uint64_t page) {
  return {{page, 1},         {page + 1, 1}, {0, 1},        {1, 1},
          {2 * page - 1, 3}, {5, 0},        {7 + page, 7}, {70, 20}};
}

// Every format of K and of V, every pair of classes, with dtypes, page sizes and layouts in turn.
Cases format_cases() {
  Cases cases;
  const auto add = [&](KvFormat k, KvFormat v) {
    const size_t i = cases.size();
    PagedAttentionCase c;
    const bool mlx_native =
        class_of(k) == FormatClass::mlx_native || class_of(v) == FormatClass::mlx_native;
    c.shape = {k,
               v,
               2,
               mlx_native ? uint64_t{256} : uint64_t{64},
               i % 3 == 1 ? uint64_t{256} : 0,
               kPageTokens[i % 4]};
    c.heads = i % 2 == 0 ? 4 : 6;
    c.q = kFloats[i % 3];
    c.out = kFloats[i / 3 % 3];
    c.q_layout = i % 5 == 4 ? KvLayout::padded : kPlainLayouts[i % 2];
    c.out_layout = i % 7 == 6 ? KvLayout::padded : kPlainLayouts[i / 2 % 2];
    c.page_gap = i % 3 * 64;
    c.table_gap = i % 4;
    c.rows_before = i % 2;
    c.rows_behind = i % 3;
    c.lse = i % 4 != 3;
    c.sequences = ragged(c.shape.page_tokens);
    c.name = str_cat(text(c.shape), " ragged ", i);
    cases.push_back(c);
  };
  for (const KvFormat format : kv_formats()) {
    for (const FormatClass other : kFormatClasses) {
      add(format, format_of(other, cases.size()));
      add(format_of(other, cases.size()), format);
    }
  }
  return cases;
}

KvFormat format_at(size_t i) {
  constexpr KvFormat kOnePerClass[] = {KvFormat::tq8, KvFormat::f16,  KvFormat::f32,
                                       KvFormat::tq3, KvFormat::bf16, KvFormat::mlx_native4};
  return kOnePerClass[i % std::size(kOnePerClass)];
}

// Windows: entries below them are stale.
Cases window_cases() {
  Cases cases;
  for (const uint64_t window : {1u, 7u, 16u, 17u, 100u, 1000u}) {
    for (size_t i = 0; i < 6; ++i) {
      PagedAttentionCase c;
      c.shape.k = format_at(i);
      c.shape.v = format_at(i + window);
      c.shape.page_tokens = kPageTokens[(i + window) % 4];
      c.window = window;
      c.causal = i % 4 != 3;
      c.sequences = {{200, 1}, {129, 4}, {64, 1}, {150, 40}, {90, 3, true}, {3, 3}};
      c.name = str_cat(text(c.shape), " window ", window, c.causal ? "" : " all newer");
      cases.push_back(c);
    }
  }
  return cases;
}

// Sinks, slopes, soft caps, prompts that are marked, no causality, queries without keys.
Cases option_cases() {
  Cases cases;
  for (size_t i = 0; i < 24; ++i) {
    PagedAttentionCase c;
    c.shape.k = format_at(i);
    c.shape.v = format_at(i / 2 + 1);
    c.shape.page_tokens = kPageTokens[i % 4];
    c.sink_logits = i % 2 == 0;
    c.alibi_slopes = i % 3 == 0;
    c.soft_cap = i % 4 == 0 ? 3.0f : 0.0f;
    c.causal = i % 5 != 0;
    c.window = i % 8 == 7 ? 30 : 0;
    c.lse = i % 3 != 2;
    c.sequences = {{77, 1}, {77, 1, true}, {3, 9, true}, {0, 2}, {130, 5}, {64, 33, i % 2 == 0}};
    c.name = str_cat("options ", i);
    cases.push_back(c);
  }
  return cases;
}

// Several pieces of keys, pages that are not a divisor of 64, wide groups, one KV head.
Cases length_cases() {
  Cases cases;
  const auto add = [&](const char* what, const KvPageShape& shape, uint64_t heads,
                       std::vector<PagedSequence> sequences, uint64_t window = 0) {
    cases.push_back({.name = str_cat(what, " ", text(shape)),
                     .shape = shape,
                     .heads = heads,
                     .sequences = std::move(sequences),
                     .window = window});
  };
  const auto tq = [](uint64_t kv_heads, uint64_t page) {
    return KvPageShape{KvFormat::tq8, KvFormat::tq4, kv_heads, 64, 0, page};
  };
  add("two pieces and more", tq(1, 64), 4, {{1024, 1}, {1025, 2}, {3000, 1}, {40, 1}});
  add("many pieces", tq(1, 128), 2, {{20000, 1}, {1, 1}});
  add("many pieces, small pages", tq(1, 8), 1, {{2100, 3}});
  add("pieces of a window", tq(1, 16), 4, {{4000, 2}, {4100, 1}, {900, 1}}, 1500);
  add("a long prompt's chunk", tq(2, 64), 4, {{2500, 30}, {2500, 2, true}});
  add("odd pages", tq(2, 24), 4, {{200, 1}, {100, 20}, {23, 1}});
  add("odd pages", tq(2, 136), 4, {{300, 1}, {300, 20}, {136, 1}});
  add("the largest pages", tq(2, 1024), 4, {{1030, 1}, {20, 20}});
  add("a group of 16", tq(2, 16), 32, {{100, 1}, {50, 2}});
  add("a group of 20", tq(2, 16), 40, {{100, 1}, {50, 2}});
  add("f16, pieces", {KvFormat::f16, KvFormat::f16, 1, 64, 0, 64}, 4, {{2300, 1}, {1100, 4}});
  add("f32 and bf16, pieces", {KvFormat::f32, KvFormat::bf16, 1, 64, 80, 16}, 4, {{2300, 1}});
  return cases;
}

// Pieces of every pair of classes.
Cases piece_cases() {
  Cases cases;
  for (const FormatClass k : kFormatClasses) {
    for (const FormatClass v : kFormatClasses) {
      const size_t i = cases.size();
      PagedAttentionCase c;
      c.shape = {format_of(k, i), format_of(v, i / 5), 1, 256, 0, kPageTokens[i % 4]};
      c.heads = 2;
      c.sequences = {{1100 + i, 1}, {20, 1}};
      c.sink_logits = i % 2 == 0;
      c.name = str_cat("pieces ", i);
      cases.push_back(c);
    }
  }
  return cases;
}

// Numbers in device memory that are wrong.
Cases damage_cases() {
  constexpr Damage kAll[] = {Damage::negative_length, Damage::long_length,   Damage::many_queries,
                             Damage::queries_beyond,  Damage::negative_page, Damage::page_beyond};
  Cases cases;
  for (const Damage damage : kAll) {
    for (const uint64_t tokens : {3u, 40u}) {  // decode and prompt
      for (const bool f16 : {false, true}) {
        PagedAttentionCase c;
        if (f16) c.shape.k = c.shape.v = KvFormat::f16;
        const bool many = damage == Damage::many_queries;
        c.sequences = {{120, many && tokens == 40 ? 39u : 2u}, {60, 1}, {130, tokens}};
        c.sequences.back().damage = damage;
        c.rows_before = 1;
        c.window = 100;
        c.name = str_cat("damage ", static_cast<int>(damage), " tokens ", tokens,
                         f16 ? " f16" : " levels");
        cases.push_back(c);
      }
    }
  }
  for (const Damage damage : {Damage::page_beyond, Damage::negative_length}) {
    PagedAttentionCase pieces;
    pieces.shape.page_tokens = 64;
    pieces.sequences = {{3000, 2, false, damage}, {3000, 2}};
    pieces.name = str_cat("damage in one of several pieces ", static_cast<int>(damage));
    cases.push_back(pieces);
  }
  return cases;
}

// Prompts over levels, which a command may unpack ahead, as many sequences as there is room for:
// beside sequences that decode, and one with an entry that is no page.
Cases prompt_cases() {
  struct Shape {
    KvFormat k, v;
    uint64_t dim, page_tokens, window;
  };
  using enum KvFormat;
  constexpr Shape kShapes[] = {{tq8, tq8, 64, 8, 0},    {tq4, tq4, 64, 64, 300},
                               {tq4, tq8, 128, 24, 0},  {tq4, tq4, 128, 16, 200},
                               {tq8, tq8, 128, 136, 0}, {tq3, tq3, 128, 16, 0},
                               {tq2, tq2, 128, 64, 0},  {tq4, tq4, 256, 16, 0}};
  Cases cases;
  for (const auto& [k, v, dim, page_tokens, window] : kShapes) {
    for (const Damage damage : {Damage::none, Damage::page_beyond}) {
      PagedAttentionCase c;
      c.shape = {k, v, damage == Damage::none ? uint64_t{2} : 1, dim, 0, page_tokens};
      c.heads = 4 * c.shape.kv_heads;
      c.window = window;
      c.sequences = {{900, 20}, {40, 1},    {500, 3, true}, {30, 30}, {600, 17, false, damage},
                     {0, 0},    {1000, 18}, {301, 40}};
      c.page_gap = 64;
      if (damage != Damage::none || cases.size() % 4 == 0) c.rows_behind = 40;  // room for all
      c.name = "prompts " + text(c.shape) + (damage == Damage::none ? "" : " damaged");
      cases.push_back(c);
    }
  }
  // Two that surely have room, and some behind sequences of which each thread scans several.
  for (const uint64_t before : {0u, 390u}) {
    PagedAttentionCase c;
    c.shape = {tq8, tq8, 1, 128, 0, 16};
    c.sequences.assign(before, PagedSequence{0, 0});
    for (const PagedSequence& s : {PagedSequence{300, 20}, {400, 17}}) c.sequences.push_back(s);
    c.name = str_cat("prompts behind ", before);
    cases.push_back(c);
  }
  // Nothing to unpack: numbers that make no sense, or no keys.
  for (const PagedSequence& alone : {PagedSequence{600, 20, false, Damage::negative_length},
                                     {600, 20, false, Damage::long_length},
                                     {0, 20}}) {
    PagedAttentionCase c;
    c.shape = {tq8, tq8, 1, 128, 0, 16};
    c.sequences = {alone, {300, 1}};
    if (alone.length != 0) c.sequences.pop_back();
    c.name = str_cat("a prompt of no keys ", cases.size());
    cases.push_back(c);
  }
  return cases;
}

Cases empty_cases() {
  return {{.name = "no sequence has queries", .sequences = {{10, 0}, {0, 0}}, .rows_before = 3},
          {.name = "no queries", .sequences = {{10, 0}}}};
}

}  // namespace

std::vector<OpCase> paged_attention_cases() {
  return make_cases<PagedAttentionCase>({format_cases(), window_cases(), option_cases(),
                                         length_cases(), piece_cases(), damage_cases(),
                                         prompt_cases(), empty_cases()});
}

}  // namespace gyre::test
