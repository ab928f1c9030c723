
#include "format_classes.h"
#include "gyre_test.h"
#include "refused_call.h"

namespace gyre::test {
namespace {

constexpr uint64_t kHuge = ~uint64_t{0};

KvBuffer make_cache(FilledTensors& tensors, const KvShape& shape) {
  const bool native = shape.format >= KvFormat::tq2 && shape.format <= KvFormat::tq8;
  return {shape, tensors.make(DType::u8, kv_codes_shape(shape)),
          tensors.make(native ? DType::u8 : DType::f32, kv_scales_shape(shape))};
}

// A call that would be fine; each refusal changes one thing about it.
struct Call {
  KvQuantizeInputs in;
  KvRange options;
};

Call good_call(FilledTensors& tensors) {
  return {{.k = tensors.make(DType::f32, {5, 3, 64}),
           .k_cache = make_cache(tensors, {KvFormat::tq4, KvRole::k, 3, 9, 64}),
           .v = tensors.make(DType::f32, {5, 3, 80}),
           .v_cache = make_cache(tensors, {KvFormat::tq3, KvRole::v, 3, 9, 80})},
          {}};
}

constexpr RefusedCall<Call> refusal{
    "kv_quantize", good_call, [](Encoder& e, const Call& c) { kv_quantize(e, c.in, c.options); }};

std::vector<Refusal> format_refusals() {
  return {
      refusal("dense k_cache", {"k_cache must be compressed", "got f16"},
              CHANGE(c.in.k_cache.shape.format = KvFormat::f16)),
      refusal("dense v_cache", {"v_cache must be compressed", "got f32"},
              CHANGE(c.in.v_cache.shape.format = KvFormat::f32)),
      {"unknown format",
       {"99 is not a format"},
       [](Encoder& encoder, FilledTensors& t) {
         Call c = good_call(t);
         c.in.k_cache.shape.format = static_cast<KvFormat>(99);
         kv_quantize(encoder, c.in);
       }},
      refusal("codes of another format", {"codes of k_cache", "[3, 16, 40]", "got", "[3, 16, 32]"},
              CHANGE(c.in.k_cache.shape.format = KvFormat::tq5)),
      refusal("scales of another head_dim",
              {"scales of k_cache", "[3, 2, 1, 16]", "got", "[3, 2, 2, 16]"},
              CHANGE(c.in.k_cache.scales = t.make(DType::u8, {3, 2, 2, 16}))),
      refusal("scales of another dtype", {"scales of k_cache", "u8", "got f32"},
              CHANGE(c.in.k_cache.scales = t.make(DType::f32, {3, 2, 1, 16}))),
      refusal("codes of another dtype", {"codes of v_cache", "u8", "got i32"},
              CHANGE(c.in.v_cache.codes = t.make(DType::i32, {3, 2, 240}))),
      refusal("codes with gaps", {"codes of k_cache must be contiguous"},
              CHANGE(c.in.k_cache.codes = t.make(DType::u8, {3, 17, 32}).slice(1, 0, 16))),
      refusal("norms where scales belong", {"scales of k_cache", "f32 [3, 9, 1]", "got u8"},
              CHANGE(c.in.k_cache.shape.format = KvFormat::mlx_native4,
                     c.in.k_cache.codes = t.make(DType::u8, {3, 9, 32}))),
      refusal("no codes", {"k_cache has no memory"}, CHANGE(c.in.k_cache.codes = {})),
      refusal("no scales", {"v_cache has no memory"}, CHANGE(c.in.v_cache.scales = {})),
      refusal("signs of another version", {"tq4", "signs of version 1", "got 2"},
              CHANGE(c.in.k_cache.shape.signs_version = 2)),
      refusal("k_cache of role v", {"k_cache must have role k, got v"},
              CHANGE(c.in.k_cache = make_cache(t, {KvFormat::tq4, KvRole::v, 3, 9, 64}))),
      refusal("v_cache of role k", {"v_cache must have role v, got k"},
              CHANGE(c.in.v_cache = make_cache(t, {KvFormat::tq3, KvRole::k, 3, 9, 80}))),
      refusal("V alone: v_cache of role k", {"v_cache must have role v, got k"},
              CHANGE(c.in = {.v = c.in.v,
                             .v_cache = make_cache(t, {KvFormat::tq3, KvRole::k, 3, 9, 80})})),
      refusal("K's memory called V", {"codes of v_cache", "[3, 2, 240]", "got", "[3, 16, 30]"},
              CHANGE(c.in.v_cache = make_cache(t, {KvFormat::tq3, KvRole::k, 3, 9, 80}),
                     c.in.v_cache.shape.role = KvRole::v)),
      refusal("unknown role", {"5 is not a role"},
              CHANGE(c.in.k_cache.shape.role = static_cast<KvRole>(5))),
  };
}

std::vector<Refusal> source_refusals() {
  return {
      refusal("neither k nor v", {"k, v or both must be defined", "got neither"},
              CHANGE(c.in = {})),
      refusal("k without k_cache", {"go together", "only k is"}, CHANGE(c.in.k_cache = {})),
      refusal("k_cache without k", {"go together", "only k_cache is"}, CHANGE(c.in.k = {})),
      refusal("k_cache without k, v left out", {"only k_cache is"},
              CHANGE(c.in = {.k_cache = c.in.k_cache})),
      refusal("v without v_cache", {"go together", "only v is"}, CHANGE(c.in.v_cache = {})),
      refusal("v_cache without v", {"only v_cache"}, CHANGE(c.in.v = {})),
      refusal("scales of v_cache without v", {"only v_cache"},
              CHANGE(c.in.v = c.in.v_cache.codes = {})),
      refusal("k of rank 2", {"k must be", "[15, 64]"}, CHANGE(c.in.k = c.in.k.reshape({15, 64}))),
      refusal("k of u8", {"k must be f32, f16 or bf16", "u8"},
              CHANGE(c.in.k = t.make(DType::u8, {5, 3, 64}))),
      refusal("v of another dtype", {"v must have the dtype of k", "f32", "got bf16"},
              CHANGE(c.in.v = t.make(DType::bf16, {5, 3, 80}))),
      refusal("kv_heads of k", {"k must have the cache's kv_heads 3", "got 2"},
              CHANGE(c.in.k = c.in.k.slice(1, 0, 2))),
      refusal("head_dim of k", {"k must have the cache's head_dim 64", "got 56"},
              CHANGE(c.in.k = c.in.k.slice(2, 0, 56))),
      refusal("head_dim of v", {"v must have the cache's head_dim 80", "got 72"},
              CHANGE(c.in.v = c.in.v.slice(2, 0, 72))),
      refusal("tokens of v", {"v must have the tokens of k", "5", "got 4"},
              CHANGE(c.in.v = c.in.v.slice(0, 0, 4))),
      refusal("head_dim of k with gaps", {"head_dim of k must be contiguous", "stride 2"},
              CHANGE(c.in.k = t.make(DType::f32, {1920}).strided({5, 3, 64}, {384, 128, 2}))),
      refusal("capacity of v_cache", {"capacity of k_cache: 9", "got 10"},
              CHANGE(c.in.v_cache = make_cache(t, {KvFormat::tq3, KvRole::v, 3, 10, 80}))),
      refusal("kv_heads of v_cache", {"kv_heads of k_cache: 3", "got 2"},
              CHANGE(c.in.v = t.make(DType::f32, {5, 2, 80}),
                     c.in.v_cache = make_cache(t, {KvFormat::tq3, KvRole::v, 2, 9, 80}))),
      refusal("read-only codes", {"read-only"},
              CHANGE(c.in.k_cache.codes = read_only(t.device(), c.in.k_cache.codes))),
      refusal("V alone: read-only codes", {"v_codes", "read-only"},
              [](auto& c, FilledTensors& t) {
                const Tensor& codes = c.in.v_cache.codes;
                const void* memory = address_of(codes);
                c.in.v_cache.codes = t.device().wrap(memory, DType::u8, codes.shape());
                c.in = {.v = c.in.v, .v_cache = c.in.v_cache};
              }),
      refusal("read-only scales of v", {"read-only"},
              CHANGE(c.in.v_cache.scales = read_only(t.device(), c.in.v_cache.scales))),
  };
}

std::vector<Refusal> overlap_refusals() {
  return {
      refusal("k in the codes", {"k and codes of k_cache share memory"},
              [](auto& c, FilledTensors& t) {
                const Tensor memory = t.make(DType::f32, {5, 3, 64});
                void* bytes = address_of(memory);
                c.in.k = t.device().wrap(bytes, DType::f32, {5, 3, 64});
                c.in.k_cache.codes =
                    t.device().wrap(static_cast<std::byte*>(bytes) + 512, DType::u8, {3, 16, 32});
              }),
      refusal("codes in the scales", {"codes of k_cache and scales of k_cache share memory"},
              [](auto& c, FilledTensors& t) {
                const Tensor memory = t.make(DType::u8, {3 * 16 * 32 + 64});
                c.in.k_cache.codes = memory.slice(0, 0, 3 * 16 * 32).reshape({3, 16, 32});
                c.in.k_cache.scales = memory.slice(0, 3 * 16 * 32 - 32, 96).reshape({3, 2, 1, 16});
              }),
      refusal(
          "k_cache is v_cache", {"codes of k_cache and codes of v_cache share memory"},
          CHANGE(c.in.v = c.in.k, c.in.v_cache = c.in.k_cache, c.in.v_cache.shape.role = KvRole::v,
                 c.in.v_cache.codes = c.in.k_cache.codes.reshape({3, 2, 256}))),
      refusal("both caches have the same scales",
              {"scales of k_cache and scales of v_cache share memory"},
              CHANGE(c.in.v = t.make(DType::f32, {5, 3, 64}),
                     c.in.v_cache = make_cache(t, {KvFormat::tq3, KvRole::v, 3, 9, 64}),
                     c.in.v_cache.scales = c.in.k_cache.scales)),
  };
}

std::vector<Refusal> range_refusals() {
  return {
      refusal("source_begin past the end", {"source_begin", "5", "got 6"},
              CHANGE(c.options.source_begin = 6)),
      refusal("too many tokens", {"3 tokens from source_begin 2", "asked for 4"},
              CHANGE(c.options = {.source_begin = 2, .tokens = 4})),
      refusal("begin + tokens passes 2^64", {"asked for " + std::to_string(kHuge)},
              CHANGE(c.options = {.source_begin = 2, .tokens = kHuge})),
      refusal("V alone: source_begin past the end", {"5 tokens of v", "got 6"},
              CHANGE(c.in = {.v = c.in.v, .v_cache = c.in.v_cache}, c.options.source_begin = 6)),
      refusal("V alone: too many tokens", {"v has 3 tokens from source_begin 2", "asked for 4"},
              CHANGE(c.in = {.v = c.in.v, .v_cache = c.in.v_cache},
                     c.options = {.source_begin = 2, .tokens = 4})),
      refusal("linear: one past the end", {"9 slots", "5 tokens", "position 5"},
              CHANGE(c.options.position = 5)),
      // Slots 9 to 15 have memory, the rest of a tile; they are no slots.
      refusal("linear: into the rest of the tile", {"9 slots", "1 tokens", "position 9"},
              CHANGE(c.options = {.position = 9, .tokens = 1})),
      refusal("linear: position + tokens passes 2^64", {"position " + std::to_string(kHuge - 4)},
              CHANGE(c.options.position = kHuge - 4)),
      refusal("no slots on a ring", {"capacity 0", "5 tokens"},
              CHANGE(c.in.k_cache = make_cache(t, {KvFormat::tq4, KvRole::k, 3, 0, 64}),
                     c.in.v_cache = make_cache(t, {KvFormat::tq3, KvRole::v, 3, 0, 80}),
                     c.options.cache = CacheKind::ring)),
  };
}

// What no cache can be; every entry point must say so, before anything is allocated.
struct BadShape {
  KvShape shape;
  std::vector<std::string> message;
};

std::vector<BadShape> bad_shapes() {
  std::vector<BadShape> list;
  for (const KvFormat format : native_formats()) {
    for (const uint64_t head_dim : {0u, 8u, 12u, 20u, 100u}) {
      list.push_back({{format, KvRole::k, 3, 9, head_dim},
                      {std::string(name(format)), "from 16 in steps of 8",
                       "got " + std::to_string(head_dim)}});
    }
    for (const uint64_t head_dim : {1032u, 2048u, 1u << 20}) {
      list.push_back({{format, KvRole::v, 3, 9, head_dim},
                      {"head_dim must be at most 1024", "got " + std::to_string(head_dim)}});
    }
  }
  for (const uint64_t head_dim : {0u, 1u, 2u, 80u, 96u}) {
    list.push_back(
        {{KvFormat::mlx_native4, KvRole::k, 3, 9, head_dim},
         {"mlx_native4", "powers of two from 4 to 1024", "got " + std::to_string(head_dim)}});
  }
  const auto scaled = [](KvFormat format, uint64_t head_dim, float factor) {
    return KvShape{.format = format,
                   .role = KvRole::k,
                   .kv_heads = 3,
                   .capacity = 9,
                   .head_dim = head_dim,
                   .scale_factor = factor};
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float factor : {0.0f, -1.0f, kInfinity, std::numeric_limits<float>::quiet_NaN()})
    list.push_back(
        {scaled(KvFormat::mlx_native4, 512, factor), {"scale_factor", "positive", "finite"}});
  list.push_back({scaled(KvFormat::tq4, 512, 16), {"scale_factor", "got 16", "for tq4 at 512"}});
  list.push_back({scaled(KvFormat::mlx_native4, 1024, 16), {"scale_factor", "got 16", "at 1024"}});
  list.push_back({scaled(KvFormat::mlx_native8, 256, 0.5f), {"scale_factor", "got 0.5", "at 256"}});
  for (const KvFormat format :
       {KvFormat::mlx_native5, KvFormat::mlx_native6, KvFormat::mlx_native8}) {
    for (const uint64_t head_dim : {64u, 128u, 384u, 1024u}) {
      list.push_back(
          {{format, KvRole::k, 3, 9, head_dim},
           {std::string(name(format)), "256 and 512", "got " + std::to_string(head_dim)}});
    }
  }
  list.push_back({{KvFormat::tq4, KvRole::k, 3, kHuge, 64}, {"capacity", std::to_string(kHuge)}});
  list.push_back({{KvFormat::tq4, KvRole::k, kHuge, 9, 64}, {"kv_heads", std::to_string(kHuge)}});
  list.push_back({{KvFormat::tq4, KvRole::k, 1u << 15, 9, 64}, {"kv_heads", "32768"}});
  list.push_back({{static_cast<KvFormat>(3), KvRole::k, 3, 9, 64}, {"3 is not a format"}});
  list.push_back({{static_cast<KvFormat>(255), KvRole::v, 3, 9, 64}, {"255 is not a format"}});
  list.push_back({{KvFormat::tq4, static_cast<KvRole>(2), 3, 9, 64}, {"2 is not a role"}});
  list.push_back({{KvFormat::tq8, KvRole::v, 3, 9, 64, 0}, {"tq8", "signs of version 1", "got 0"}});
  return list;
}

std::vector<Refusal> shape_refusals() {
  std::vector<Refusal> list;
  for (const BadShape& bad : bad_shapes()) {
    const std::string suffix = " of shape " + std::to_string(list.size() / 4);
    const auto add = [&](const char* what, std::function<void(Encoder&, FilledTensors&)> call) {
      list.push_back({what + suffix, bad.message, std::move(call)});
    };
    const KvShape shape = bad.shape;
    add("allocate", [shape](Encoder&, FilledTensors& t) { KvBuffer::allocate(t.device(), shape); });
    add("codes", [shape](Encoder&, FilledTensors&) { kv_codes_shape(shape); });
    add("scales", [shape](Encoder&, FilledTensors&) { kv_scales_shape(shape); });
    add("kv_quantize", [shape](Encoder& encoder, FilledTensors& t) {
      Call c = good_call(t);
      c.in.k_cache.shape = shape;
      kv_quantize(encoder, c.in, c.options);
    });
  }
  return list;
}

}  // namespace

std::vector<Refusal> kv_quantize_refusals() {
  return concat({format_refusals(), source_refusals(), overlap_refusals(), range_refusals(),
                 shape_refusals()});
}

}  // namespace gyre::test
