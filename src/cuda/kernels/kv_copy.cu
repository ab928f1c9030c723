// kv_copy: see abi/kv_copy.h. z is the stream, y the head; a block takes some tokens at a time,
// each row by as many threads as it has chunks. Moves every source byte once and every cache byte
// once, 16 bytes at a time where addresses and strides allow it.
#include "abi/kv_copy.h"
#include "args.cuh"
#include "convert.cuh"

namespace gyre::cuda {

template <class Source, class Target>
struct RowCopy {
  // Both sides of a chunk are whole 16-byte words.
  static constexpr uint32_t kSmaller =
      sizeof(Source) < sizeof(Target) ? sizeof(Source) : sizeof(Target);
  static constexpr uint32_t kChunk = 16 / kSmaller;

  const Source* from;
  Target* to;
  uint64_t elements;

  void chunk(uint64_t index) const {
    const uint64_t first = index * kChunk;
    if (first + kChunk > elements) {
      for (uint64_t i = first; i < elements; ++i) single(i);
      return;
    }
    copy_elements<Source, Target, kChunk>(from + first, to + first);
  }
  void single(uint64_t i) const { to[i] = Convert<Target, Source>::value(from[i]); }
};

// __grid_constant__: indexed by the stream, which would otherwise copy them to local memory.
template <class Source, class Target>
__global__ void kv_copy(const __grid_constant__ gyre::abi::KvCopyParams p,
                        const __grid_constant__ Args args) {
  using Row = RowCopy<Source, Target>;
  const gyre::abi::KvCopyStream s = p.stream[blockIdx.z];
  if (s.row_elements == 0) return;
  const uint64_t from = args.at[2 * blockIdx.z], to = args.at[2 * blockIdx.z + 1];
  const bool wide = ((from | to | s.source_token_stride | s.source_head_stride |
                      s.cache_slot_stride | s.cache_head_stride) &
                     15) == 0;
  const uint64_t pieces = wide ? (s.row_elements + Row::kChunk - 1) / Row::kChunk : s.row_elements;
  const uint32_t row_threads = pieces < blockDim.x ? static_cast<uint32_t>(pieces) : blockDim.x;
  const uint32_t rows = blockDim.x / row_threads;
  const uint32_t row = threadIdx.x / row_threads, lane = threadIdx.x % row_threads;
  if (row >= rows) return;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * rows;
  for (uint64_t head = blockIdx.y; head < p.heads; head += gridDim.y) {
    const uint64_t from_head = from + head * s.source_head_stride;
    const uint64_t to_head = to + head * s.cache_head_stride;
    for (uint64_t token = blockIdx.x * static_cast<uint64_t>(rows) + row; token < p.tokens;
         token += step) {
      const Row copy{pointer<const Source>(from_head + token * s.source_token_stride),
                     pointer<Target>(to_head + kv_copy_slot(p, token) * s.cache_slot_stride),
                     s.row_elements};
      for (uint64_t i = lane; i < pieces; i += row_threads) {
        if (wide) {
          copy.chunk(i);
        } else {
          copy.single(i);
        }
      }
    }
  }
}

}  // namespace gyre::cuda
