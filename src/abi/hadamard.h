#pragma once
// hadamard: rows times the orthonormal Walsh-Hadamard transform, with signs.
#include "abi/types.h"

namespace gyre::abi {

struct HadamardSpec {
  uint8_t x_dtype;
  uint8_t out_dtype;
  uint8_t unused[6];
};

struct HadamardParams {
  uint64_t rows[2];  // outer, inner
  uint64_t x_stride[2];
  uint64_t out_stride[2];
  uint32_t head_dim;
  uint32_t inverse;
  uint32_t signs;  // HadamardSigns
  uint32_t unused;
};

}  // namespace gyre::abi
