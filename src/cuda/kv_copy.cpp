// Names and grids of kernels/kv_copy.cu.
#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/kernels/block_work.cuh"
#include "cuda/types.h"
#include "runtime/require.h"

namespace gyre::cuda {

std::string name_kv_copy(uint64_t spec) {
  const auto types = spec_from_key<abi::KvCopySpec>(spec);
  const char* const source = float_type(types.source_dtype);
  const char* const cache = float_type(types.cache_dtype);
  if (source == nullptr || cache == nullptr) return "";
  return join("gyre::cuda::kv_copy<", source, ", ", cache, ">");
}

Launch launch_kv_copy(const void* params, uint64_t spec, const CudaLimits& limits) {
  constexpr uint64_t kBlock = 256, kMaxHeads = 65535, kBlocksAtOnce = 16, kWarp = 32;
  const auto& p = *static_cast<const abi::KvCopyParams*>(params);
  const auto types = spec_from_key<abi::KvCopySpec>(spec);
  const auto bytes = [](uint8_t dtype) {
    return static_cast<uint32_t>(size_bytes(static_cast<DType>(dtype)));
  };
  const uint32_t source = bytes(types.source_dtype), cache = bytes(types.cache_dtype);
  const uint64_t chunk = copy_chunk(source, cache);
  uint64_t row = p.stream[0].row_elements;
  if (p.streams == 2) row = std::max(row, p.stream[1].row_elements);
  // Whether addresses allow whole chunks is seen by the kernel; with less it goes round more often.
  const uint64_t row_threads = std::clamp<uint64_t>((row + chunk - 1) / chunk, 1, kBlock);
  const uint64_t rows = std::min(kBlock / row_threads, p.tokens);
  const uint64_t block = (rows * row_threads + kWarp - 1) / kWarp * kWarp;
  const uint64_t heads = std::min(p.heads, kMaxHeads);
  const uint64_t limit = std::max<uint64_t>(
      1, limits.multiprocessors * kBlocksAtOnce / std::max<uint64_t>(1, heads * p.streams));
  const uint64_t each = rows * copy_tokens(source, cache);
  const uint64_t wanted = rows == 0 ? 0 : (p.tokens + each - 1) / each;
  return {{static_cast<uint32_t>(std::min(wanted, limit)), static_cast<uint32_t>(heads),
           static_cast<uint32_t>(p.streams)},
          static_cast<uint32_t>(block),
          0};
}

}  // namespace gyre::cuda
