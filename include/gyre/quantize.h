#pragma once

#include <cstdint>

#include "gyre/calibration.h"
#include "gyre/encoder.h"
#include "gyre/export.h"
#include "gyre/format.h"
#include "gyre/tensor.h"
#include "gyre/write.h"

namespace gyre {

enum class HadamardDirection : uint8_t { forward, inverse };
// none: the transform alone. native: our generator. mlx_native: mlx-native's table, 256 and 512
// only.
enum class HadamardSigns : uint8_t { none, native, mlx_native };

struct HadamardInputs {
  Tensor x{};    // [rows..., head_dim] of rank 1 to 3, f32, f16 or bf16, head_dim contiguous
  Tensor out{};  // like x; may be x itself
};

struct HadamardOptions {
  HadamardDirection direction = HadamardDirection::forward;
  HadamardSigns signs = HadamardSigns::none;
};

// forward: F(s * x); inverse: s * F(x), with F the orthonormal Walsh-Hadamard transform in natural
// order and s the signs. The last dimension is a power of two up to 8192, or a multiple of 8 from
// 16 to 1024, which is transformed in blocks (docs/kv_formats.md). Native signs reach to 1024.
// Arithmetic is f32.
GYRE_API void hadamard(Encoder& encoder, const HadamardInputs& inputs,
                       const HadamardOptions& options = {});

struct KvQuantizeInputs {
  Tensor k{};                     // [tokens, kv_heads, head_dim], f32, f16 or bf16
  KvBuffer k_cache{};             // any compressed format
  Tensor v{};                     // like k, head_dim may differ
  KvBuffer v_cache{};             // any compressed format, independent of K's
  KvCalibration k_calibration{};  // how K's codes are chosen, for native formats; may be undefined
  KvCalibration v_calibration{};
};

// Compresses tokens into a cache: K, V or both; leave the other two undefined. Positions, rings and
// ranges as in kv_copy; slots not named keep their bits. Native formats: a coordinate that is not
// finite makes its block decode to NaN. The mlx-native formats do what mlx-native's f32
// arithmetic does (docs/kv_formats.md): such a row decodes to infinities and NaN, and sizes whose
// squares leave f32 are lost.
GYRE_API void kv_quantize(Encoder& encoder, const KvQuantizeInputs& inputs,
                          const KvRange& options = {});

enum class KvDomain : uint8_t { restored, rotated };

struct KvDequantizeInputs {
  KvBuffer cache{};  // any compressed format
  Tensor out{};      // [tokens, kv_heads, head_dim], f32, f16 or bf16
};

struct KvDequantizeOptions {
  uint64_t first_slot = 0;
  KvDomain domain = KvDomain::restored;
};

// Decodes as many slots as `out` has tokens. Never past the end of the cache, no wrapping.
GYRE_API void kv_dequantize(Encoder& encoder, const KvDequantizeInputs& inputs,
                            const KvDequantizeOptions& options = {});

struct KvQuantizeTypes {
  DType source = DType::f32;
  KvFormat format = KvFormat::f16;
};

GYRE_API bool supports(const Device& device, const KvQuantizeTypes& types);

}  // namespace gyre
