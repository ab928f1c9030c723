#pragma once
// bytes_copy: rows of bytes, as they are.
#include "abi/types.h"

namespace gyre::abi {

struct BytesCopySpec {
  uint8_t unused[8];
};

struct BytesCopyParams {
  uint64_t bytes;  // of a row
  uint64_t rows;
  uint64_t from_stride, to_stride;  // bytes from a row to the next
};

}  // namespace gyre::abi
