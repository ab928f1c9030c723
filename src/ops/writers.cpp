#include "ops/writers.h"

#include "abi/kernels.h"
#include "ops/kv_calibration.h"
#include "runtime/require.h"

namespace gyre {

abi::WriteSpec write_spec(const WriteTypes& types) {
  return spec_from_key<abi::WriteSpec>(static_cast<uint64_t>(types.source) | types.k_format << 8 |
                                       types.v_format << 16 | types.calibrated << 24 |
                                       types.slot_bytes << 32 | types.lane_quads << 40);
}

std::vector<uint64_t> lane_quads_of(KvFormat k, KvFormat v) {
  const bool has_rows =
      abi::kv_lane_quads({static_cast<uint32_t>(k), static_cast<uint32_t>(v), 128, 128}) != 0;
  return has_rows ? std::vector<uint64_t>{0, 1, 2, 4} : std::vector<uint64_t>{0};
}

std::vector<uint64_t> write_specs(const WriteListing& listing) {
  std::vector<uint64_t> specs;
  const auto add = [&](DType source, KvFormat k, KvFormat v, uint64_t calibrated) {
    const std::vector<uint64_t> quads =
        listing.few_rows && calibrated == 0 ? lane_quads_of(k, v) : std::vector<uint64_t>{0};
    for (const uint64_t slot_bytes : listing.slot_bytes) {
      for (const uint64_t each : quads)
        specs.push_back(
            spec_key(write_spec({source, static_cast<uint64_t>(k), static_cast<uint64_t>(v),
                                 calibrated, slot_bytes, each})));
    }
  };
  for (const DType source : {DType::f32, DType::f16, DType::bf16}) {
    for (const KvFormat k : listing.formats) {
      for (const KvFormat v : listing.formats) add(source, k, v, 0);
    }
    for_calibrated_formats(
        [&](KvFormat k, KvFormat v, uint64_t calibrated) { add(source, k, v, calibrated); });
  }
  return specs;
}

void check_rows_pair(const char* op, const Tensor& k, const Tensor& v) {
  require(v.shape(0) == k.shape(0), op, ": v must have the tokens of k: ", k.shape(0), ", got ",
          v.shape(0));
  require(v.dtype() == k.dtype(), op, ": v must have the dtype of k: ", k.dtype(), ", got ",
          v.dtype());
}

abi::WriteStream write_stream(const Tensor& source, const abi::KvCacheLayout& cache) {
  const uint64_t element_bytes = size_bytes(source.dtype());
  abi::WriteStream stream{};
  stream.source_token_stride = source.stride(0) * element_bytes;
  stream.source_head_stride = source.stride(1) * element_bytes;
  stream.cache = cache;
  return stream;
}

}  // namespace gyre
