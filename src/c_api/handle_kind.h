#pragma once

#include <cstdint>

namespace gyre::c_api {

// The first member of every handle of C's, so that a handle of another type is refused: C converts
// pointers with no more than a warning, and callers through ctypes get none.
enum class HandleKind : uint64_t {
  device = 0x4779'7265'0000'0001,  // "Gyre"
  device_list,
  tensor,
  encoder,
  fence,
  graph,
  custom_kernel,
  kv_buffer,
  kv_pages,
  kv_cache,
  kv_pool,
  kv_sequence,
  kv_batch,
  bytes,
};

// "a gyre_tensor"; of another number what it may be.
const char* name_of(HandleKind kind);

}  // namespace gyre::c_api
