#pragma once

#include "abi/kv_codec.h"
#include "abi/kv_layout.h"
#include "gyre/format.h"

namespace gyre {

inline bool is_native(KvFormat format) { return abi::kv_is_native(static_cast<uint32_t>(format)); }
inline bool is_mlx_native(KvFormat format) {
  return abi::kv_is_mlx_native(static_cast<uint32_t>(format));
}

// Refuse what a format cannot store, and memory that does not fit its shape; `op` opens the
// messages.
void check_kv_shape(const char* op, const KvShape& shape);
void check_kv_buffer(const char* op, const char* what, const KvBuffer& buffer);
// A float tensor [tokens, kv_heads, head_dim] that goes with a cache.
void check_kv_rows(const char* op, const char* what, const Tensor& rows, const KvShape& shape);
void check_compressed(const char* op, const char* what, const KvBuffer& buffer);

abi::KvCacheLayout kv_cache_layout(const KvBuffer& buffer);

}  // namespace gyre
