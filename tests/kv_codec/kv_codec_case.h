#pragma once

#include "format_classes.h"
#include "gyre_test.h"
#include "kv_codec/kv_codec_reference.h"
#include "kv_copy/kv_copy_case.h"

namespace gyre::test {

// Powers of two, several blocks, a last block of 8, more than one scale under one transform.
constexpr uint64_t kCodecHeadDims[] = {16, 24, 40, 64, 80, 96, 128, 192, 256, 264, 512, 576, 1024};

// What the rows hold. extreme: a row each of what leaves the range of f32 squares, zeros and
// non-finite values; ties: small integers, so that values fall on boundaries between codes;
// scale_edges: rows whose scale changes with the last bit of their sum of squares; subnormal: rows
// whose scale f32 holds with few bits, or none.
enum class KvValues : uint8_t { everyday, extreme, ties, scale_edges, subnormal };

// Values of `count` rows of head_dim coordinates.
std::vector<float> kv_values(KvValues kind, uint64_t count, uint64_t head_dim,
                             const std::string& seed);

struct KvStream {
  KvFormat format = KvFormat::tq4;
  uint64_t head_dim = 64;
};

// One kv_quantize call as numbers; make_case() turns it into memory, call and expected bytes.
struct KvQuantizeCase {
  std::string name;
  DType source = DType::f32;
  KvLayout layout = KvLayout::token_major;
  uint64_t source_tokens = 5, capacity = 9, heads = 2;
  std::optional<KvStream> k = KvStream{};  // K, V or both
  std::optional<KvStream> v;
  KvRange options;
  KvValues values = KvValues::everyday;
};

OpCase make_case(const KvQuantizeCase& numbers);

struct KvDequantizeCase {
  std::string name;
  DType out = DType::f32;
  KvLayout layout = KvLayout::token_major;
  KvRole role = KvRole::k;
  uint64_t capacity = 19, heads = 2;
  KvStream stream;
  uint64_t tokens = 5;
  KvDequantizeOptions options;
  KvValues values = KvValues::everyday;
};

OpCase make_case(const KvDequantizeCase& numbers);

reference::KvCoder coder_of(KvFormat format, KvRole role);

// Where a half of a cache keeps its bits.
reference::KvPlaces places_of(const KvShape& shape);

// `value` in block.near and block.after, within `tolerance` before one rounding to the block's
// dtype.
void expect_near(Block& block, uint64_t at, double value, double tolerance);

// The lists behind kv_quantize_cases() and kv_dequantize_cases(), each with its theme.
std::vector<KvQuantizeCase> kv_format_cases();
std::vector<KvQuantizeCase> kv_scale_edge_cases();
std::vector<KvQuantizeCase> kv_pair_cases();
std::vector<KvQuantizeCase> kv_slot_cases();
std::vector<KvQuantizeCase> kv_codec_range_cases();
std::vector<KvQuantizeCase> kv_feedback_subnormal_cases();
std::vector<KvDequantizeCase> kv_decode_cases();
std::vector<KvDequantizeCase> kv_decode_slot_cases();
std::vector<KvDequantizeCase> kv_decode_subnormal_cases();
std::vector<OpCase> kv_mlx_native_quantize_cases();
std::vector<OpCase> kv_mlx_native_dequantize_cases();

}  // namespace gyre::test
