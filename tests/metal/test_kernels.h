#pragma once
// Kernels for tests of the Metal backend, as MSL text and as the host kernels that the stand-in
// runs in its place: arithmetic on bytes whose order shows in the result.

#include "gyre_test.h"

namespace gyre::test {

struct MixParams {
  uint64_t a_bytes = 0, b_bytes = 0, out_bytes = 0;
  uint32_t salt = 0, fold = 0;
};

inline uint8_t mixed(uint8_t a, uint8_t b, uint8_t out, uint64_t i, const MixParams& p) {
  return static_cast<uint8_t>(a * 7 + b * 13 + i * 5 + p.salt + (p.fold != 0 ? out * 3 : 0));
}

// out[i] = mixed(a[i % a_bytes], b[i % b_bytes], out[i], i): what is absent or has no bytes is 0.
const CustomKernel& mix_kernel();
// The word of buffer(17) to out, and the first byte of each argument that is there behind it.
const CustomKernel& arguments_kernel();

struct MixCall {
  Tensor a{}, b{}, out{};  // u8
  uint32_t salt = 1;
  bool fold = false;  // reads out as well
  CustomLaunch launch = {.grid = {2, 1, 1}, .block = 64};
};
void record_mix(Encoder& encoder, const MixCall& call);
// out becomes a, byte for byte.
void record_copy(Encoder& encoder, const Tensor& a, const Tensor& out);

}  // namespace gyre::test
