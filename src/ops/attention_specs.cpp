// What attention's kernels are called with: traces and lists.
#include <array>
#include <vector>

#include "ops/attention_latent.h"
#include "ops/attention_spec.h"
#include "ops/table.h"
#include "runtime/require.h"

namespace gyre {
namespace {

constexpr std::array kFloats = {DType::f32, DType::f16, DType::bf16};

}  // namespace

std::string attention_shape(const void* params) {
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  if (p.table.page_tokens != 0) {
    return join("sequences=", p.table.sequences, " tokens=", p.tokens, " heads=", p.heads, "/",
                p.kv_heads, " head_dim=", p.k.head_dim, "/", p.v.head_dim,
                " length<=", p.table.max_kv_length, " page=", p.table.page_tokens);
  }
  return join("tokens=", p.tokens, " heads=", p.heads, "/", p.kv_heads, " head_dim=", p.k.head_dim,
              "/", p.v.head_dim, " length=", p.length, " splits=", p.splits);
}

std::string attention_schedule_shape(const void* params) {
  const auto& p = *static_cast<const abi::AttentionScheduleParams*>(params);
  return join("sequences=", p.call.table.sequences, " tokens=", p.call.tokens,
              " kv_heads=", p.call.kv_heads, " rows=", p.rows, " blocks=", p.blocks);
}

std::string attention_merge_shape(const void* params) {
  const auto& p = *static_cast<const abi::AttentionMergeParams*>(params);
  return join("splits=", p.splits, " tokens=", p.tokens, " heads=", p.heads,
              " head_dim=", p.head_dim);
}

std::span<const uint64_t> attention_specs() {
  static const auto& kSpecs = *new std::vector<uint64_t>([] {
    std::vector<uint64_t> specs;
    for (const DType q : kFloats) {
      for (const KvFormat k : kv_formats()) {
        for (const KvFormat v : kv_formats()) {
          for (const DType out : kFloats) {
            for (const bool paged : {false, true}) {
              specs.push_back(spec_key(make_spec(q, k, v, out, paged)));
              if (is_latent_format(k) && is_latent_format(v))
                specs.push_back(spec_key(make_spec(q, k, v, out, paged, true)));
            }
          }
        }
      }
    }
    return specs;
  }());
  return kSpecs;
}

// What a plan may ask for; a device has some of them.
std::span<const uint64_t> attention_decode_specs() {
  static const auto& kSpecs = *new std::vector<uint64_t>([] {
    std::vector<uint64_t> specs;
    struct HeadDims {
      uint32_t k, v;
    };
    constexpr HeadDims kDims[] = {{64, 64},   {80, 80},   {96, 96},   {112, 112}, {128, 128},
                                  {160, 160}, {192, 192}, {192, 128}, {256, 256}, {512, 512}};
    for (const KvFormat k : kv_formats()) {
      for (const KvFormat v : kv_formats()) {
        for (const HeadDims& dims : kDims) {
          for (const uint32_t rows : {4, 8, 12, 16}) {
            abi::AttentionDecodeSpec spec{};
            for (const uint32_t cluster : {8, 2, 1}) {
              spec = abi::attention_decode_spec(static_cast<uint32_t>(k), static_cast<uint32_t>(v),
                                                dims.k, rows, cluster);
              if (dims.k != dims.v) spec.value_dim16 = static_cast<uint8_t>(dims.v / 16);
              specs.push_back(spec_key(spec));
            }
            for (const uint8_t paged : {uint8_t{1}, uint8_t{2}}) {
              spec.paged = paged;
              specs.push_back(spec_key(spec));
            }
          }
        }
      }
    }
    return specs;
  }());
  return kSpecs;
}

std::span<const uint64_t> attention_rows_specs() {
  static const auto& kSpecs = *new std::vector<uint64_t>([] {
    std::vector<uint64_t> specs;
    for (const KvFormat k : kv_formats()) {
      for (const KvFormat v : kv_formats()) {
        for (const uint32_t dim : {64, 80, 96, 112, 128, 160, 192, 256}) {
          for (const uint32_t gpu : {0, 1, 2, 3, 4, 5}) {
            specs.push_back(spec_key(abi::attention_rows_spec(static_cast<uint32_t>(k),
                                                              static_cast<uint32_t>(v), dim,
                                                              dim == 192 ? 128 : dim, gpu)));
          }
        }
      }
    }
    return specs;
  }());
  return kSpecs;
}

std::span<const uint64_t> attention_merge_specs() {
  static const std::array<uint64_t, 3> kSpecs = {spec_key(make_merge_spec(DType::f32)),
                                                 spec_key(make_merge_spec(DType::f16)),
                                                 spec_key(make_merge_spec(DType::bf16))};
  return kSpecs;
}

}  // namespace gyre
