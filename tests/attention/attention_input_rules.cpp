
#include "attention/attention_rules.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

constexpr uint64_t kHuge = ~uint64_t{0};

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

std::vector<Rule> query_rules() {
  return {
      Rule("no q", {"q is undefined"}, CHANGE(c.in.q = {})),
      Rule("q of rank 2", {"q must be [tokens, heads, head_dim]", "[12, 64]"},
           CHANGE(c.in.q = c.in.q.reshape({12, 64}))),
      Rule("q of u8", {"q must be f32, f16 or bf16", "got u8"},
           CHANGE(c.in.q = t.make(DType::u8, {3, 4, 64}))),
      Rule("head_dim of q", {"q must have the head_dim of k_cache: 64", "got 56"},
           CHANGE(c.in.q = c.in.q.slice(2, 0, 56))),
      Rule("q with gaps", {"head_dim of q must be contiguous", "stride 2"},
           CHANGE(c.in.q = t.make(DType::f32, {1536}).strided({3, 4, 64}, {512, 128, 2}))),
      Rule("heads not a multiple", {"heads must be a multiple of kv_heads 2", "got 3"},
           CHANGE(c.in.q = c.in.q.slice(1, 0, 3))),
      Rule("no heads", {"heads must be a multiple of kv_heads 2", "got 0"},
           CHANGE(c.in.q = c.in.q.slice(1, 0, 0))),
      // One element everywhere: such shapes cost no memory.
      Rule("more tokens than can be counted",
           {"at most 2^32 query tokens", std::to_string((uint64_t{1} << 32) + 1)},
           CHANGE(c.in.q = c.in.q.strided({(uint64_t{1} << 32) + 1, 4, 64}, {0, 64, 1}))),
      Rule("more heads than can be counted",
           {"at most 2^20 heads", std::to_string((uint64_t{1} << 20) + 2)},
           CHANGE(c.in.q = c.in.q.strided({3, (uint64_t{1} << 20) + 2, 64}, {64, 0, 1}))),
      Rule("q of another device", {"q lives on another device"},
           CHANGE(c.in.q = on_another_device(DType::f32, {3, 4, 64}))),
  };
}

std::vector<Rule> cache_rules() {
  return {
      Rule("k_cache without memory", {"k_cache has no memory"}, CHANGE(c.in.k_cache.codes = {})),
      Rule("k_cache without scales", {"k_cache has no memory"}, CHANGE(c.in.k_cache.scales = {})),
      Rule("v_cache without memory", {"v_cache has no memory"}, CHANGE(c.in.v_cache.codes = {})),
      Rule("dense cache with scales", {"v_cache is f16 and has no scales"},
           CHANGE(c.in.v_cache.scales = c.in.k_cache.scales)),
      Rule("k_cache of role v", {"k_cache must have role k"},
           CHANGE(c.in.k_cache = make_cache(t, {KvFormat::tq4, KvRole::v, 2, 9, 64}))),
      Rule("v_cache of role k", {"v_cache must have role v"},
           CHANGE(c.in.v_cache.shape.role = KvRole::k)),
      Rule("unknown role", {"7 is not a role"},
           CHANGE(c.in.v_cache.shape.role = static_cast<KvRole>(7))),
      Rule("dense head_dim below 16", {"head_dim of v_cache", "multiple of 8 from 16", "got 8"},
           CHANGE(c.in.v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 2, 9, 8}))),
      Rule("dense head_dim in between", {"head_dim of v_cache", "multiple of 8 from 16", "got 84"},
           CHANGE(c.in.v_cache = make_cache(t, {KvFormat::f32, KvRole::v, 2, 9, 84}))),
      Rule("head_dim past 1024", {"head_dim must be at most 1024", "got 1032"},
           CHANGE(c.in.k_cache.shape.head_dim = 1032)),
      Rule("no KV heads", {"k_cache has no heads"},
           CHANGE(c.in.k_cache = make_cache(t, {KvFormat::tq4, KvRole::k, 0, 9, 64}),
                  c.in.v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 0, 9, 80}))),
      Rule("kv_heads of v_cache", {"kv_heads of k_cache: 2", "got 4"},
           CHANGE(c.in.v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 4, 9, 80}))),
      Rule("capacity of v_cache", {"capacity of k_cache: 9", "got 10"},
           CHANGE(c.in.v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 2, 10, 80}))),
      Rule("capacity past the memory", {"v_cache must be f16 [2, 10, 80]", "got f16 [2, 9, 80]"},
           CHANGE(c.in.v_cache.shape.capacity = 10)),
      Rule("huge capacity", {"capacity must be at most 2^36", std::to_string(kHuge)},
           CHANGE(c.in.k_cache.shape.capacity = kHuge)),
      Rule("dense codes of another dtype", {"v_cache must be bf16", "got f16"},
           CHANGE(c.in.v_cache.shape.format = KvFormat::bf16)),
      Rule("codes of another format", {"codes of k_cache", "[2, 16, 64]", "got u8 [2, 16, 32]"},
           CHANGE(c.in.k_cache.shape.format = KvFormat::tq8)),
      Rule("dense codes with gaps", {"head_dim of v_cache must be contiguous", "stride 2"},
           CHANGE(c.in.v_cache.codes =
                      t.make(DType::f16, {2880}).strided({2, 9, 80}, {1440, 160, 2}))),
      Rule("v_cache of another device", {"v_codes lives on another device"},
           CHANGE(c.in.v_cache.codes = on_another_device(DType::f16, {2, 9, 80}))),
  };
}

std::vector<Rule> option_rules() {
  return {
      Rule("length past the capacity", {"length must be at most the capacity 9", "got 10"},
           CHANGE(c.options.length = 10)),
      // Slots 9 to 15 have memory, the rest of a tile; they are no slots.
      Rule("huge length", {"length must be at most the capacity 9", "got " + std::to_string(kHuge)},
           CHANGE(c.options.length = kHuge)),
      Rule("ring_start at the capacity", {"ring_start must be below the capacity 9", "got 9"},
           CHANGE(c.options.ring_start = 9)),
      Rule("huge ring_start",
           {"ring_start must be below the capacity 9", "got " + std::to_string(kHuge)},
           CHANGE(c.options.ring_start = kHuge)),
      Rule("scale is infinite", {"scale must be finite", "got inf"},
           CHANGE(c.options.scale = std::numeric_limits<float>::infinity())),
      Rule("scale too large", {"scale must be finite", "3e+38"}, CHANGE(c.options.scale = 3e38f)),
      Rule("scale is NaN", {"scale must be finite", "nan"}, CHANGE(c.options.scale = NAN)),
      Rule("soft_cap is negative", {"soft_cap must be finite and not negative", "got -1"},
           CHANGE(c.options.mask.soft_cap = -1)),
      Rule("soft_cap is infinite", {"soft_cap must be finite", "got inf"},
           CHANGE(c.options.mask.soft_cap = std::numeric_limits<float>::infinity())),
      Rule("soft_cap is NaN", {"soft_cap must be finite", "nan"},
           CHANGE(c.options.mask.soft_cap = NAN)),
      Rule("alibi_slopes of another size",
           {"alibi_slopes must be contiguous f32 [4]", "got f32 [3]"},
           CHANGE(c.options.mask.alibi_slopes = c.options.mask.alibi_slopes.slice(0, 0, 3))),
      Rule("alibi_slopes of another dtype", {"alibi_slopes must be contiguous f32 [4]", "got f16"},
           CHANGE(c.options.mask.alibi_slopes = t.make(DType::f16, {4}))),
      Rule("alibi_slopes with gaps", {"alibi_slopes must be contiguous", "strides [2]"},
           CHANGE(c.options.mask.alibi_slopes = t.make(DType::f32, {8}).strided({4}, {2}))),
      Rule("alibi_slopes of rank 2", {"alibi_slopes must be contiguous f32 [4]", "got f32 [4, 1]"},
           CHANGE(c.options.mask.alibi_slopes = t.make(DType::f32, {4, 1}))),
      Rule("tree_mask of other sizes", {"tree_mask must be u8 [3, 3]", "got u8 [3, 4]"},
           CHANGE(c.options.mask.tree_mask = t.make(DType::u8, {3, 4}))),
      Rule("tree_mask of another dtype", {"tree_mask must be u8 [3, 3]", "got i32"},
           CHANGE(c.options.mask.tree_mask = t.make(DType::i32, {3, 3}))),
      Rule("tree_mask on its side",
           {"tree_mask must be u8 [3, 3] with contiguous rows", "strides [1, 3]"},
           CHANGE(c.options.mask.tree_mask = c.options.mask.tree_mask.permute({1, 0}))),
      Rule("tree_mask with more queries than keys",
           {"with a tree_mask the queries must be in the cache", "3 queries", "length 2"},
           CHANGE(c.options.length = 2)),
  };
}

}  // namespace gyre::test
