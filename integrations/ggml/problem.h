#pragma once
// One FLASH_ATTN_EXT node as plain numbers: which memory, which shapes, which strides. Nothing of
// ggml is needed to build one, so that tests can.

#include <cstddef>
#include <cstdint>

namespace gyre::ggml {

// What rows of K and V are stored as. Blocks are ggml's: 32 values, an f16 scale and, in the types
// that end in 1, an f16 minimum in front of the codes.
enum class RowType : uint8_t { f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0 };
constexpr size_t kRowTypes = 8;

struct RowFormat {
  const char* name;  // ggml's name of the type
  uint32_t block;    // values of a block
  uint32_t block_bytes;
};
constexpr RowFormat kRowFormats[kRowTypes] = {{"f32", 1, 4},    {"f16", 1, 2},    {"bf16", 1, 2},
                                              {"q4_0", 32, 18}, {"q4_1", 32, 20}, {"q5_0", 32, 22},
                                              {"q5_1", 32, 24}, {"q8_0", 32, 34}};
constexpr const RowFormat& row_format(RowType type) {
  return kRowFormats[static_cast<size_t>(type)];
}
constexpr uint64_t row_bytes(RowType type, uint64_t values) {
  return values / row_format(type).block * row_format(type).block_bytes;
}

// Rows in memory: data + row * strides[0] + head * strides[1] + stream * strides[2], in bytes. What
// a row is: a cell of K or V, a token of Q, of the mask or of the output.
struct Rows {
  const uint8_t* data = nullptr;
  RowType type = RowType::f32;
  uint64_t strides[3] = {};
  uint64_t heads = 1, streams = 1;

  const uint8_t* row(uint64_t row, uint64_t head, uint64_t stream) const {
    return data + row * strides[0] + head * strides[1] + stream * strides[2];
  }
};

constexpr uint64_t kMaxDim = 1024;      // values of a row of K or V
constexpr uint64_t kMaxRows = 1 << 24;  // rows of queries of a node, cells of a cache

// softmax(cap(scale * q k) + slope * mask) v, for every token, head and stream of q. Query head h
// reads KV head h / (heads / kv_heads). A mask of -inf hides a cell; nothing else does.
struct Problem {
  Rows q;  // f32
  Rows k, v;
  Rows mask;  // f16, [token][cell]; null: every token sees every cell. Heads, streams: modulo
  const float* sinks = nullptr;  // per head: a logit without a value
  uint8_t* out = nullptr;        // f32
  uint64_t out_strides[3] = {};  // token, head, stream
  uint64_t k_dim = 0, v_dim = 0;
  uint64_t tokens = 0, cells = 0, heads = 0, streams = 0;
  float scale = 1, max_bias = 0, soft_cap = 0;

  uint64_t kv_heads() const { return k.heads; }
  uint64_t group() const { return heads / k.heads; }  // query heads of a KV head
};

// Why a problem cannot be computed, or null. Checks all but the pointers.
const char* refusal(const Problem& problem);

}  // namespace gyre::ggml
