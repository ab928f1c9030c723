#pragma once

#include "gyre_test.h"
#include "op_case.h"
#include "reference.h"

namespace gyre::test {

using reference::KvLayout;

constexpr DType kFloats[] = {DType::f32, DType::f16, DType::bf16};
constexpr KvLayout kPlainLayouts[] = {KvLayout::token_major, KvLayout::head_major};

// One kv_copy call as numbers; make_case() turns it into memory, call and expected result.
struct KvCopyCase {
  std::string name;
  DType source = DType::f32, cache = DType::f16;
  KvLayout source_layout = KvLayout::token_major;
  KvLayout cache_layout = KvLayout::head_major;
  uint64_t source_tokens = 5, capacity = 9, heads = 3, k_dim = 8;
  std::optional<uint64_t> v_dim;
  KvRange options;
  const std::vector<uint32_t>& (*source_bits)() = nullptr;  // K's values in order; random if null
};

OpCase make_case(const KvCopyCase& numbers);

// The view of a flat tensor that `side` describes.
Tensor kv_view(const Tensor& flat, const reference::KvSide& side);

std::string layout_name(KvLayout layout);

// The lists behind kv_copy_cases(), each with its theme.
std::vector<KvCopyCase> kv_layout_cases();
std::vector<KvCopyCase> kv_range_cases();
std::vector<KvCopyCase> kv_conversion_cases();
std::vector<KvCopyCase> kv_ring_cases();
std::vector<KvCopyCase> kv_empty_cases();

}  // namespace gyre::test
