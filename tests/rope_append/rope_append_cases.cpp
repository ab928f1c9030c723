#include <string>

#include "format_classes.h"
#include "pages/page_memory.h"
#include "rope_append/rope_append_case.h"

namespace gyre::test {
namespace {

using Cases = std::vector<RopeAppendCase>;

uint64_t dim_of(KvFormat format, size_t i) {
  constexpr uint64_t kDims[] = {64, 128, 80, 96, 24, 256};
  return class_of(format) == FormatClass::mlx_native ? 256 : kDims[i % std::size(kDims)];
}

// Where tokens go, in turn: pages with either kind of slots, and caches with sink tokens, tails and
// bodies that wrap.
void choose_place(RopeAppendCase& c, size_t i) {
  if (i % 3 != 0) {
    c.slot_type = i % 3 == 1 ? DType::i32 : DType::i64;
    c.slots = slot_run(static_cast<int64_t>(i % 13), c.tokens);
    return;
  }
  const bool near = class_of(c.k) >= FormatClass::levels || class_of(c.v) >= FormatClass::levels;
  c.sink_tokens = near ? i % 4 : 0;
  c.tail = near && i % 2 == 0 ? 5 : 0;
  c.body = 40 + i % 5;
  c.start = i % 7 == 6 ? 1 : 35 + i % 9;
}

RopeAppendCase numbered(KvFormat k, KvFormat v, size_t i, bool few) {
  RopeAppendCase c;
  c.k = k, c.v = v;
  c.k_dim = dim_of(k, i), c.v_dim = dim_of(v, i / 2);
  c.dtype = kFloats[i % 3];
  c.heads = i % 6;
  c.kv_heads = 1 + i % 3;
  c.layout = i % 5 == 4 ? KvLayout::padded : kPlainLayouts[i % 2];
  c.in_place = i % 4 == 1;
  c.options.pairing = i / 3 % 2 == 1 ? RopePairing::adjacent : RopePairing::split_half;
  c.norm = i / 6 % 2 == 1;
  c.weights = i % 5 != 2;
  c.tokens = few ? 1 + i % 12 : 33 + i % 6;
  choose_place(c, i / 2 + i / 7);
  c.name = str_cat(k, "/", v, " ", c.k_dim, "/", c.v_dim, " ", c.dtype, " #", i);
  return c;
}

// Every format in either role, every pair of classes, few tokens and many.
Cases format_cases() {
  Cases cases;
  for (const bool few : {true, false}) {
    for (const FormatClass k : kFormatClasses) {
      for (const FormatClass v : kFormatClasses)
        cases.push_back(numbered(format_of(k, cases.size()), format_of(v, cases.size() / 3),
                                 cases.size(), few));
    }
    size_t i = 0;
    for (const KvFormat format : kv_formats()) {
      cases.push_back(numbered(format, format_of(FormatClass::levels, i++), cases.size(), few));
      cases.push_back(numbered(format_of(FormatClass::levels, i++), format, cases.size(), few));
    }
  }
  return cases;
}

// Every dtype, pairing and norm, into every kind of place.
Cases option_cases() {
  Cases cases;
  for (size_t i = 0; i < 36; ++i) {
    RopeAppendCase c;
    c.dtype = kFloats[i % 3];
    c.options.pairing = i / 3 % 2 == 1 ? RopePairing::adjacent : RopePairing::split_half;
    c.norm = i / 6 % 2 == 1;
    c.tokens = i % 2 == 0 ? 3 : 34;
    if (i / 12 != 0) {
      c.slot_type = i / 12 == 1 ? DType::i32 : DType::i64;
      c.slots = slot_run(6, c.tokens);
    }
    c.name = str_cat("options #", i);
    cases.push_back(c);
  }
  return cases;
}

// What rope knows beyond pairs: parts of a head, axes, factors, magnitudes.
Cases convention_cases() {
  Cases cases;
  const auto add = [&](const char* what, void (*change)(RopeAppendCase&)) {
    for (const uint64_t tokens : {3u, 35u}) {
      RopeAppendCase c{.tokens = tokens};
      change(c);
      c.name = str_cat(what, ", tokens ", tokens);
      cases.push_back(c);
    }
  };
  add("partial", [](RopeAppendCase& c) { c.options.rotary_dim = 20; });
  add("partial, partner half a head away",
      [](RopeAppendCase& c) { c.options.rotary_dim = 20, c.options.partner = RopeSpan::head_dim; });
  add("partial, adjacent, with a norm", [](RopeAppendCase& c) {
    c.options.rotary_dim = 32, c.options.pairing = RopePairing::adjacent, c.norm = true;
  });
  add("sectioned", [](RopeAppendCase& c) {
    c.options.mode = RopeMode::sectioned, c.options.sections[0] = 10, c.options.sections[1] = 8,
    c.options.sections[2] = 8, c.options.sections[3] = 6;
  });
  add("interleaved", [](RopeAppendCase& c) {
    c.options.mode = RopeMode::interleaved, c.options.sections[0] = 12,
    c.options.sections[1] = c.options.sections[2] = 10;
  });
  add("vision", [](RopeAppendCase& c) {
    c.options.mode = RopeMode::vision, c.options.sections[0] = c.options.sections[1] = 16;
  });
  add("vision_2d", [](RopeAppendCase& c) { c.options.mode = RopeMode::vision_2d; });
  add("factors", [](RopeAppendCase& c) { c.factors = true; });
  add("magnitude", [](RopeAppendCase& c) { c.options.magnitude = 0.5f; });
  add("the norm alone", [](RopeAppendCase& c) { c.rotates = false, c.norm = true; });
  add("no queries", [](RopeAppendCase& c) { c.heads = 0; });
  return cases;
}

// Sizes that are no multiple of anything, and long rows.
Cases shape_cases() {
  Cases cases;
  const auto add = [&](uint64_t k_dim, uint64_t v_dim, uint64_t kv_heads, uint64_t tokens,
                       KvFormat format) {
    RopeAppendCase c;
    c.k = c.v = format;
    c.k_dim = k_dim, c.v_dim = v_dim, c.kv_heads = kv_heads, c.heads = 2 * kv_heads + 1;
    c.tokens = tokens;
    c.dtype = kFloats[cases.size() % 3];
    c.norm = cases.size() % 2 == 1;
    if (cases.size() % 2 == 0) c.slots = slot_run(3, tokens);
    c.body = tokens + 11;
    c.sink_tokens = 2;
    c.start = cases.size() % 3;
    c.name = str_cat(format, " ", k_dim, "/", v_dim, " heads ", kv_heads, " tokens ", tokens);
    cases.push_back(c);
  };
  add(16, 16, 1, 1, KvFormat::tq4);
  add(40, 16, 5, 7, KvFormat::tq5);
  add(128, 128, 9, 1, KvFormat::tq4);
  add(128, 128, 8, 33, KvFormat::tq8);
  add(128, 128, 1, 45, KvFormat::tq3);
  add(192, 128, 3, 2, KvFormat::tq8);
  add(256, 256, 2, 3, KvFormat::tq6);
  add(192, 128, 3, 39, KvFormat::tq6);
  add(512, 64, 2, 4, KvFormat::tq4);
  add(512, 320, 2, 33, KvFormat::tq2);
  add(576, 512, 1, 2, KvFormat::tq8);
  add(1024, 768, 1, 11, KvFormat::tq4);
  add(1000, 64, 1, 3, KvFormat::f16);
  return cases;
}

// Lists of slots as kv_write takes them, by the few and by the many.
Cases slot_cases() {
  Cases cases;
  const auto add = [&](const char* what, std::vector<int64_t> slots) {
    for (const uint64_t v_dim : {64u, 272u}) {
      RopeAppendCase c;
      c.tokens = slots.size();
      c.slots = slots;
      c.v_dim = v_dim;
      c.v = cases.size() % 4 < 2 ? KvFormat::tq4 : KvFormat::tq3;
      c.name = str_cat(what, ", head_dim of V ", v_dim);
      cases.push_back(c);
    }
  };
  add("the last slot", {63});
  add("nothing but padding", {-1, -1, -1});
  add("padding at the end", {17, 18, -1, -1});
  add("padding between sequences", {-1, 17, 18, -1, -1, 24, -1, 40, 41});
  add("out of the pages",
      {63, 64, 65, int64_t{1} << 40, int64_t{-1} << 63, (int64_t{1} << 62) + 3});
  add("a tile backwards", {7, 6, 5, 4, 3, 2, 1, 0});
  add("a slot twice, the later token stays", {9, 10, 9, 11, 11});
  add("a slot twice with padding between", {9, -1, -1, 9, 10, -1, 10});
  add("a run longer than a tile", {1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 0});
  add("tokens of several sequences", {0, 17, 18, 40, 41, 42, 43, 44, 45, 46, 47, 48, 33, -1});
  std::vector<int64_t> apart = {9};
  apart.insert(apart.end(), 28, -1);
  apart.insert(apart.end(), {9, 10});
  add("a slot twice with padding far apart", apart);
  add("sequences in turn", {0, 40, 17, 1, 41, 18, 2, 42, 19, 3, 43});
  add("a slot twice, far apart", {9, 40, 17, 10, 9, 41, 18, 11, 40, 12, 9, 33, 34});
  std::vector<int64_t> many = slot_run(3, 40);
  many.insert(many.end(), {9, 60, 4});
  add("a slot twice among many", many);
  return cases;
}

// A step into a cache: sink tokens, a tail, a ring that wraps, a step that is longer than what was
// recorded.
Cases cache_cases() {
  Cases cases;
  const auto add = [&](uint64_t sink_tokens, uint64_t tail, uint64_t start, uint64_t tokens,
                       uint64_t unseen) {
    for (const KvFormat v : {KvFormat::tq4, KvFormat::f16}) {
      RopeAppendCase c;
      c.v = v;
      c.sink_tokens = sink_tokens, c.tail = tail, c.start = start, c.tokens = tokens,
      c.unseen = unseen;
      c.body = 43;
      c.name = str_cat("V ", v, " sink_tokens ", sink_tokens, " tail ", tail, " from ", start,
                       " tokens ", tokens);
      cases.push_back(c);
    }
  };
  add(4, 0, 0, 3, 0);
  add(4, 0, 2, 9, 0);
  add(4, 6, 0, 40, 0);
  add(38, 0, 1, 36, 0);
  add(0, 6, 41, 1, 0);
  add(0, 6, 80, 8, 3);
  add(0, 6, 41, 34, 2);
  add(0, 0, uint64_t{1} << 33, 5, 0);
  return cases;
}

}  // namespace

std::vector<OpCase> rope_append_cases() {
  return make_cases<RopeAppendCase>({format_cases(), option_cases(), convention_cases(),
                                     shape_cases(), slot_cases(), cache_cases()});
}

}  // namespace gyre::test
