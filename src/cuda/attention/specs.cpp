// Every variant of attention's kernels that the planner can choose on some GPU.
#include <array>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/kernels/attention/many_rows/layout.cuh"
#include "gyre/format.h"

namespace gyre::cuda {
namespace {

bool is_latent_part(KvFormat format) {
  return format == KvFormat::f16 || format == KvFormat::bf16 ||
         abi::kv_is_native(static_cast<uint32_t>(format));
}

}  // namespace

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
          for (const uint32_t gpu : {0u, 1u, 2u, 3u, 4u, 5u, kManyRowsUnpack, kManyRowsUnpacked}) {
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

std::span<const uint64_t> attention_latent_specs() {
  static const auto& kSpecs = *new std::vector<uint64_t>([] {
    struct PartDims {
      uint32_t latent, rotary;
    };
    constexpr std::array<PartDims, 3> kDims = {{{512, 64}, {256, 32}, {128, 32}}};
    std::vector<uint64_t> specs;
    for (const KvFormat k : kv_formats()) {
      for (const KvFormat v : kv_formats()) {
        if (!is_latent_part(k) || !is_latent_part(v)) continue;
        for (const PartDims& dims : kDims) {
          for (uint32_t part = 0; part < abi::kLatentParts; ++part)
            specs.push_back(spec_key(abi::attention_latent_spec(static_cast<uint32_t>(k),
                                                                static_cast<uint32_t>(v),
                                                                dims.latent, dims.rotary, part)));
        }
      }
    }
    return specs;
  }());
  return kSpecs;
}

}  // namespace gyre::cuda
