#pragma once
#include "abi/types.h"

namespace gyre::cuda {

// Where a tile of one head begins.
struct TilePlace {
  uint8_t* codes;
  uint8_t* scales;
};

}  // namespace gyre::cuda
