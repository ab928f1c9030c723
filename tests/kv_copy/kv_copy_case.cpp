#include "kv_copy/kv_copy_case.h"

#include <algorithm>

namespace gyre::test {
namespace {

using reference::KvSide;

struct Sides {
  KvSide source, cache;
};

Sides sides_of(const KvCopyCase& c, uint64_t stream) {
  const uint64_t dims[2] = {c.k_dim, c.v_dim.value_or(0)};
  const uint64_t head_dim = dims[stream], other_dim = dims[1 - stream];
  return {{c.source, c.source_layout, c.source_tokens, c.heads, head_dim, stream, other_dim},
          {c.cache, c.cache_layout, c.capacity, c.heads, head_dim, stream, other_dim}};
}

uint64_t copied_tokens(const KvCopyCase& c) {
  return c.options.tokens.value_or(c.source_tokens - c.options.source_begin);
}

// Half of the f32 values are of everyday size, the rest any bits: NaN, infinities, subnormals.
Bytes random_values(const KvSide& side, const std::string& name, size_t block) {
  std::mt19937 random = random_of(str_cat(name, block));
  std::normal_distribution<float> everyday;
  Bytes bytes(side.elements() * size_bytes(side.dtype));
  for (uint64_t i = 0; i < side.elements(); ++i) {
    const bool any = side.dtype != DType::f32 || random() % 2 == 0;
    const uint32_t bits =
        any ? static_cast<uint32_t>(random()) : std::bit_cast<uint32_t>(everyday(random));
    reference::store_bits(side.dtype, bytes.data(), i, bits);
  }
  return bytes;
}

Bytes given_values(const KvSide& side, const std::vector<uint32_t>& bits) {
  Bytes bytes(side.elements() * size_bytes(side.dtype));
  for (uint64_t i = 0; i < bits.size(); ++i)
    reference::store_bits(side.dtype, bytes.data(), i, bits[i]);
  return bytes;
}

bool share_a_block(KvLayout layout) {
  return layout == KvLayout::interleaved || layout == KvLayout::packed;
}

// Where the blocks of a case are: interleaved and packed K and V share one.
struct BlockIndex {
  size_t source[2] = {0, 0};
  size_t cache[2] = {1, 1};
};

BlockIndex block_index(const KvCopyCase& c) {
  BlockIndex index;
  size_t next = 2;
  if (c.v_dim && !share_a_block(c.source_layout)) index.source[1] = next++;
  if (c.v_dim && !share_a_block(c.cache_layout)) index.cache[1] = next++;
  return index;
}

// Such streams meet in one block: the second starts from what the first one left.
std::vector<Block> make_blocks(const KvCopyCase& c, const BlockIndex& index) {
  std::vector<Block> blocks(1 + std::max(index.source[1], index.cache[1]));
  for (const uint64_t stream : {0u, 1u}) {
    if (stream == 1 && !c.v_dim) continue;
    const auto [source, cache] = sides_of(c, stream);
    Block& from = blocks[index.source[stream]];
    from.dtype = c.source;
    from.before = c.source_bits == nullptr ? random_values(source, c.name, index.source[stream])
                                           : given_values(source, c.source_bits());
    from.after = from.before;
    Block& to = blocks[index.cache[stream]];
    to.dtype = c.cache;
    to.before = pattern_bytes(cache.elements() * size_bytes(c.cache), 7);
    if (to.after.empty()) to.after = to.before;
    reference::kv_copy(source, cache,
                       {c.options.position, c.options.source_begin, copied_tokens(c)}, from.before,
                       to.after);
  }
  return blocks;
}

void record_copy(const KvCopyCase& c, const BlockIndex& index, Encoder& encoder,
                 std::span<const Tensor> tensors) {
  KvCopyInputs inputs;
  const auto [k_source, k_cache] = sides_of(c, 0);
  inputs.k = kv_view(tensors[index.source[0]], k_source);
  inputs.k_cache = kv_view(tensors[index.cache[0]], k_cache);
  if (c.v_dim) {
    const auto [v_source, v_cache] = sides_of(c, 1);
    inputs.v = kv_view(tensors[index.source[1]], v_source);
    inputs.v_cache = kv_view(tensors[index.cache[1]], v_cache);
  }
  kv_copy(encoder, inputs, c.options);
}

}  // namespace

std::string layout_name(KvLayout layout) {
  constexpr const char* kNames[] = {"tokens", "heads", "interleaved", "padded", "packed"};
  return kNames[static_cast<size_t>(layout)];
}

Tensor kv_view(const Tensor& flat, const reference::KvSide& s) {
  switch (s.layout) {
    case KvLayout::token_major:
      return flat.reshape({s.tokens, s.heads, s.head_dim});
    case KvLayout::head_major:
      return flat.reshape({s.heads, s.tokens, s.head_dim}).permute({1, 0, 2});
    case KvLayout::interleaved:
      return flat.strided({s.tokens, s.heads, s.head_dim},
                          {2 * s.heads * s.head_dim, s.head_dim, 1},
                          s.stream * s.heads * s.head_dim);
    case KvLayout::packed:
      return flat.reshape({s.tokens, s.heads, s.head_dim + s.other_dim})
          .slice(2, s.stream == 0 ? 0 : s.other_dim, s.head_dim);
    case KvLayout::padded:
      break;
  }
  return flat.reshape({s.tokens, s.heads, s.head_dim + reference::kRowPadding})
      .slice(2, 0, s.head_dim);
}

OpCase make_case(const KvCopyCase& numbers) {
  const auto supported = [numbers](const Device& device) {
    return supports(device, KvCopyTypes{numbers.source, numbers.cache});
  };
  const auto make = [numbers] {
    const BlockIndex index = block_index(numbers);
    const uint64_t coordinates = numbers.k_dim + numbers.v_dim.value_or(0);
    OpRun run;
    run.blocks = make_blocks(numbers, index);
    run.commands = copied_tokens(numbers) * numbers.heads * coordinates == 0 ? 0 : 1;
    run.record = [numbers, index](Encoder& encoder, std::span<const Tensor> tensors) {
      record_copy(numbers, index, encoder, tensors);
    };
    return run;
  };
  return {.name = "kv_copy " + numbers.name, .supported = supported, .make = make};
}

std::vector<OpCase> kv_copy_cases() {
  return make_cases<KvCopyCase>({kv_layout_cases(), kv_range_cases(), kv_conversion_cases(),
                                 kv_ring_cases(), kv_empty_cases()});
}

}  // namespace gyre::test
