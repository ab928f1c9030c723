#pragma once
// Sine and cosine of a 32-bit fraction of a turn, operation by operation the same on every GPU. The
// nearest quarter turn comes off exactly; polynomials of least maximum error, within 7e-8 of the
// truth, do the rest. Ops has fma, float_of and bits_of of the compiler.
#include "abi/types.h"

namespace gyre::abi {

struct TurnAngle {
  float cosine, sine;
};

template <class Ops>
TurnAngle angle_of_turn(uint32_t turn, const GYRE_THREAD Ops& ops) {
  const uint32_t quarter = (turn + 0x20000000u) >> 30;
  const auto left = static_cast<int32_t>(turn - (quarter << 30));
  const float x = static_cast<float>(left) * 0x1.921fb6p-30f;  // 2 pi / 2^32
  const float x2 = x * x;
  float s = ops.fma(x2, -0x1.98da64p-13f, 0x1.1105b4p-7f);
  s = ops.fma(x2, s, -0x1.555540p-3f);
  s = ops.fma(x * x2, s, x);
  float c = ops.fma(x2, 0x1.9a0258p-16f, -0x1.6c0c8cp-10f);
  c = ops.fma(x2, c, 0x1.55554ap-5f);
  c = ops.fma(x2, c, -0.5f);
  c = ops.fma(x2, c, 1.0f);
  const bool swaps = (quarter & 1u) != 0;
  // Bit 1 of the quarter is the sign of the sine, bit 1 of the next quarter that of the cosine.
  return {ops.float_of(ops.bits_of(swaps ? s : c) ^ (quarter + 1) >> 1 << 31),
          ops.float_of(ops.bits_of(swaps ? c : s) ^ quarter >> 1 << 31)};
}

}  // namespace gyre::abi
