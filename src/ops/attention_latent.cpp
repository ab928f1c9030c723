#include "ops/attention_latent.h"

#include "ops/attention_spec.h"
#include "runtime/device_impl.h"
#include "runtime/require.h"

namespace gyre {
namespace {

constexpr uint64_t kDimMultiple = 16, kMaxLatentDim = 512, kMaxRotaryDim = 128;

void check_part(const char* op, const char* what, KvFormat format, uint64_t dim, uint64_t limit) {
  require(is_latent_format(format), op, ": the ", what,
          " of latent attention is stored as f16, bf16 or a native format, got ", name(format));
  require(dim != 0 && dim % kDimMultiple == 0 && dim <= limit, op, ": the ", what,
          " of latent attention has a multiple of ", kDimMultiple, " coordinates up to ", limit,
          ", got ", dim);
}

}  // namespace

bool is_latent_format(KvFormat format) {
  return format == KvFormat::f16 || format == KvFormat::bf16 ||
         abi::kv_is_native(static_cast<uint32_t>(format));
}

void check_latent_shape(const char* op, const LatentShape& shape) {
  require(shape.kv_heads == 1, op, ": latent attention has one KV head, got kv_heads ",
          shape.kv_heads);
  check_part(op, "latent", shape.latent, shape.latent_dim, kMaxLatentDim);
  check_part(op, "rotary part", shape.rotary, shape.rotary_dim, kMaxRotaryDim);
}

void check_latent_options(const char* op, std::optional<float> scale, const AttentionMask& mask) {
  require(scale.has_value(), op, ": the softmax scale of latent attention has no default: give it");
  require(!mask.tree_mask.defined(), op, ": latent attention takes no tree_mask");
}

std::string describe_latent(const Device& device, const KvShape& latent, const KvShape& rotary) {
  constexpr uint32_t kAttends = 1;
  const uint64_t own = spec_key(abi::attention_latent_spec(
      static_cast<uint32_t>(latent.format), static_cast<uint32_t>(rotary.format),
      static_cast<uint32_t>(latent.head_dim), static_cast<uint32_t>(rotary.head_dim), kAttends));
  const uint64_t any =
      spec_key(make_spec(DType::f32, latent.format, rotary.format, DType::f32, false, true));
  const DeviceImpl& impl = *impl_of(device);
  if (impl.has(kAttentionLatent.info, own)) return impl.describe(kAttentionLatent.info, own);
  if (impl.has(kAttention.info, any)) return impl.describe(kAttention.info, any);
  return "none: this device has no latent attention";
}

bool supports_latent(const Device& device, const AttentionTypes& types) {
  // DeepSeek's shape: kernels are written for it.
  constexpr uint32_t kLatentDim = 512, kRotaryDim = 64, kAttends = 1;
  if (!is_latent_format(types.k) || !is_latent_format(types.v)) return false;
  const auto spec =
      abi::attention_latent_spec(static_cast<uint32_t>(types.k), static_cast<uint32_t>(types.v),
                                 kLatentDim, kRotaryDim, kAttends);
  return impl_of(device)->has(kAttentionLatent.info, spec_key(spec)) ||
         impl_of(device)->has(kAttention.info, spec_key(make_spec(types.q, types.k, types.v,
                                                                  types.out, types.paged, true)));
}

void require_latent_kernel(const Recording& recording, const char* op,
                           const abi::AttentionProblem& problem, const abi::AttentionPlan& plan) {
  bool has = false;
  record_planned(plan, [&](const auto& kernel, const auto& spec) {
    has = recording.has(kernel.info, spec_key(spec));
  });
  if (has) return;
  fail(ErrorCode::unsupported, op, ": device ", recording.device().name,
       " has no latent attention over ", name(static_cast<KvFormat>(problem.k.format)), " and ",
       name(static_cast<KvFormat>(problem.v.format)), " with ", problem.k.head_dim, " + ",
       problem.v.head_dim, " coordinates");
}

}  // namespace gyre
