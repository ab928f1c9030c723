#pragma once

#include <array>
#include <cstdint>

#include "abi/kv_codec.h"

namespace gyre::cpu {

// Sign bits of all coordinates, ready to be xor-ed into floats.
struct alignas(64) SignMasks : std::array<uint32_t, abi::kKvMaxHeadDim> {};

const SignMasks& native_signs();
const SignMasks& mlx_native_signs();  // 512 entries, zero beyond

}  // namespace gyre::cpu
