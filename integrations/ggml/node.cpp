#include "node.h"

#include <cstring>

namespace gyre::ggml {
namespace {

bool find_type(const Host& host, int type, RowType& found) {
  for (size_t i = 0; i < kRowTypes; ++i) {
    if (host.type[i] != type) continue;
    found = static_cast<RowType>(i);
    return true;
  }
  return false;
}

// Rows of [dim, rows, heads, streams]; false if values of a row do not lie side by side.
bool read_rows(const Host& host, const abi::Tensor& tensor, Rows& rows) {
  if (!find_type(host, tensor.type, rows.type)) return false;
  if (tensor.nb[0] != row_format(rows.type).block_bytes) return false;
  for (const int64_t count : tensor.ne) {
    if (count <= 0) return false;
  }
  rows.data = static_cast<const uint8_t*>(tensor.data);
  for (size_t i = 0; i < 3; ++i) rows.strides[i] = tensor.nb[i + 1];
  rows.heads = static_cast<uint64_t>(tensor.ne[2]);
  rows.streams = static_cast<uint64_t>(tensor.ne[3]);
  return true;
}

// Weights may lie repacked; what the CPU cannot address may not be read.
bool is_readable(const Host& host, const abi::Tensor& tensor) {
  const abi::Tensor* const root = tensor.view_src != nullptr ? tensor.view_src : &tensor;
  return root->buffer == nullptr || host.buffer_is_host(root->buffer);
}

bool is_aligned(const void* data, uint64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

const char* read_mask(const Host& host, const abi::Tensor& mask, Problem& p) {
  if (!read_rows(host, mask, p.mask) || p.mask.type != RowType::f16)
    return "a mask that is not f16";
  if (static_cast<uint64_t>(mask.ne[0]) < p.cells || static_cast<uint64_t>(mask.ne[1]) < p.tokens)
    return "a mask that is too small";
  if (!is_readable(host, mask) || !is_aligned(mask.data, 2)) return "a mask out of reach";
  return nullptr;
}

const char* read_sinks(const Host& host, const abi::Tensor& sinks, Problem& p) {
  Rows rows;
  if (!read_rows(host, sinks, rows) || rows.type != RowType::f32 ||
      static_cast<uint64_t>(sinks.ne[0]) != p.heads)
    return "sinks that are not one f32 per head";
  if (!is_readable(host, sinks) || !is_aligned(sinks.data, 4)) return "sinks out of reach";
  p.sinks = static_cast<const float*>(sinks.data);
  return nullptr;
}

const char* read_output(const Host& host, const abi::Tensor& node, Problem& p) {
  RowType type{};
  const auto is = [&](size_t dim, uint64_t count) {
    return static_cast<uint64_t>(node.ne[dim]) == count;
  };
  if (!find_type(host, node.type, type) || type != RowType::f32 || node.nb[0] != 4 ||
      !is(0, p.v_dim) || !is(1, p.heads) || !is(2, p.tokens) || !is(3, p.streams))
    return "an output of another shape or type";
  if (!is_readable(host, node) || !is_aligned(node.data, 4)) return "an output out of reach";
  p.out = static_cast<uint8_t*>(node.data);
  p.out_strides[0] = node.nb[2];
  p.out_strides[1] = node.nb[1];
  p.out_strides[2] = node.nb[3];
  return nullptr;
}

// scale, max_bias, soft cap; a precision and a bound on visible cells, which change no result.
void read_parameters(const abi::Tensor& node, Problem& p) {
  std::memcpy(&p.scale, node.op_params, 4);
  std::memcpy(&p.max_bias, node.op_params + 1, 4);
  std::memcpy(&p.soft_cap, node.op_params + 2, 4);
}

}  // namespace

const char* read_node(const Host& host, const abi::Tensor& node, Problem& p) {
  const abi::Tensor *const q = node.src[0], *const k = node.src[1], *const v = node.src[2];
  if (q == nullptr || k == nullptr || v == nullptr) return "no queries, keys or values";
  for (size_t i = 5; i < abi::kMaxSources; ++i) {
    if (node.src[i] != nullptr) return "more sources than are known";
  }
  for (size_t i = 5; i < abi::kOpParamBytes / 4; ++i) {
    if (node.op_params[i] != 0) return "more parameters than are known";
  }
  p = {};
  if (!read_rows(host, *q, p.q) || p.q.type != RowType::f32) return "queries that are not f32";
  if (!read_rows(host, *k, p.k) || !read_rows(host, *v, p.v)) return "a type of K or V";
  if (q->ne[0] != k->ne[0] || k->ne[1] != v->ne[1]) return "shapes that do not fit";
  if (!is_readable(host, *q) || !is_readable(host, *k) || !is_readable(host, *v))
    return "memory out of reach";
  if (!is_aligned(q->data, 4) || !is_aligned(k->data, p.k.type == RowType::f32 ? 4 : 2) ||
      !is_aligned(v->data, p.v.type == RowType::f32 ? 4 : 2))
    return "memory that is not aligned";
  p.k_dim = static_cast<uint64_t>(k->ne[0]);
  p.v_dim = static_cast<uint64_t>(v->ne[0]);
  p.cells = static_cast<uint64_t>(k->ne[1]);
  p.tokens = static_cast<uint64_t>(q->ne[1]);
  p.heads = static_cast<uint64_t>(q->ne[2]);
  p.streams = static_cast<uint64_t>(q->ne[3]);
  read_parameters(node, p);
  if (node.src[3] != nullptr) {
    if (const char* const why = read_mask(host, *node.src[3], p)) return why;
  }
  if (node.src[4] != nullptr) {
    if (const char* const why = read_sinks(host, *node.src[4], p)) return why;
  }
  if (const char* const why = read_output(host, node, p)) return why;
  return refusal(p);
}

}  // namespace gyre::ggml
