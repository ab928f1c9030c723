#pragma once
#include "abi/types.h"

namespace gyre::cuda {

// Where a tile of one head begins.
struct TileAddress {
  uint8_t* codes;
  uint8_t* scales;
};

}  // namespace gyre::cuda
