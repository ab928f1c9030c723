#include <algorithm>

#include "kv_buffer.h"
#include "kv_calibration.h"

namespace gyre::python {
namespace {

// Where tokens go: the options that kv_copy and kv_quantize share.
KvRange write_options(const char* what, uint64_t position, const std::string& cache,
                      uint64_t source_begin, std::optional<uint64_t> tokens) {
  constexpr Choice<CacheKind> kKinds[] = {{"linear", CacheKind::linear}, {"ring", CacheKind::ring}};
  return {.position = position,
          .cache = choose(what, cache, kKinds),
          .source_begin = source_begin,
          .tokens = tokens};
}

void record_kv_copy(Encoder& encoder, const Operand& k, const Operand& k_cache,
                    const OptionalOperand& v, const OptionalOperand& v_cache, uint64_t position,
                    const std::string& cache, uint64_t source_begin,
                    std::optional<uint64_t> tokens) {
  const Operands operand(encoder, "kv_copy");
  const KvCopyInputs inputs{operand("k", k), operand("k_cache", k_cache), operand("v", v),
                            operand("v_cache", v_cache)};
  const KvRange options = write_options("kv_copy: cache", position, cache, source_begin, tokens);
  without_gil([&] { kv_copy(encoder, inputs, options); });
}

void record_kv_quantize(Encoder& encoder, const OptionalOperand& k, const BoundKvBuffer* k_cache,
                        const OptionalOperand& v, const BoundKvBuffer* v_cache, uint64_t position,
                        const std::string& cache, uint64_t source_begin,
                        std::optional<uint64_t> tokens,
                        const std::optional<KvCalibration>& k_calibration,
                        const std::optional<KvCalibration>& v_calibration) {
  const Operands operand(encoder, "kv_quantize");
  const auto buffer = [](const BoundKvBuffer* bound) {
    return bound != nullptr ? bound->buffer : KvBuffer{};
  };
  const KvQuantizeInputs inputs{operand("k", k),
                                buffer(k_cache),
                                operand("v", v),
                                buffer(v_cache),
                                calibration_or_none(k_calibration),
                                calibration_or_none(v_calibration)};
  const KvRange options =
      write_options("kv_quantize: cache", position, cache, source_begin, tokens);
  without_gil([&] { kv_quantize(encoder, inputs, options); });
}

Operand record_kv_dequantize(Encoder& encoder, const BoundKvBuffer& cache,
                             const OptionalOperand& out, uint64_t first_slot,
                             const std::string& domain) {
  constexpr Choice<KvDomain> kDomains[] = {{"restored", KvDomain::restored},
                                           {"rotated", KvDomain::rotated}};
  const Operands operand(encoder, "kv_dequantize");
  const KvShape& shape = cache.buffer.shape;
  const uint64_t slots = shape.capacity - std::min(first_slot, shape.capacity);
  const Written to =
      operand.written("out", out, DType::f32, {slots, shape.kv_heads, shape.head_dim});
  const KvDequantizeInputs inputs{cache.buffer, to.tensor};
  const KvDequantizeOptions options{first_slot, choose("kv_dequantize: domain", domain, kDomains)};
  without_gil([&] { kv_dequantize(encoder, inputs, options); });
  return to.result;
}

Operand record_hadamard(Encoder& encoder, const Operand& x, const OptionalOperand& out,
                        const std::string& direction, const std::string& signs) {
  constexpr Choice<HadamardDirection> kDirections[] = {{"forward", HadamardDirection::forward},
                                                       {"inverse", HadamardDirection::inverse}};
  constexpr Choice<HadamardSigns> kSigns[] = {{"none", HadamardSigns::none},
                                              {"native", HadamardSigns::native},
                                              {"mlx_native", HadamardSigns::mlx_native}};
  const Operands operand(encoder, "hadamard");
  const Tensor from = operand("x", x);
  const Written to = operand.written("out", out, from.dtype(), from.shape());
  const HadamardInputs inputs{from, to.tensor};
  const HadamardOptions options{choose("hadamard: direction", direction, kDirections),
                                choose("hadamard: signs", signs, kSigns)};
  without_gil([&] { hadamard(encoder, inputs, options); });
  return to.result;
}

}  // namespace

void bind_quantize(nb::module_& module) {
  module.def(
      "kv_copy", record_kv_copy, "encoder"_a, "k"_a, "k_cache"_a, "v"_a = nb::none(),
      "v_cache"_a = nb::none(), nb::kw_only(), "position"_a = 0, "cache"_a = "linear",
      "source_begin"_a = 0, "tokens"_a = nb::none(),
      "Writes new tokens into a KV cache and converts between f32, f16 and bf16.\n\n"
      "k is [tokens, kv_heads, head_dim]. k_cache is [capacity, kv_heads, head_dim] and is "
      "written; pass a head-major cache as cache.permute([1, 0, 2]). v and v_cache are alike, and "
      "their head_dim may differ; leave both out to copy K alone. position is that of the first "
      "token. cache is \"linear\", or \"ring\" for a cache in which position p lives in slot p mod "
      "capacity. source_begin and tokens choose which tokens of k and v are written; without "
      "tokens, all from source_begin on.");
  module.def(
      "kv_quantize", record_kv_quantize, "encoder"_a, "k"_a = nb::none(),
      "k_cache"_a.none() = nb::none(), "v"_a = nb::none(), "v_cache"_a.none() = nb::none(),
      nb::kw_only(), "position"_a = 0, "cache"_a = "linear", "source_begin"_a = 0,
      "tokens"_a = nb::none(), "k_calibration"_a = nb::none(), "v_calibration"_a = nb::none(),
      "Quantizes tokens into a cache.\n\n"
      "k and v are [tokens, kv_heads, head_dim], f32, f16 or bf16. k_cache and v_cache are "
      "KvBuffers of a compressed format and are written. Leave out k and k_cache, or v and "
      "v_cache, to write the other alone. k_calibration and v_calibration change how the encoder "
      "picks codes and scales, see KvCalibration. The other arguments are those of kv_copy().");
  module.def(
      "kv_dequantize", record_kv_dequantize, "encoder"_a, "cache"_a, "out"_a = nb::none(),
      nb::kw_only(), "first_slot"_a = 0, "domain"_a = "restored",
      "Dequantizes slots from first_slot on and returns out.\n\n"
      "cache is a KvBuffer of a compressed format. out is [tokens, kv_heads, head_dim], f32, f16 "
      "or bf16, and says how many slots; if you leave it out, an f32 gyre.Tensor is made that has "
      "them all. domain is \"restored\", or \"rotated\" for the values before the "
      "Hadamard rotation is undone.");
  module.def(
      "supports_kv_copy",
      [](const DeviceLike& device, const std::string& source, const std::string& cache) {
        return supports(device_of(device), KvCopyTypes{dtype_named(source), dtype_named(cache)});
      },
      "device"_a, nb::kw_only(), "source"_a = "f32", "cache"_a = "f32",
      "Returns whether a device has a kernel for kv_copy() with these dtypes.");
  module.def(
      "supports_kv_quantize",
      [](const DeviceLike& device, const std::string& source, const std::string& format) {
        return supports(device_of(device), KvQuantizeTypes{dtype_named(source), kv_format(format)});
      },
      "device"_a, nb::kw_only(), "source"_a = "f32", "format"_a,
      "Returns whether a device has a kernel for kv_quantize() from this dtype to this format.");
  module.def(
      "hadamard", record_hadamard, "encoder"_a, "x"_a, "out"_a = nb::none(), nb::kw_only(),
      "direction"_a = "forward", "signs"_a = "none",
      "Records the orthonormal Walsh-Hadamard transform of each head and returns out.\n\n"
      "x is [rows..., head_dim] of rank 1 to 3, f32, f16 or bf16, with head_dim contiguous. out "
      "has x's shape and may be x itself; if you leave it out, a gyre.Tensor like x is made. "
      "direction is \"forward\" or \"inverse\". signs is \"none\", \"native\" or \"mlx_native\".");
}

}  // namespace gyre::python
