#pragma once
#include "abi/types.h"

namespace gyre::cuda {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kAll = 0xFFFFFFFFu;

}  // namespace gyre::cuda
