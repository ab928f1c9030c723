#include <cmath>
#include <limits>
#include <string>

#include "attention/attention_rules.h"

namespace gyre::test {
namespace {

constexpr uint64_t kHuge = ~uint64_t{0};

using C = AttentionCall;
using T = FilledTensors;

}  // namespace

KvBuffer make_cache(FilledTensors& tensors, const KvShape& shape) {
  const KvFormatInfo info = describe(shape.format);
  const Dims codes = kv_codes_shape(shape);
  if (!info.compressed) {
    const DType dtype = shape.format == KvFormat::f32
                            ? DType::f32
                            : (shape.format == KvFormat::f16 ? DType::f16 : DType::bf16);
    return {shape, tensors.make(dtype, codes), {}};
  }
  return {shape, tensors.make(DType::u8, codes),
          tensors.make(info.scale == KvScaleKind::f32_norm ? DType::f32 : DType::u8,
                       kv_scales_shape(shape))};
}

std::vector<AttentionRule> query_rules() {
  return {
      {"no q", {"q is undefined"}, [](C& c, T&) { c.in.q = {}; }},
      {"q of rank 2",
       {"q must be [tokens, heads, head_dim]", "[12, 64]"},
       [](C& c, T&) {
         c.in.q = c.in.q.reshape({12, 64});
       }},
      {"q of u8",
       {"q must be f32, f16 or bf16", "got u8"},
       [](C& c, T& t) {
         c.in.q = t.make(DType::u8, {3, 4, 64});
       }},
      {"head_dim of q",
       {"q must have the head_dim of k_cache: 64", "got 56"},
       [](C& c, T&) { c.in.q = c.in.q.slice(2, 0, 56); }},
      {"q with gaps",
       {"head_dim of q must be contiguous", "stride 2"},
       [](C& c, T& t) {
         c.in.q = t.make(DType::f32, {1536}).strided({3, 4, 64}, {512, 128, 2});
       }},
      {"heads not a multiple",
       {"heads must be a multiple of kv_heads 2", "got 3"},
       [](C& c, T&) { c.in.q = c.in.q.slice(1, 0, 3); }},
      {"no heads",
       {"heads must be a multiple of kv_heads 2", "got 0"},
       [](C& c, T&) { c.in.q = c.in.q.slice(1, 0, 0); }},
      // One element everywhere: such shapes cost no memory.
      {"more tokens than can be counted",
       {"at most 2^32 query tokens", std::to_string((uint64_t{1} << 32) + 1)},
       [](C& c, T&) {
         c.in.q = c.in.q.strided({(uint64_t{1} << 32) + 1, 4, 64}, {0, 64, 1});
       }},
      {"more heads than can be counted",
       {"at most 2^20 heads", std::to_string((uint64_t{1} << 20) + 2)},
       [](C& c, T&) {
         c.in.q = c.in.q.strided({3, (uint64_t{1} << 20) + 2, 64}, {64, 0, 1});
       }},
      {"q of another device",
       {"q lives on another device"},
       [](C& c, T&) {
         c.in.q = Device::open("cpu", {.threads = 1}).tensor(DType::f32, {3, 4, 64});
       }},
  };
}

std::vector<AttentionRule> cache_rules() {
  return {
      {"k_cache without memory",
       {"k_cache has no memory"},
       [](C& c, T&) { c.in.k_cache.codes = {}; }},
      {"k_cache without scales",
       {"k_cache has no memory"},
       [](C& c, T&) { c.in.k_cache.scales = {}; }},
      {"v_cache without memory",
       {"v_cache has no memory"},
       [](C& c, T&) { c.in.v_cache.codes = {}; }},
      {"dense cache with scales",
       {"v_cache is f16 and has no scales"},
       [](C& c, T&) { c.in.v_cache.scales = c.in.k_cache.scales; }},
      {"k_cache of role v",
       {"k_cache must have role k"},
       [](C& c, T& t) {
         c.in.k_cache = make_cache(t, {KvFormat::tq4, KvRole::v, 2, 9, 64});
       }},
      {"v_cache of role k",
       {"v_cache must have role v"},
       [](C& c, T&) { c.in.v_cache.shape.role = KvRole::k; }},
      {"unknown role",
       {"7 is not a role"},
       [](C& c, T&) { c.in.v_cache.shape.role = static_cast<KvRole>(7); }},
      {"dense head_dim below 16",
       {"head_dim of v_cache", "multiple of 8 from 16", "got 8"},
       [](C& c, T& t) {
         c.in.v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 2, 9, 8});
       }},
      {"dense head_dim in between",
       {"head_dim of v_cache", "multiple of 8 from 16", "got 84"},
       [](C& c, T& t) {
         c.in.v_cache = make_cache(t, {KvFormat::f32, KvRole::v, 2, 9, 84});
       }},
      {"head_dim past 1024",
       {"head_dim must be at most 1024", "got 1032"},
       [](C& c, T&) { c.in.k_cache.shape.head_dim = 1032; }},
      {"no KV heads",
       {"k_cache has no heads"},
       [](C& c, T& t) {
         c.in.k_cache = make_cache(t, {KvFormat::tq4, KvRole::k, 0, 9, 64});
         c.in.v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 0, 9, 80});
       }},
      {"kv_heads of v_cache",
       {"kv_heads of k_cache: 2", "got 4"},
       [](C& c, T& t) {
         c.in.v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 4, 9, 80});
       }},
      {"capacity of v_cache",
       {"capacity of k_cache: 9", "got 10"},
       [](C& c, T& t) {
         c.in.v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 2, 10, 80});
       }},
      {"capacity past the memory",
       {"v_cache must be f16 [2, 10, 80]", "got f16 [2, 9, 80]"},
       [](C& c, T&) { c.in.v_cache.shape.capacity = 10; }},
      {"huge capacity",
       {"capacity must be at most 2^36", std::to_string(kHuge)},
       [](C& c, T&) { c.in.k_cache.shape.capacity = kHuge; }},
      {"dense codes of another dtype",
       {"v_cache must be bf16", "got f16"},
       [](C& c, T&) { c.in.v_cache.shape.format = KvFormat::bf16; }},
      {"codes of another format",
       {"codes of k_cache", "[2, 16, 64]", "got u8 [2, 16, 32]"},
       [](C& c, T&) { c.in.k_cache.shape.format = KvFormat::tq8; }},
      {"dense codes with gaps",
       {"head_dim of v_cache must be contiguous", "stride 2"},
       [](C& c, T& t) {
         c.in.v_cache.codes = t.make(DType::f16, {2880}).strided({2, 9, 80}, {1440, 160, 2});
       }},
      {"v_cache of another device",
       {"v_codes lives on another device"},
       [](C& c, T&) {
         c.in.v_cache.codes = Device::open("cpu", {.threads = 1}).tensor(DType::f16, {2, 9, 80});
       }},
  };
}

std::vector<AttentionRule> option_rules() {
  return {
      {"length past the capacity",
       {"length must be at most the capacity 9", "got 10"},
       [](C& c, T&) { c.options.length = 10; }},
      // Slots 9 to 15 have memory, the rest of a tile; they are no slots.
      {"huge length",
       {"length must be at most the capacity 9", "got " + std::to_string(kHuge)},
       [](C& c, T&) { c.options.length = kHuge; }},
      {"ring_start at the capacity",
       {"ring_start must be below the capacity 9", "got 9"},
       [](C& c, T&) { c.options.ring_start = 9; }},
      {"huge ring_start",
       {"ring_start must be below the capacity 9", "got " + std::to_string(kHuge)},
       [](C& c, T&) { c.options.ring_start = kHuge; }},
      {"scale is infinite",
       {"scale must be finite", "got inf"},
       [](C& c, T&) { c.options.scale = std::numeric_limits<float>::infinity(); }},
      {"scale too large",
       {"scale must be finite", "3e+38"},
       [](C& c, T&) { c.options.scale = 3e38f; }},
      {"scale is NaN", {"scale must be finite", "nan"}, [](C& c, T&) { c.options.scale = NAN; }},
      {"soft_cap is negative",
       {"soft_cap must be finite and not negative", "got -1"},
       [](C& c, T&) { c.options.mask.soft_cap = -1; }},
      {"soft_cap is infinite",
       {"soft_cap must be finite", "got inf"},
       [](C& c, T&) { c.options.mask.soft_cap = std::numeric_limits<float>::infinity(); }},
      {"soft_cap is NaN",
       {"soft_cap must be finite", "nan"},
       [](C& c, T&) { c.options.mask.soft_cap = NAN; }},
      {"alibi_slopes of another size",
       {"alibi_slopes must be contiguous f32 [4]", "got f32 [3]"},
       [](C& c, T&) { c.options.mask.alibi_slopes = c.options.mask.alibi_slopes.slice(0, 0, 3); }},
      {"alibi_slopes of another dtype",
       {"alibi_slopes must be contiguous f32 [4]", "got f16"},
       [](C& c, T& t) { c.options.mask.alibi_slopes = t.make(DType::f16, {4}); }},
      {"alibi_slopes with gaps",
       {"alibi_slopes must be contiguous", "strides [2]"},
       [](C& c, T& t) { c.options.mask.alibi_slopes = t.make(DType::f32, {8}).strided({4}, {2}); }},
      {"alibi_slopes of rank 2",
       {"alibi_slopes must be contiguous f32 [4]", "got f32 [4, 1]"},
       [](C& c, T& t) {
         c.options.mask.alibi_slopes = t.make(DType::f32, {4, 1});
       }},
      {"tree_mask of other sizes",
       {"tree_mask must be u8 [3, 3]", "got u8 [3, 4]"},
       [](C& c, T& t) {
         c.options.mask.tree_mask = t.make(DType::u8, {3, 4});
       }},
      {"tree_mask of another dtype",
       {"tree_mask must be u8 [3, 3]", "got i32"},
       [](C& c, T& t) {
         c.options.mask.tree_mask = t.make(DType::i32, {3, 3});
       }},
      {"tree_mask on its side",
       {"tree_mask must be u8 [3, 3] with contiguous rows", "strides [1, 3]"},
       [](C& c, T&) {
         c.options.mask.tree_mask = c.options.mask.tree_mask.permute({1, 0});
       }},
      {"tree_mask with more queries than keys",
       {"with a tree_mask the queries must be in the cache", "3 queries", "length 2"},
       [](C& c, T&) { c.options.length = 2; }},
  };
}

}  // namespace gyre::test
