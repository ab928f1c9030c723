// Latent attention: over caches, as partial states, and over pages.
#include <cstdlib>

#include "attention/attention_op_case.h"
#include "attention/attention_rules.h"
#include "gyre_test.h"
#include "pages/paged_attention_case.h"
#include "tested_op.h"

namespace gyre::test {
namespace {

std::vector<KvFormat> latent_formats() {
  std::vector<KvFormat> formats = native_formats();
  formats.push_back(KvFormat::f16);
  formats.push_back(KvFormat::bf16);
  return formats;
}

AttentionOpCase latent_case() {
  return {.k = KvFormat::tq4,
          .v = KvFormat::tq8,
          .heads = 16,
          .kv_heads = 1,
          .k_dim = 512,
          .v_dim = 64,
          .commands = {},
          .aligned = true,
          .latent = true};
}

// CUDA has kernels for some dims, and refuses others by name.
OpCase limited(OpCase op_case, uint64_t k_dim, uint64_t v_dim) {
  const bool has =
      (k_dim == 128 || k_dim == 256 || k_dim == 512) && (v_dim == 16 || v_dim == 32 || v_dim == 64);
  op_case.supported = [has, any = op_case.supported](const Device& device) {
    return any(device) && (has || !device.info().name.starts_with("cuda"));
  };
  return op_case;
}
OpCase on_devices(const AttentionOpCase& c) { return limited(make_case(c), c.k_dim, c.v_dim); }
OpCase on_devices(const PagedAttentionCase& c) {
  return limited(make_case(c), c.shape.head_dim, c.shape.v_head_dim);
}

// Every pair of formats, at sizes and rows that change from case to case.
void add_format_cases(std::vector<OpCase>& cases) {
  constexpr std::array<std::array<uint64_t, 2>, 6> kDims = {
      {{512, 64}, {128, 32}, {256, 64}, {512, 128}, {80, 16}, {496, 48}}};
  constexpr std::array<uint64_t, 7> kHeads = {16, 1, 8, 33, 64, 3, 128};
  constexpr std::array<uint64_t, 5> kTokens = {1, 2, 1, 5, 3};
  size_t i = 0;
  for (const KvFormat latent : latent_formats()) {
    for (const KvFormat rotary : latent_formats()) {
      AttentionOpCase c = latent_case();
      c.k = latent, c.v = rotary;
      c.k_dim = kDims[i % kDims.size()][0], c.v_dim = kDims[i % kDims.size()][1];
      c.heads = kHeads[i % kHeads.size()];
      c.tokens = kTokens[i % kTokens.size()];
      c.q = kFloats[i % 3];
      c.out = kFloats[i / 3 % 3];
      c.lse = i % 4 != 3;
      c.name = str_cat(c.k_dim, " + ", c.v_dim, " heads ", c.heads, " tokens ", c.tokens);
      cases.push_back(on_devices(c));
      ++i;
    }
  }
}

// Everything else that a call may ask for.
void add_option_cases(KvFormat latent, KvFormat rotary, DType q, std::vector<OpCase>& cases) {
  const auto add = [&](const char* what, const auto& change) {
    AttentionOpCase c = latent_case();
    c.k = latent, c.v = rotary, c.q = q;
    c.k_dim = 128, c.v_dim = 32;
    c.name = what;
    change(c);
    cases.push_back(on_devices(c));
  };
  using Case = AttentionOpCase;
  add("sink_logits", [](Case& c) { c.sink_logits = true; });
  add("alibi_slopes", [](Case& c) { c.alibi_slopes = true; });
  add("soft cap", [](Case& c) { c.soft_cap = 1.5f; });
  add("window", [](Case& c) { c.window = 17; });
  add("window of one", [](Case& c) { c.tokens = 7, c.window = 1; });
  add("not causal", [](Case& c) { c.tokens = 5, c.causal = false; });
  add("more queries than keys", [](Case& c) { c.tokens = 6, c.length = 4, c.sink_logits = true; });
  add("nothing in the cache", [](Case& c) { c.length = 0; });
  add("no slots", [](Case& c) { c.length = c.capacity = c.ring_start = 0; });
  add("nothing but sink_logits", [](Case& c) { c.length = 0, c.sink_logits = true; });
  add("no queries", [](Case& c) { c.tokens = 0, c.commands = 0; });
  add("a prompt", [](Case& c) { c.tokens = 37; });
  add("a prompt of many heads", [](Case& c) { c.tokens = 9, c.heads = 128; });
  add("more heads than a tile", [](Case& c) { c.heads = 300, c.tokens = 2; });
  add("several pieces", [](Case& c) { c.length = 2500, c.capacity = 2600, c.tokens = 2; });
  add("several pieces of 128 heads", [](Case& c) {
    c.heads = 128, c.tokens = 1, c.length = 2100, c.capacity = 2100, c.ring_start = 1000;
  });
  add("pieces of a window", [](Case& c) {
    c.length = 2500, c.capacity = 2600, c.tokens = 1, c.window = 1500, c.sink_logits = true;
  });
  add("everything", [](Case& c) {
    c.tokens = 5, c.window = 30, c.soft_cap = 2, c.sink_logits = c.alibi_slopes = true;
  });
  add("a prompt, everything", [](Case& c) {
    c.tokens = 37, c.window = 30, c.soft_cap = 2, c.sink_logits = c.alibi_slopes = true;
  });
  add("padded rows", [](Case& c) {
    c.q_layout = reference::KvLayout::padded, c.out_layout = reference::KvLayout::head_major;
    c.lse_by_head = true;
  });
}

// What a model has, at lengths that fill no block.
void add_model_cases(std::vector<OpCase>& cases) {
  for (const KvFormat latent : {KvFormat::tq4, KvFormat::tq8, KvFormat::bf16}) {
    for (const uint64_t heads : {16u, 128u}) {
      AttentionOpCase c = latent_case();
      c.k = latent;
      c.v = latent == KvFormat::bf16 ? KvFormat::bf16 : KvFormat::tq8;
      c.q = c.out = DType::bf16;
      c.heads = heads;
      c.tokens = 1;
      c.length = 1337, c.capacity = 1400, c.ring_start = 700;
      c.name = str_cat("deepseek-v3 heads ", heads);
      cases.push_back(on_devices(c));
    }
  }
}

void add_partial_cases(std::vector<OpCase>& cases) {
  for (const KvFormat latent : {KvFormat::tq4, KvFormat::f16}) {
    for (const uint64_t splits : {1u, 3u, 9u}) {
      AttentionOpCase c = latent_case();
      c.k = latent, c.k_dim = 256, c.v_dim = 32;
      c.length = 300, c.capacity = 310;
      c.tokens = splits == 3 ? 5 : 1;
      c.splits = splits;
      c.window = splits == 9 ? 200 : 0;
      c.name = str_cat("splits ", splits);
      cases.push_back(on_devices(c));
    }
  }
}

PagedAttentionCase paged_case(KvFormat latent, KvFormat rotary, uint64_t latent_dim,
                              uint64_t rotary_dim, uint64_t page_tokens) {
  PagedAttentionCase c;
  c.shape = {latent, rotary, 1, latent_dim, rotary_dim, page_tokens};
  c.shape.latent = true;
  c.heads = 16;
  return c;
}

void add_paged_cases(std::vector<OpCase>& cases) {
  constexpr uint64_t kPageTokens[] = {16, 64, 8, 32};
  size_t i = 0;
  for (const KvFormat latent : latent_formats()) {
    for (const KvFormat rotary : {KvFormat::tq8, KvFormat::f16, KvFormat::bf16}) {
      PagedAttentionCase c = paged_case(latent, rotary, i % 2 == 0 ? 512 : 128,
                                        i % 2 == 0 ? 64 : 32, kPageTokens[i % 4]);
      c.heads = i % 3 == 0 ? 16 : (i % 3 == 1 ? 40 : 128);
      c.q = kFloats[i % 3];
      c.out = kFloats[i / 3 % 3];
      c.page_gap = i % 3 * 64;
      c.table_gap = i % 4;
      c.rows_before = i % 2;
      c.rows_behind = i % 3;
      c.sequences = {{77, 1}, {1, 1}, {0, 2}, {130, 5}, {64, 33}, {90, 2, true}, {200, 1}};
      c.name = str_cat("ragged ", i);
      cases.push_back(on_devices(c));
      ++i;
    }
  }
  for (const uint64_t window : {0u, 1u, 17u, 100u}) {
    PagedAttentionCase c = paged_case(KvFormat::tq4, KvFormat::tq8, 128, 32, 24);
    c.window = window;
    c.sink_logits = window != 1;
    c.soft_cap = window == 17 ? 3.0f : 0.0f;
    c.alibi_slopes = window == 100;
    c.causal = window != 0;
    c.sequences = {{200, 1}, {129, 4}, {64, 1}, {150, 40}, {90, 3, true}, {3, 3}};
    c.name = str_cat("window ", window);
    cases.push_back(on_devices(c));
  }
  PagedAttentionCase pieces = paged_case(KvFormat::tq4, KvFormat::tq8, 512, 64, 64);
  pieces.sequences = {{2100, 1}, {40, 1}, {1100, 4}};
  pieces.name = "pieces";
  cases.push_back(on_devices(pieces));
  for (const Damage damage : {Damage::negative_length, Damage::many_queries, Damage::page_beyond}) {
    PagedAttentionCase c = paged_case(KvFormat::tq6, KvFormat::bf16, 128, 32, 16);
    c.sequences = {{120, 2}, {60, 1}, {130, 3}};
    c.sequences.back().damage = damage;
    c.name = str_cat("damage ", static_cast<int>(damage));
    cases.push_back(on_devices(c));
  }
}

// Numbers that nobody chose; GYRE_RANDOM_CASES says how many pairs of cases, 30 if not given.
void add_random_cases(std::vector<OpCase>& cases) {
  std::mt19937 random(45);
  const auto up_to = [&](uint64_t limit) { return 1 + random() % limit; };
  const std::vector<KvFormat> formats = latent_formats();
  const char* const wanted = std::getenv("GYRE_RANDOM_CASES");
  const size_t count = wanted == nullptr ? 30 : std::strtoul(wanted, nullptr, 10);
  for (size_t i = 0; i < count; ++i) {
    AttentionOpCase c = latent_case();
    c.k = formats[random() % formats.size()];
    c.v = formats[random() % formats.size()];
    c.q = kFloats[random() % 3];
    // Every second one of dims that CUDA's kernels have.
    c.k_dim = i % 2 == 0 ? 16 * up_to(32) : 128 << random() % 3;
    c.v_dim = i % 2 == 0 ? 16 * up_to(8) : 16 << random() % 3;
    c.heads = up_to(i % 4 == 0 ? 128 : 20);
    c.tokens = up_to(i % 5 == 0 ? 30 : 4);
    c.length = up_to(300);
    c.capacity = c.length + random() % 50;
    c.ring_start = random() % c.capacity;
    c.window = i % 3 == 0 ? up_to(c.length) : 0;
    c.causal = i % 7 != 0;
    c.sink_logits = i % 4 == 1;
    c.name = str_cat("random ", i);
    cases.push_back(on_devices(c));
    PagedAttentionCase paged = paged_case(c.k, c.v, c.k_dim, c.v_dim, 8 * up_to(10));
    paged.q = c.q;
    paged.heads = up_to(i % 4 == 0 ? 128 : 20);
    paged.window = c.window;
    for (uint64_t s = up_to(5); s != 0; --s) {
      const uint64_t length = up_to(200);
      paged.sequences.push_back({length, std::min(up_to(6), length), random() % 5 == 0});
    }
    paged.name = str_cat("random ", i);
    cases.push_back(on_devices(paged));
  }
}

std::vector<OpCase> latent_cases() {
  std::vector<OpCase> cases;
  add_format_cases(cases);
  add_option_cases(KvFormat::tq4, KvFormat::tq8, DType::f32, cases);
  add_option_cases(KvFormat::bf16, KvFormat::f16, DType::f32, cases);
  add_option_cases(KvFormat::bf16, KvFormat::bf16, DType::bf16, cases);
  add_model_cases(cases);
  add_partial_cases(cases);
  add_paged_cases(cases);
  add_random_cases(cases);
  return cases;
}

AttentionCall good_call(FilledTensors& t) {
  return {{.q = t.make(DType::f32, {3, 4, 80}),
           .k_cache = make_cache(t, {KvFormat::tq4, KvRole::k, 1, 9, 64}),
           .v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 1, 9, 16}),
           .out = t.make(DType::f32, {3, 4, 64}),
           .latent = true},
          {.length = 7, .scale = 0.5f},
          {}};
}

constexpr RefusedCall<AttentionCall> refusal{
    "attention: ", good_call,
    [](Encoder& e, const AttentionCall& c) { attention(e, c.in, c.options); }};

std::vector<Refusal> latent_refusals() {
  std::vector<Refusal> all = {
      refusal("no scale", {"the softmax scale of latent attention has no default: give it"},
              CHANGE(c.options.scale.reset())),
      refusal("a tree_mask", {"latent attention takes no tree_mask"},
              CHANGE(c.options.mask.tree_mask = t.make(DType::u8, {3, 3}))),
      refusal("two KV heads", {"latent attention has one KV head", "got kv_heads 2"},
              CHANGE(c.in.k_cache = make_cache(t, {KvFormat::tq4, KvRole::k, 2, 9, 64}),
                     c.in.v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 2, 9, 16}))),
      refusal("a latent of f32", {"the latent of latent attention is stored as", "got f32"},
              CHANGE(c.in.k_cache = make_cache(t, {KvFormat::f32, KvRole::k, 1, 9, 64}))),
      refusal("a rotary part of f32", {"the rotary part of latent attention", "got f32"},
              CHANGE(c.in.v_cache = make_cache(t, {KvFormat::f32, KvRole::v, 1, 9, 16}))),
      refusal("an mlx-native latent", {"the latent of latent attention", "got mlx_native4"},
              CHANGE(c.in.k_cache = make_cache(t, {KvFormat::mlx_native4, KvRole::k, 1, 9, 256}))),
      refusal("a latent of 1024", {"a multiple of 16 coordinates up to 512", "got 1024"},
              CHANGE(c.in.k_cache = make_cache(t, {KvFormat::tq4, KvRole::k, 1, 9, 1024}))),
      refusal("a latent of 72", {"a multiple of 16 coordinates up to 512", "got 72"},
              CHANGE(c.in.k_cache = make_cache(t, {KvFormat::tq4, KvRole::k, 1, 9, 72}))),
      refusal("a rotary part of 144", {"a multiple of 16 coordinates up to 128", "got 144"},
              CHANGE(c.in.v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 1, 9, 144}))),
      refusal("queries without a rotary part",
              {"q must have the head_dim of k_cache and v_cache: 80", "got 64"},
              CHANGE(c.in.q = t.make(DType::f32, {3, 4, 64}))),
      refusal("out of the rotary part", {"out must have shape [3, 4, 64]", "got [3, 4, 16]"},
              CHANGE(c.in.out = t.make(DType::f32, {3, 4, 16}))),
  };
  all.push_back({"pages of two KV heads",
                 {"kv_pages: latent attention has one KV head, got kv_heads 2"},
                 [](Encoder&, FilledTensors& t) {
                   KvPageShape shape{KvFormat::tq4, KvFormat::tq8, 2, 64, 16, 16};
                   shape.latent = true;
                   KvPages::allocate(t.device(), shape, 1);
                 }});
  return all;
}

[[maybe_unused]] const TestedOp kLatent{"latent_attention", latent_cases, latent_refusals};

}  // namespace
}  // namespace gyre::test
