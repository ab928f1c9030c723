#include "problem.h"

namespace gyre::ggml {
namespace {

bool is_divided(uint64_t count, uint64_t by) { return by > 0 && count % by == 0; }

// Whether rows lie where their types may be read: strides in whole elements of 4 or 2 bytes.
bool is_aligned(const Rows& rows, uint64_t bytes) {
  for (const uint64_t stride : rows.strides) {
    if (stride % bytes != 0) return false;
  }
  return true;
}

uint64_t alignment(RowType type) { return type == RowType::f32 ? 4 : 2; }

}  // namespace

const char* refusal(const Problem& p) {
  if (p.k_dim == 0 || p.k_dim > kMaxDim || p.v_dim == 0 || p.v_dim > kMaxDim)
    return "head dims outside 1 to 1024";
  if (p.k_dim % row_format(p.k.type).block != 0 || p.v_dim % row_format(p.v.type).block != 0)
    return "a row that is not whole blocks";
  if (p.tokens == 0 || p.heads == 0 || p.streams == 0) return "no rows of queries";
  if (p.cells == 0 || p.cells > kMaxRows) return "cells outside 1 to 2^24";
  if (p.tokens > kMaxRows || p.heads > 4096 || p.streams > 65536 || p.tokens * p.heads > kMaxRows ||
      p.tokens * p.heads * p.streams > kMaxRows)
    return "more than 2^24 rows of queries";
  if (p.k.heads != p.v.heads) return "K and V with different numbers of heads";
  if (!is_divided(p.heads, p.k.heads)) return "query heads that KV heads do not divide";
  if (!is_divided(p.streams, p.k.streams) || !is_divided(p.streams, p.v.streams))
    return "streams that those of K or V do not divide";
  if (!is_divided(p.heads, p.mask.heads) || !is_divided(p.streams, p.mask.streams))
    return "a mask whose heads or streams do not divide those of the queries";
  if (!is_aligned(p.q, 4) || !is_aligned(p.mask, 2) || !is_aligned(p.k, alignment(p.k.type)) ||
      !is_aligned(p.v, alignment(p.v.type)))
    return "strides that are not whole elements";
  for (const uint64_t stride : p.out_strides) {
    if (stride % 4 != 0) return "strides that are not whole elements";
  }
  // A slope of ALiBi is a power of it; NaN and infinity would be, too.
  if (!(p.max_bias >= 0 && p.max_bias < 1e6f)) return "max_bias outside 0 to 1e6";
  if (!(p.soft_cap >= 0 && p.soft_cap < 1e30f)) return "a soft cap that is negative or not finite";
  if (!(p.scale > -1e30f && p.scale < 1e30f)) return "a scale that is not finite";
  return nullptr;
}

}  // namespace gyre::ggml
