#pragma once

#include <optional>

#include "gyre/calibration.h"
#include "gyre/encoder.h"
#include "gyre/export.h"
#include "gyre/pages.h"
#include "gyre/rope.h"
#include "gyre/tensor.h"

namespace gyre {

// One dtype for q, k, v and q_out: f32, f16 or bf16. head_dim is contiguous in all of them.
struct RopeAppendInputs {
  Tensor q{};      // [tokens, heads, head_dim]; undefined: k and v alone
  Tensor q_out{};  // like q; may be q itself
  Tensor k{};      // [tokens, kv_heads, head_dim]
  Tensor v{};      // [tokens, kv_heads, head_dim of V], stored as it is
  // As in RopeInputs. KvCache and KvBatch: undefined means those of the step.
  Tensor positions{};
  Tensor q_weight{};  // with a norm, as in NormRopeInputs
  Tensor k_weight{};
  Tensor frequencies{};
  Tensor factors{};
};

struct RopeNorm {
  float epsilon = 1e-6f;
  float weight_offset = 0.0f;  // 1 for models that store weight - 1 (Gemma)
};

struct RopeAppendOptions {
  std::optional<RopeOptions> rope = RopeOptions{};  // nullopt: the norm alone, no positions
  std::optional<RopeNorm> norm{};                   // RMS norm of the heads of q and k first
};

// Where tokens go, as in KvWriteInputs.
struct KvSlots {
  KvPages pages{};
  Tensor slots{};  // i64 or i32 [tokens]
  KvCalibration
      k_calibration{};  // as in KvWriteInputs; with one, rope, encoding and writing are commands
  KvCalibration v_calibration{};
};

// Everything beside attention in one command: rotates q, rotates and stores k, stores v. The bits
// are those of rope (with a norm: norm_rope) into this dtype and kv_write after it. On CUDA more
// than 32 tokens, or heads above 256, are these two commands. KvCache and KvBatch have the same as
// a call of their own.
GYRE_API void rope_append(Encoder& encoder, const RopeAppendInputs& inputs, const KvSlots& to,
                          const RopeAppendOptions& options = {});

}  // namespace gyre
