// kv_quantize, kv_append and kv_write: tokens of K and V go to a cache (abi/write.h). Many tokens
// are written in tiles (write_tiles.cuh): every source byte is read once, every code written once;
// codes of V that share words with old ones are read, too. Few tokens of kv_write are written in
// rows (write_rows.cuh).
#include "cuda/kernels/write_rows.cuh"
#include "cuda/kernels/write_tiles.cuh"

namespace gyre::cuda {

template <class Source, uint32_t kFormatK, uint32_t kFormatV, uint32_t kCalibrated = 0>
__global__ void __launch_bounds__(kBlockThreads, 4)
    kv_quantize(const __grid_constant__ abi::WriteParams p, const __grid_constant__ Args args) {
  pdl_wait();
  pdl_launch_dependents();
  write_tiles<Source, kFormatK, kFormatV, abi::SlotRun, kCalibrated>(p, args);
}

// A row of sink tokens or tail, 16 lanes each; of a calibrated row its f16 part, bit for bit.
template <class Source, uint32_t kCalibrated>
__device__ void append_f16(const abi::WriteParams& p, const Args& args, uint64_t row) {
  const abi::KvKeys keys = abi::append_keys(p, *pointer<const abi::KvState>(args.at[0]));
  const uint64_t head = row % p.heads, token = row / p.heads % p.tokens;
  const uint64_t stream = row / p.heads / p.tokens, key = keys.begin + token;
  if (stream > 1 || key >= keys.end) return;
  const abi::WriteStream& s = p.stream[stream];
  const uint64_t* const at = args.at + stream_arg(0, static_cast<uint32_t>(stream));
  const uint64_t offset = abi::append_f16_offset(p.places, s, key, head);
  if (offset == abi::kNoF16Row) return;
  const uint64_t from = at[0] + head * s.source_head_stride + token * s.source_token_stride;
  const auto copy = [&](const auto* source) {
    copy_row(source, pointer<Half>(at[3] + offset), s.cache.head_dim, threadIdx.x % kF16Lanes,
             kF16Lanes);
  };
  if (is_same_type<Source, CalibratedRow> || (kCalibrated >> stream & 1) != 0) {
    copy(pointer<const Half>(from));
  } else if constexpr (!is_same_type<Source, CalibratedRow>) {
    copy(pointer<const Source>(from));
  }
}

// Blocks behind those of the tiles take rows for sink tokens and tail: each row is read once more.
// The grid is made for the most tiles that a step can enter; blocks without any return at once.
template <class Source, uint32_t kFormatK, uint32_t kFormatV, uint32_t kCalibrated = 0>
__global__ void __launch_bounds__(kBlockThreads)
    kv_append(const __grid_constant__ abi::WriteParams p, const __grid_constant__ Args args) {
  pdl_wait();
  pdl_launch_dependents();
  const uint32_t blocks =
      write_tiles<Source, kFormatK, kFormatV, abi::KvState, kCalibrated>(p, args);
  if (blockIdx.x < blocks) return;
  append_f16<Source, kCalibrated>(
      p, args,
      uint64_t{blockIdx.x - blocks} * (kBlockThreads / kF16Lanes) + threadIdx.x / kF16Lanes);
}

template <class Source, uint32_t kFormatK, uint32_t kFormatV, class Slot, uint32_t kCalibrated = 0>
__global__ void __launch_bounds__(kBlockThreads)
    kv_write(const __grid_constant__ abi::WriteParams p, const __grid_constant__ Args args) {
  pdl_wait();
  pdl_launch_dependents();
  write_tiles<Source, kFormatK, kFormatV, Slot, kCalibrated>(p, args);
}

template <class Source, uint32_t kFormatK, uint32_t kFormatV, class Slot, uint32_t kQuads>
__global__ void __launch_bounds__(32 * kWriteRows)
    kv_write_rows(const __grid_constant__ abi::WriteParams p,
                  const __grid_constant__ EarlyArgs args) {
  pdl_launch_dependents();
  const uint32_t row = blockIdx.x * kWriteRows + threadIdx.x / 32;
  const auto rows = static_cast<uint32_t>(p.heads * p.tokens);
  const uint32_t stream = row < rows ? 0 : 1;
  if (row >= 2 * rows) return pdl_wait();
  write_row<Source, kFormatK, kFormatV, Slot, kQuads>(p, args, 0, stream, row - stream * rows,
                                                      NoRotation());
}

}  // namespace gyre::cuda
