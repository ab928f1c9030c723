#pragma once
// How far attention may be from double precision over the dequantized cache: ten times what was
// measured, for each arithmetic that a device may use on keys and on values. tests/README.md has
// the table; op_test prints what it measures.

#include "cpu/attention/isa/kernels.h"
#include "gyre_test.h"

namespace gyre::test {

// Soft caps and slopes add rounding of their own to logits.
constexpr double kSoftenedNmse = 2.5e-10, kSoftenedLogit = 2e-5;

// One side of attention. Normal queries, keys and values, logits of unit variance.
struct SideError {
  const char* name;
  double nmse;   // of the output, from this side alone; a tenth of the bound
  double logit;  // largest error of a logit; 0 for values
  double softened_nmse = kSoftenedNmse;  // what a soft cap or slopes add
};

// With f32 arithmetic alone, the error is the noise of sums, exponentials and the merge.
constexpr SideError kCpuF32K{"cpu f32", 6e-13, 5e-6}, kCpuF32V{"f32", 6e-13, 0};
constexpr SideError kCpuInt8K{"cpu int8", 2e-9, 1.1e-4}, kCpuInt8V{"int8", 4.2e-9, 0};
// Not measured on this project's machines: two bf16 have 16 bits, f16 probabilities 11.
constexpr SideError kCpuBf16K{"cpu bf16", 1e-10, 1e-5}, kCpuBf16V{"bf16", 1e-10, 0};
// Where prompts over f16 and bf16 go through bf16 matrix products. Measured are 2.8e-6; the bound
// is 6e-6, not ten times that.
constexpr SideError kCpuPromptV{"weights of 8 bits", 6e-7, 0};
constexpr SideError kCpuF16K{"cpu f16", 6e-13, 5e-6}, kCpuF16V{"f16", 1e-8, 0};

// attention.cu: queries over levels in 15 bits, weights over levels and f16 in 11, over bf16 in 16.
constexpr SideError kCudaF32K{"cuda f32", 1e-12, 5e-6}, kCudaF32V{"f32", 1e-12, 0};
constexpr SideError kCudaHalfK{"cuda 16-bit", 1e-11, 1e-5}, kCudaF16V{"f16", 4.5e-8, 0};
constexpr SideError kCudaLevelsK{"cuda levels", 8e-9, 2.6e-4}, kCudaLevelsV{"levels", 4.5e-8, 0};
constexpr SideError kCudaBf16V{"bf16", 1.2e-11, 0};

// attention_decode: weights over levels in 13 to 16 bits of the row's largest, so that few keys
// with one loud one, which slopes make, show the most. The bounds are 1e-6 and 2e-6, not ten times
// what was measured: ten would hide a lost bit.
constexpr SideError kDecodeHalfK{"decode 16-bit", 1e-11, 1e-5}, kDecodeF16V{"f16", 5e-8, 0};
constexpr SideError kDecodeLevelsK{"decode levels", 8e-9, 2.6e-4},
    kDecodeLevelsV{"levels", 9e-8, 0, 1e-7};
constexpr SideError kDecodeBf16V{"bf16", 1.6e-11, 0};

// attention_many_rows: queries over levels, levels times scales and weights in 11 bits, weights
// over bf16 in 8. Measured are 2.8e-6 over bf16; the bound is 6e-6, not ten times that. K and V of
// levels are 2.1e-7 together.
constexpr SideError kRowsHalfK{"many rows 16-bit", 1e-11, 1e-5},
    kRowsLevelsK{"many rows levels", 2e-8, 4e-4};
constexpr SideError kRowsBf16V{"bf16", 6e-7, 0};

// attention_latent: the bound of the output is 1e-6.
constexpr SideError kLatentK{"latent", 5e-8, 2.6e-4}, kLatentV{"latent", 4.9e-8, 0, 1e-10};

// Metal's kernels compute in f32, with simdgroup matrices, too.
constexpr SideError kMetalK{"metal f32", 5e-13, 5e-6}, kMetalV{"f32", 5e-13, 0, 6e-12};

enum class Side : bool { k, v };

// `description` is DeviceImpl::describe of the attention kernel: the CPU names the arithmetic of
// both sides ("dotprod: K int8, V f32"), GPUs the kernel.
inline SideError side_error(const std::string& description, KvFormat format, Side side) {
  const bool k = side == Side::k, levels = describe(format).scale == KvScaleKind::u8e8;
  const bool f16 = format == KvFormat::f16, bf16 = format == KvFormat::bf16;
  if (description.find("metal") != std::string::npos) return k ? kMetalK : kMetalV;
  if (description.find("attention_latent") != std::string::npos) return k ? kLatentK : kLatentV;
  // If there are several kernels, the one with the largest errors counts.
  if (description.find("attention_many_rows") != std::string::npos) {
    if (k) return levels ? kRowsLevelsK : kRowsHalfK;
    if (bf16) return kRowsBf16V;
  }
  if (description.find("attention_decode") != std::string::npos) {
    if (levels) return k ? kDecodeLevelsK : kDecodeLevelsV;
    if (k) return kDecodeHalfK;
    return f16 ? kDecodeF16V : kDecodeBf16V;
  }
  if (description.find("cuda") != std::string::npos) {
    if (levels) return k ? kCudaLevelsK : kCudaLevelsV;
    if (k) return f16 || bf16 ? kCudaHalfK : kCudaF32K;
    if (f16) return kCudaF16V;
    return bf16 ? kCudaBf16V : kCudaF32V;
  }
  const size_t at = description.find(k ? "K " : "V ");
  const auto is = [&](const char* what) { return description.compare(at + 2, 4, what, 0, 4) == 0; };
  if (is("int8")) return k ? kCpuInt8K : kCpuInt8V;
  if (!k && description.find("weights of 8 bits") != std::string::npos) return kCpuPromptV;
  if (is("bf16")) return k ? kCpuBf16K : kCpuBf16V;
  if (description.compare(at + 2, 3, "f16") == 0) return k ? kCpuF16K : kCpuF16V;
  return k ? kCpuF32K : kCpuF32V;
}

struct AttentionTolerance {
  std::string name;   // of the arithmetic
  double nmse = 0;    // of the output
  double lse = 0;     // largest error
  double of_row = 0;  // largest error of an element, by the root mean square of its row
};

struct AttentionInputsKind {
  double q_gain = 1;      // logits of so much times unit variance
  bool softened = false;  // a soft cap or slopes
};

inline AttentionTolerance attention_tolerance(const std::string& description, KvFormat k,
                                              KvFormat v, const AttentionInputsKind& kind = {}) {
  const SideError of_k = side_error(description, k, Side::k);
  const SideError of_v = side_error(description, v, Side::v);
  // An absolute error in a logit is a relative one in a weight.
  const double gain = kind.q_gain > 1 ? kind.q_gain : 1;
  AttentionTolerance bounds;
  bounds.name = std::string(of_k.name) + "/" + of_v.name;
  bounds.nmse =
      10 * (of_k.nmse * gain * gain + of_v.nmse + (kind.softened ? of_v.softened_nmse : 0));
  bounds.lse = 10 * (of_k.logit * gain + (kind.softened ? kSoftenedLogit : 0));
  bounds.of_row = 10 * std::sqrt(bounds.nmse);
  if (kind.softened) bounds.name += " softened";
  return bounds;
}

// NMSE of prompts over f16: where the CPU has matrix products for them, else in f32.
inline double prompt_bound(double in_f32) {
  return cpu::attention_kernels().score_prompt != nullptr ? 1e-5 : in_f32;
}

// NMSE of rounding the output once; of a block of few rows twice as much.
inline double out_rounding(DType dtype) {
  if (dtype == DType::f32) return 0;
  return dtype == DType::f16 ? 1e-7 : 6e-6;
}

}  // namespace gyre::test
