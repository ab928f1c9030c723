// kv_extend, bytes_copy, words_write and kv_page_copy; see abi/kv_state.h and abi/bytes_copy.h.
#include "abi/bytes_copy.h"
#include "abi/kv_extend.h"
#include "abi/words_write.h"
#include "cuda/kernels/block_work.cuh"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/kernel_args.cuh"

namespace gyre::cuda {

__global__ void kv_extend(const gyre::abi::KvExtendParams p, const Args args) {
  pdl_wait();
  pdl_launch_dependents();
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i == 0) *pointer<gyre::abi::KvState>(args.at[0]) = p.state;
  if (i < p.positions) pointer<int32_t>(args.at[1])[i] = static_cast<int32_t>(p.state.start + i);
}

// A row per blockIdx.y. Bytes up to the first multiple of 16 and behind the last one singly, in
// between 16 at a time if both sides agree.
__global__ void bytes_copy(const gyre::abi::BytesCopyParams p, const Args args) {
  pdl_wait();
  pdl_launch_dependents();
  const uint64_t first = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  const uint64_t from_row = args.at[0] + blockIdx.y * p.from_stride;
  const uint64_t to_row = args.at[1] + blockIdx.y * p.to_stride;
  const auto* const from = pointer<const uint8_t>(from_row);
  auto* const to = pointer<uint8_t>(to_row);
  const bool agree = (from_row - to_row) % sizeof(uint4) == 0;
  const uint64_t until_aligned = -from_row % sizeof(uint4);
  const uint64_t head = agree && until_aligned < p.bytes ? until_aligned : p.bytes;
  const uint64_t vectors = (p.bytes - head) / sizeof(uint4);
  for (uint64_t i = first; i < head; i += step) to[i] = from[i];
  const auto* const wide_from = reinterpret_cast<const uint4*>(from + head);
  auto* const wide_to = reinterpret_cast<uint4*>(to + head);
  for (uint64_t i = first; i < vectors; i += step) wide_to[i] = wide_from[i];
  for (uint64_t i = head + vectors * sizeof(uint4) + first; i < p.bytes; i += step) to[i] = from[i];
}

// One word per thread.
__global__ void words_write(const gyre::abi::WordsWriteParams p, const Args args) {
  pdl_wait();
  pdl_launch_dependents();
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.words) return;
  pointer<uint32_t>(args.at[0])[gyre::abi::words_write_place(p, i)] =
      p.buffer[gyre::abi::kMaxWordsWrite - 1 - i];
}

// Page from[i] to page to[i], 16 bytes a thread, four on their way. Pairs with a page that is not
// there are skipped.
__global__ void __launch_bounds__(kBlockThreads)
    kv_page_copy(const abi::KvPageCopyParams p, const Args args) {
  pdl_wait();
  pdl_launch_dependents();
  constexpr uint32_t kThreadWords = kPageCopyBytes / kBlockThreads / sizeof(uint4);
  const uint64_t parts = page_copy_parts(p), vectors = p.page_bytes / sizeof(uint4);
  for (uint64_t i = blockIdx.x; i < p.count * parts; i += gridDim.x) {
    const uint64_t pair = i / parts, first = (i - pair * parts) * kThreadWords * kBlockThreads;
    const int32_t from = pointer<const int32_t>(args.at[1])[pair];
    const int32_t to = pointer<const int32_t>(args.at[2])[pair];
    if (from < 0 || to < 0 || static_cast<uint64_t>(from) >= p.pages ||
        static_cast<uint64_t>(to) >= p.pages)
      continue;
    const auto* const source =
        pointer<const uint4>(args.at[0] + static_cast<uint64_t>(from) * p.page_stride);
    auto* const target = pointer<uint4>(args.at[0] + static_cast<uint64_t>(to) * p.page_stride);
    uint4 words[kThreadWords];
#pragma unroll
    for (uint32_t e = 0; e < kThreadWords; ++e) {
      const uint64_t v = first + e * kBlockThreads + threadIdx.x;
      if (v < vectors) words[e] = source[v];
    }
#pragma unroll
    for (uint32_t e = 0; e < kThreadWords; ++e) {
      const uint64_t v = first + e * kBlockThreads + threadIdx.x;
      if (v < vectors) target[v] = words[e];
    }
  }
}

}  // namespace gyre::cuda
