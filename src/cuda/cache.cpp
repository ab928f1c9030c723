// Names and grids of kernels/cache.cu.
#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/kernels/block_work.cuh"

namespace gyre::cuda {
namespace {

constexpr uint32_t kBlock = 256;

uint32_t blocks(uint64_t items, uint32_t limit) {
  return static_cast<uint32_t>(std::clamp<uint64_t>((items + kBlock - 1) / kBlock, 1, limit));
}

}  // namespace

std::string name_kv_extend(uint64_t /*spec*/) { return "gyre::cuda::kv_extend"; }

Launch launch_kv_extend(const void* params, uint64_t /*spec*/, const CudaLimits& /*limits*/) {
  const auto& p = *static_cast<const abi::KvExtendParams*>(params);
  return {{blocks(p.positions, 0x7FFFFFFF), 1, 1}, kBlock, 0};
}

std::string name_bytes_copy(uint64_t /*spec*/) { return "gyre::cuda::bytes_copy"; }

Launch launch_bytes_copy(const void* params, uint64_t /*spec*/, const CudaLimits& limits) {
  // As many blocks as run at once; each goes on through the bytes of its row.
  const auto& p = *static_cast<const abi::BytesCopyParams*>(params);
  constexpr uint32_t kBlocksAtOnce = 8, kBytesPerThread = 16;
  const auto rows = static_cast<uint32_t>(p.rows);  // heads of a tensor: fewer than 2^16
  const uint32_t limit = limits.multiprocessors * kBlocksAtOnce;
  return {{blocks(p.bytes / kBytesPerThread, std::max(limit / rows, 1u)), rows, 1}, kBlock, 0};
}

std::string name_words_write(uint64_t /*spec*/) { return "gyre::cuda::words_write"; }

Launch launch_words_write(const void* params, uint64_t /*spec*/, const CudaLimits& /*limits*/) {
  const auto& p = *static_cast<const abi::WordsWriteParams*>(params);
  return {{blocks(p.words, abi::kMaxWordsWrite), 1, 1}, kBlock, 0};
}

std::string name_kv_page_copy(uint64_t /*spec*/) { return "gyre::cuda::kv_page_copy"; }

Launch launch_kv_page_copy(const void* params, uint64_t /*spec*/, const CudaLimits& limits) {
  const auto& p = *static_cast<const abi::KvPageCopyParams*>(params);
  constexpr uint64_t kBlocksAtOnce = 8;
  const uint64_t limit = std::max<uint64_t>(limits.multiprocessors * kBlocksAtOnce, 1);
  return {{static_cast<uint32_t>(std::min(p.count * page_copy_parts(p), limit)), 1, 1},
          kBlockThreads,
          0};
}

}  // namespace gyre::cuda
