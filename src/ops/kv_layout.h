#pragma once

#include "abi/kv_layout.h"
#include "gyre/kv_format.h"

namespace gyre {

// Refuse what a format cannot store, and memory that does not fit its shape; `op` opens the
// messages.
void check_kv_shape(const char* op, const KvShape& shape);
void check_kv_buffer(const char* op, const char* what, const KvBuffer& buffer);
void check_compressed(const char* op, const char* what, const KvBuffer& buffer);

abi::KvCacheLayout kv_cache_layout(const KvBuffer& buffer);

}  // namespace gyre
