// Attention over linear caches, rings and pages, and over partial states.
#include <algorithm>

#include "runtime/storage.h"
#include "stress/fuzz_world.h"

namespace gyre::test {
namespace {

struct Shapes {
  uint64_t tokens, kv_heads, heads, dim, v_dim, capacity;
};

Shapes some_shapes(FuzzWorld& w) {
  FuzzInput& in = w.in;
  Shapes made{};
  made.tokens = in.chance(8) ? in.below(20) : 1 + in.below(4);
  made.kv_heads = 1 + in.below(2);
  made.heads = made.kv_heads * (1 + in.below(4));
  made.dim = w.head_dim();
  made.v_dim = in.chance(4) ? w.head_dim() : made.dim;
  made.capacity = 1 + in.below(40);
  return made;
}

// Rows that are written, so that every code and scale is one that an encoder made.
KvBuffer written(FuzzWorld& w, KvRole role, const Shapes& shapes) {
  const uint64_t dim = role == KvRole::k ? shapes.dim : shapes.v_dim;
  const KvFormat format = w.format();
  const KvBuffer made = w.buffer({format, role, shapes.kv_heads, shapes.capacity, dim});
  if (w.in.spoil()) return made;
  const Tensor rows = w.floats({shapes.capacity, shapes.kv_heads, dim});
  if (!describe(format).compressed) {
    w.call("kv_copy", [&] {
      kv_copy(w.encoder, {.k = rows, .k_cache = made.codes.permute({1, 0, 2})});
    });
  } else {
    KvQuantizeInputs write{.k = rows, .k_cache = made};
    if (role == KvRole::v) write = {.v = rows, .v_cache = made};
    w.call("kv_quantize", [&] { kv_quantize(w.encoder, write); });
  }
  return made;
}

AttentionOptions some_options(FuzzWorld& w, const Shapes& shapes) {
  FuzzInput& in = w.in;
  AttentionOptions made;
  made.length = in.number(std::min(shapes.capacity, shapes.tokens + in.below(40)));
  if (in.chance(3)) made.ring_start = in.number(in.below(shapes.capacity));
  if (in.chance(2)) made.scale = in.real(0.25f);
  made.mask.causal = !in.chance(4);
  if (in.chance(3)) made.mask.window = in.number(1 + in.below(20));
  if (in.chance(4)) made.mask.soft_cap = in.real(15.0f);
  if (in.chance(4)) made.mask.alibi_slopes = w.packed(DType::f32, {shapes.heads});
  return made;
}

// An average of values from -1 to 1; what a format loses may add to it.
constexpr float kMaxAverage = 2.5f;

void fuzz_attention(FuzzWorld& w, FuzzInput& in) {
  const Shapes shapes = some_shapes(w);
  AttentionInputs inputs{.q = w.floats({shapes.tokens, shapes.heads, shapes.dim}),
                         .k_cache = written(w, KvRole::k, shapes),
                         .v_cache = written(w, KvRole::v, shapes),
                         .out = w.floats({shapes.tokens, shapes.heads, shapes.v_dim})};
  if (in.chance(3)) inputs.lse = w.tensor(DType::f32, {shapes.tokens, shapes.heads});
  AttentionOptions options = some_options(w, shapes);
  if (in.chance(4)) options.mask.sink_logits = w.packed(DType::f32, {shapes.heads});
  if (in.chance(6)) options.mask.tree_mask = w.packed(DType::u8, {shapes.tokens, shapes.tokens});
  const bool compare = w.checked();
  if (!w.call("attention", [&] { attention(w.some_encoder(), inputs, options); })) return;
  if (!compare || in.spoiled() || !w.submit()) return;
  expect_bounded(inputs.out, kMaxAverage, "an average of values up to 1");
}

void fuzz_partial(FuzzWorld& w, FuzzInput& in) {
  const Shapes shapes = some_shapes(w);
  const uint64_t splits = 1 + in.below(4);
  const Tensor q = w.floats({shapes.tokens, shapes.heads, shapes.dim});
  Dims shape;
  if (!w.call("attention_partial_shape",
              [&] { shape = attention_partial_shape(in.number(splits), q.shape(), shapes.v_dim); }))
    return;
  AttentionPartialInputs inputs{.q = q,
                                .k_cache = written(w, KvRole::k, shapes),
                                .v_cache = written(w, KvRole::v, shapes),
                                .partial = w.packed(DType::f32, shape)};
  const AttentionOptions options = some_options(w, shapes);
  const bool made =
      w.call("attention_partial", [&] { attention_partial(w.some_encoder(), inputs, options); });
  AttentionMergeInputs merge{.partial = inputs.partial,
                             .out = w.floats({shapes.tokens, shapes.heads, shapes.v_dim})};
  if (in.chance(3)) merge.lse = w.tensor(DType::f32, {shapes.tokens, shapes.heads});
  if (in.chance(4)) merge.sink_logits = w.packed(DType::f32, {shapes.heads});
  const bool compare = w.checked();
  const bool merged = w.call("attention_merge", [&] { attention_merge(w.some_encoder(), merge); });
  if (!made || !merged || !compare || in.spoiled() || !w.submit()) return;
  expect_bounded(merge.out, kMaxAverage, "a merged average of values up to 1");
}

void fuzz_paged(FuzzWorld& w, FuzzInput& in) {
  const Shapes shapes = some_shapes(w);
  const uint64_t sequences = 1 + in.below(3), pages = 1 + in.below(5), width = 1 + in.below(4);
  const KvPageShape page{.k = w.format(),
                         .v = w.format(),
                         .kv_heads = shapes.kv_heads,
                         .head_dim = shapes.dim,
                         .v_head_dim = shapes.v_dim,
                         .page_tokens = in.number(8 * (1 + in.below(2)))};
  PagedAttentionInputs inputs{
      .q = w.floats({shapes.tokens, shapes.heads, shapes.dim}),
      .pages = w.pages(page, pages),
      .page_table = w.indices(DType::i32, {sequences, width}, pages),
      .kv_lengths = w.indices(DType::i32, {sequences}, width * page.page_tokens),
      .cu_seqlens_q = w.indices(DType::i32, {sequences + 1}, shapes.tokens + 1),
      .out = w.floats({shapes.tokens, shapes.heads, shapes.v_dim})};
  if (in.chance(3)) inputs.is_prefill = w.packed(DType::u8, {sequences});
  if (in.chance(3)) inputs.lse = w.tensor(DType::f32, {shapes.tokens, shapes.heads});
  Tensor scratch;
  if (in.chance(8)) inputs.scratch = &scratch;
  PagedAttentionOptions options{.max_query_length = in.number(1 + in.below(20)),
                                .max_kv_length = in.number(in.chance(2) ? 0 : in.below(40)),
                                .scale = in.real(0.25f),
                                .mask = {.causal = !in.chance(4),
                                         .window = in.chance(3) ? in.number(1 + in.below(20)) : 0,
                                         .soft_cap = in.chance(4) ? in.real(15.0f) : 0.0f}};
  if (in.chance(4)) options.mask.sink_logits = w.packed(DType::f32, {shapes.heads});
  if (in.chance(4)) options.mask.alibi_slopes = w.packed(DType::f32, {shapes.heads});
  // What the tables say is anything: borders are what is checked.
  w.call("attention(pages)", [&] { attention(w.some_encoder(), inputs, options); });
  if (in.chance(2)) w.submit();
}

}  // namespace

// Runs of numbers that go up, as tables of slots, lengths and positions do; odd: any.
Tensor FuzzWorld::indices(DType dtype, const Dims& shape, uint64_t limit) {
  Tensor made = packed(dtype, shape);
  if (!made.defined() || made.elements() > 256 || made.is_read_only() ||
      storage_of(made)->host() == nullptr)
    return made;
  const uint64_t first = limit == 0 ? 0 : in.below(std::min<uint64_t>(limit, 256));
  const auto number = [&](uint64_t i) -> int64_t {
    if (in.chance(32)) {
      const std::array<int64_t, 6> kOdd = {
          -1, -2147483648LL, 2147483647, static_cast<int64_t>(limit), 0, 1};
      return in.one_of(kOdd);
    }
    return limit == 0 ? 0 : static_cast<int64_t>((first + i) % limit);
  };
  if (made.dtype() == DType::i32) {
    std::vector<int32_t> filled(made.elements());
    for (size_t i = 0; i < filled.size(); ++i) filled[i] = static_cast<int32_t>(number(i));
    made.write_from(std::span<const int32_t>(filled));
  } else if (made.dtype() == DType::i64) {
    std::vector<int64_t> filled(made.elements());
    for (size_t i = 0; i < filled.size(); ++i) filled[i] = number(i);
    made.write_from(std::span<const int64_t>(filled));
  }
  return made;
}

std::span<const FuzzCall> fuzz_attention_calls() {
  static constexpr FuzzCall kCalls[] = {fuzz_attention, fuzz_partial, fuzz_paged};
  return kCalls;
}

}  // namespace gyre::test
