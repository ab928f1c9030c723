#pragma once
// bytes_copy: bytes as they are.
#include "abi/types.h"

namespace gyre::abi {

struct BytesCopySpec {
  uint8_t unused[8];
};

struct BytesCopyParams {
  uint64_t bytes;
};

}  // namespace gyre::abi
