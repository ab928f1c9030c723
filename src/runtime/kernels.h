#pragma once
// The contract between ops and backends, on one page. An op names a kernel and hands over Spec,
// Params and Args; a backend has a table from kernels to code. Neither knows the other.

#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <string>

#include "abi/attention.h"
#include "abi/attention_plan.h"
#include "abi/kv_cache.h"
#include "abi/kv_copy.h"
#include "abi/kv_quantize.h"
#include "abi/rope.h"

namespace gyre {

constexpr uint32_t kMaxArgs = 12;

enum class Access : uint8_t { read, write, read_write };

struct ArgInfo {
  const char* name = nullptr;
  Access access = Access::read;
};

// Identity is the address: one inline constant per kernel.
struct KernelInfo {
  const char* name = nullptr;
  uint32_t params_bytes = 0;
  uint32_t arg_count = 0;
  std::array<ArgInfo, kMaxArgs> args{};
  std::string (*shape)(const void* params) = nullptr;  // for traces
  std::span<const uint64_t> (*specs)() = nullptr;      // every spec an op can ask for
  bool once = false;  // its params hold for one moment: graphs refuse it
};

// Ties a kernel to its Spec and Params types, so that a wrong pair does not compile. Problem: what
// a device plans (DeviceImpl::plan) before an op of this kernel is dispatched; void: nothing.
template <class Spec, class Params, class Problem = void>
struct Kernel {
  static_assert(sizeof(Spec) == 8, "a Spec is the pipeline key: exactly 8 bytes");
  static_assert(std::is_trivially_copyable_v<Params> && alignof(Params) <= 8);

  KernelInfo info;
};

template <class Spec>
constexpr uint64_t spec_key(const Spec& spec) {
  return std::bit_cast<uint64_t>(spec);
}

template <class Spec>
constexpr Spec spec_from_key(uint64_t key) {
  return std::bit_cast<Spec>(key);
}

std::string kv_copy_shape(const void* params);
std::span<const uint64_t> kv_copy_specs();

inline constexpr Kernel<abi::KvCopySpec, abi::KvCopyParams> kKvCopy{{
    .name = "kv_copy",
    .params_bytes = sizeof(abi::KvCopyParams),
    .arg_count = 4,
    .args = {{{"k", Access::read},
              {"k_cache", Access::write},
              {"v", Access::read},
              {"v_cache", Access::write}}},
    .shape = kv_copy_shape,
    .specs = kv_copy_specs,
}};

std::string rope_shape(const void* params);
std::span<const uint64_t> rope_specs();

// rope and norm_rope; absent outputs and weights are null.
inline constexpr Kernel<abi::RopeSpec, abi::RopeParams> kRope{{
    .name = "rope",
    .params_bytes = sizeof(abi::RopeParams),
    .arg_count = 11,
    .args = {{{"x", Access::read},
              {"positions", Access::read},
              {"out", Access::write},
              {"frequencies", Access::read},
              {"factors", Access::read},
              {"weight", Access::read},
              {"second", Access::write},
              {"k", Access::read},
              {"k_out", Access::write},
              {"k_weight", Access::read},
              {"k_second", Access::write}}},
    .shape = rope_shape,
    .specs = rope_specs,
}};

std::string kv_quantize_shape(const void* params);
std::span<const uint64_t> kv_quantize_specs();

// Writes to the caches are read_write: tokens that share a tile of V with new ones keep their bits.
inline constexpr Kernel<abi::KvQuantizeSpec, abi::KvQuantizeParams> kKvQuantize{{
    .name = "kv_quantize",
    .params_bytes = sizeof(abi::KvQuantizeParams),
    .arg_count = 6,
    .args = {{{"k", Access::read},
              {"k_codes", Access::read_write},
              {"k_scales", Access::read_write},
              {"v", Access::read},
              {"v_codes", Access::read_write},
              {"v_scales", Access::read_write}}},
    .shape = kv_quantize_shape,
    .specs = kv_quantize_specs,
}};

std::string kv_dequantize_shape(const void* params);
std::span<const uint64_t> kv_dequantize_specs();

inline constexpr Kernel<abi::KvDequantizeSpec, abi::KvDequantizeParams> kKvDequantize{{
    .name = "kv_dequantize",
    .params_bytes = sizeof(abi::KvDequantizeParams),
    .arg_count = 3,
    .args = {{{"codes", Access::read}, {"scales", Access::read}, {"out", Access::write}}},
    .shape = kv_dequantize_shape,
    .specs = kv_dequantize_specs,
}};

std::string hadamard_shape(const void* params);
std::span<const uint64_t> hadamard_specs();

inline constexpr Kernel<abi::HadamardSpec, abi::HadamardParams> kHadamard{{
    .name = "hadamard",
    .params_bytes = sizeof(abi::HadamardParams),
    .arg_count = 2,
    .args = {{{"x", Access::read}, {"out", Access::write}}},
    .shape = hadamard_shape,
    .specs = hadamard_specs,
}};

std::string attention_shape(const void* params);
std::span<const uint64_t> attention_specs();

// In the order of abi::AttentionArg.
constexpr std::array<ArgInfo, kMaxArgs> attention_args(Access partial) {
  return {{{"q", Access::read},
           {"k_codes", Access::read},
           {"k_scales", Access::read},
           {"v_codes", Access::read},
           {"v_scales", Access::read},
           {"out", Access::write},
           {"lse", Access::write},
           {"sinks", Access::read},
           {"slopes", Access::read},
           {"tree", Access::read},
           {"partial", partial},
           {"state", Access::read}}};
}

// Either out (and lse, sinks) or partial; what is absent is null.
using PlannedAttention = Kernel<abi::AttentionSpec, abi::AttentionParams, abi::AttentionProblem>;
inline constexpr PlannedAttention kAttention{{
    .name = "attention",
    .params_bytes = sizeof(abi::AttentionParams),
    .arg_count = 12,
    .args = attention_args(Access::write),
    .shape = attention_shape,
    .specs = attention_specs,
}};

std::span<const uint64_t> attention_decode_specs();

// The same for few rows over many keys, splits put together in the same command. Not every device
// has it.
inline constexpr Kernel<abi::AttentionDecodeSpec, abi::AttentionParams> kAttentionDecode{{
    .name = "attention_decode",
    .params_bytes = sizeof(abi::AttentionParams),
    .arg_count = 12,
    .args = attention_args(Access::read_write),
    .shape = attention_shape,
    .specs = attention_decode_specs,
}};

std::string attention_merge_shape(const void* params);
std::span<const uint64_t> attention_merge_specs();

inline constexpr Kernel<abi::AttentionMergeSpec, abi::AttentionMergeParams> kAttentionMerge{{
    .name = "attention_merge",
    .params_bytes = sizeof(abi::AttentionMergeParams),
    .arg_count = 4,
    .args = {{{"partial", Access::read},
              {"out", Access::write},
              {"lse", Access::write},
              {"sinks", Access::read}}},
    .shape = attention_merge_shape,
    .specs = attention_merge_specs,
}};

std::string kv_extend_shape(const void* params);
std::span<const uint64_t> plain_specs();  // one, without a choice

// Values of one moment: a graph that kept them would repeat that moment.
inline constexpr Kernel<abi::KvExtendSpec, abi::KvExtendParams> kKvExtend{{
    .name = "kv_extend",
    .params_bytes = sizeof(abi::KvExtendParams),
    .arg_count = 2,
    .args = {{{"state", Access::write}, {"positions", Access::write}}},
    .shape = kv_extend_shape,
    .specs = plain_specs,
    .once = true,
}};

std::string kv_append_shape(const void* params);
std::span<const uint64_t> kv_append_specs();

// The tail is read before it is written: tokens that leave it go to the body.
inline constexpr Kernel<abi::KvAppendSpec, abi::KvAppendParams> kKvAppend{{
    .name = "kv_append",
    .params_bytes = sizeof(abi::KvAppendParams),
    .arg_count = 11,
    .args = {{{"state", Access::read},
              {"k", Access::read},
              {"k_codes", Access::read_write},
              {"k_scales", Access::read_write},
              {"k_sinks", Access::write},
              {"k_tail", Access::read_write},
              {"v", Access::read},
              {"v_codes", Access::read_write},
              {"v_scales", Access::read_write},
              {"v_sinks", Access::write},
              {"v_tail", Access::read_write}}},
    .shape = kv_append_shape,
    .specs = kv_append_specs,
}};

std::string bytes_copy_shape(const void* params);

inline constexpr Kernel<abi::BytesCopySpec, abi::BytesCopyParams> kBytesCopy{{
    .name = "bytes_copy",
    .params_bytes = sizeof(abi::BytesCopyParams),
    .arg_count = 2,
    .args = {{{"from", Access::read}, {"to", Access::write}}},
    .shape = bytes_copy_shape,
    .specs = plain_specs,
}};

// Every kernel of the library, for listings and for building all of them ahead of time.
std::span<const KernelInfo* const> all_kernels();

}  // namespace gyre
