#pragma once
// Latent attention, the first of three kernels: queries as 16-bit operands, rotated as the keys
// are, and the list of work. A block makes the list, the others take a row
// with each warp.
#include "cuda/kernels/attention/common/row_tile_batch.cuh"
#include "cuda/kernels/attention/common/softmax.cuh"
#include "cuda/kernels/attention/common/typed_memory.cuh"
#include "cuda/kernels/attention/latent/traits.cuh"
#include "cuda/kernels/attention/latent/warp_row.cuh"

namespace gyre::cuda {

constexpr uint32_t kLatentWarps = kLatentThreads / kWarp;  // of a block

// A query scaled by a power of two, so that its largest magnitude is below 2^15 in f16 (in bf16
// 2^-15: no product with a key leaves the range), and the factor of
// its scores in base 2: never 0 or negative, NaN where the query is not finite. A warp to a row.
template <class T>
inline void prepare_row(const abi::AttentionParams& p, const Args& args,
                        const LatentScratch& scratch, uint64_t row, float* shared) {
  WarpRow<T::kLatentDim> latent;
  WarpRow<T::kRotaryDim> rotary;
  const uint64_t from = args.at[arg_q] + divide(row, p.heads) * p.q_token_stride +
                        (row - divide(row, p.heads) * p.heads) * p.q_head_stride;
#pragma unroll
  for (uint32_t i = 0; i < latent.kCount; ++i)
    latent.x[i] = load_as_float(from, p.q_dtype, latent.place(i));
#pragma unroll
  for (uint32_t i = 0; i < rotary.kCount; ++i)
    if (rotary.has(i))
      rotary.x[i] = load_as_float(from, p.q_dtype, T::kLatentDim + rotary.place(i));
  if constexpr (T::kLevelsK) latent.flip_signs(), latent.transform();
  if constexpr (T::kRotatedV) rotary.flip_signs(), rotary.transform();
  const uint32_t a = latent.largest_bits(), b = rotary.largest_bits();
  const float largest = __uint_as_float(__reduce_max_sync(kAll, a > b ? a : b));
  const bool finite = is_finite(largest);
  constexpr int32_t kExponentBound = T::kBf16K ? -16 : 14,
                    kMaxUp = 100;  // the factor stays a normal number
  int32_t up = largest == 0 || !finite ? 0 : kExponentBound - exponent_of(largest);
  if (up > kMaxUp) up = kMaxUp;
  const float logits = p.soft_cap > 0 ? p.scale : p.scale * kLog2E;
  const float factor = fabsf(logits) * power_of_two(-up);
  const float sign = factor == 0 || !finite ? 0.0f : (logits < 0 ? -1.0f : 1.0f);
  const auto scaled = [&](float x) { return sign == 0 ? 0.0f : times_power(x * sign, up); };
#pragma unroll
  for (uint32_t i = 0; i < latent.kCount; ++i) shared[latent.place(i)] = scaled(latent.x[i]);
  __syncwarp();
  const uint64_t to = args.at[arg_partial] + scratch.q + row * T::kKDim * 2;
#pragma unroll
  for (uint32_t i = 0; i < latent.kCount / 2; ++i) {
    const uint32_t column = latent.place(i) * 2;
    *pointer<uint32_t>(to + column * 2) =
        pack_16(shared[T::coordinate(column)], shared[T::coordinate(column + 1)], T::kBf16K);
  }
#pragma unroll
  for (uint32_t i = 0; i < rotary.kCount; ++i)
    if (rotary.has(i))
      *pointer<uint16_t>(to + (T::kLatentDim + rotary.place(i)) * 2) =
          static_cast<uint16_t>(pack_16(scaled(rotary.x[i]), 0.0f, T::kBf16K));
  if (threadIdx.x % kWarp == 0) {
    const float nan = __uint_as_float(0x7FC00000u);
    *pointer<float>(args.at[arg_partial] + scratch.factors + row * 4) =
        !finite ? nan : (factor == 0 ? 1.0f : factor);
  }
  __syncwarp();
}

// A sequence of the call, and whether its keys are cut.
struct LatentSequence {
  LatentWork work;  // all of it but rows and keys
  int64_t first_key, last_key;
  bool valid, cut;
};
inline LatentSequence latent_sequence(abi::AttentionParams p, const Args& args, uint64_t index) {
  LatentSequence of = {};
  of.work.sequence = static_cast<uint32_t>(index);
  of.valid = true;
  bool prompt = false;
  if (p.table.page_tokens != 0) {
    const auto* const begins = pointer<const int32_t>(args.at[arg_cu_seqlens_q]);
    const abi::BatchSequence s =
        abi::batch_sequence(p.table, p.tokens, begins[index], begins[index + 1],
                            pointer<const int32_t>(args.at[arg_kv_lengths])[index]);
    of.work.first_token = static_cast<uint32_t>(s.first_token);
    of.work.tokens = static_cast<uint32_t>(s.tokens);
    of.work.length = static_cast<int32_t>(s.length);
    of.work.tail_begin = static_cast<uint32_t>(
        abi::batch_tail_begin(pointer<const int32_t>(args.at[arg_tail_begin]), index, s.length));
    of.last_key = of.work.length;
    of.valid = s.valid;
    prompt =
        args.at[arg_is_prefill] != 0 && pointer<const uint8_t>(args.at[arg_is_prefill])[index] != 0;
  } else {
    if (args.at[arg_state] != 0)
      abi::attention_follow(*pointer<const abi::KvState>(args.at[arg_state]), p);
    of.work.tokens = static_cast<uint32_t>(p.tokens);
    of.work.length = static_cast<int32_t>(p.length);
    of.work.tail_begin = static_cast<uint32_t>(p.tail_begin);
    of.first_key = static_cast<int64_t>(p.first_key);
    of.last_key = static_cast<int64_t>(p.end_key);
  }
  of.cut = !prompt && of.work.tokens <= kLatentCutTokens;
  return of;
}

// A tile of rows and its work items. A warp.
inline void list_tile(const abi::AttentionParams& p, const Args& args, const LatentScratch& scratch,
                      const LatentSequence& of, uint32_t nth, uint64_t tile, uint32_t* works) {
  if (tile >= scratch.max_tiles) return;  // sequences that claim the same rows
  LatentWork work = of.work;
  const auto heads = static_cast<uint32_t>(p.heads);
  work.first_row = nth * kLatentRows;
  const uint32_t left = work.tokens * heads - work.first_row,
                 rows = left < kLatentRows ? left : kLatentRows;
  const abi::RowMask<int64_t> mask = latent_mask(p, work);
  const auto bounds = [&](uint32_t row) {
    return abi::row_bounds(mask, static_cast<int64_t>(row / heads), of.first_key, of.last_key);
  };
  // Bounds grow with the token.
  const int64_t begin = bounds(work.first_row).begin, end = bounds(work.first_row + rows - 1).end;
  uint32_t first = 0, count = 0;
  if (of.valid && end > begin) {
    const auto keys =
        static_cast<int64_t>(latent_split_keys(p, static_cast<uint64_t>(work.length), of.cut));
    first = static_cast<uint32_t>(begin / keys);
    count = static_cast<uint32_t>((end - 1) / keys) - first + 1;
    uint32_t at = threadIdx.x % kWarp == 0 ? atomicAdd(works, count) : 0;
    at = __shfl_sync(kAll, at, 0);
    auto* const to = pointer<LatentWork>(args.at[arg_partial] + scratch.works);
    for (uint32_t i = threadIdx.x % kWarp; i < count && at + i < scratch.max_works; i += kWarp) {
      const int64_t from = (first + i) * keys, until = from + keys;
      work.rows_split = rows | i << 16;
      work.begin = static_cast<int32_t>(from > begin ? from : begin);
      work.end = static_cast<int32_t>(until < end ? until : end);
      to[at + i] = work;
    }
  }
  if (threadIdx.x % kWarp != 0) return;
  pointer<LatentTile>(args.at[arg_partial] + scratch.tiles)[tile] = {
      work.first_token, work.first_row, rows | (of.valid ? 0u : 1u << 31), count};
}

// The list of work, by one block: some sequences at a time, then their tiles.
inline void list_work(const abi::AttentionParams& p, const Args& args,
                      const LatentScratch& scratch) {
  __shared__ uint64_t of_warps[kLatentThreads / kWarp];
  __shared__ uint32_t before[kLatentThreads];  // tiles of the sequences before
  __shared__ uint32_t works;
  if (threadIdx.x == 0) works = 0;
  __syncthreads();
  const uint64_t sequences = p.table.page_tokens != 0 ? p.table.sequences : 1;
  uint64_t tiles = 0;
  for (uint64_t base = 0; base < sequences; base += kLatentThreads) {
    const uint64_t index = base + threadIdx.x;
    uint64_t own = 0, all = 0;
    if (index < sequences) {
      const uint64_t rows = latent_sequence(p, args, index).work.tokens * p.heads;
      own = (rows + kLatentRows - 1) / kLatentRows;
    }
    before[threadIdx.x] = static_cast<uint32_t>(scan_block(own, of_warps, all));
    __syncthreads();
    for (uint32_t t = threadIdx.x / kWarp; t < all; t += kLatentWarps) {
      uint32_t low = 0;  // the last sequence that begins at t or before
      for (uint32_t step = kLatentThreads / 2; step != 0; step /= 2)
        if (low + step < sequences - base && before[low + step] <= t) low += step;
      const LatentSequence of = latent_sequence(p, args, base + low);
      list_tile(p, args, scratch, of, t - before[low], tiles + t, &works);
    }
    tiles += all;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  auto* const counts = pointer<LatentCounts>(args.at[arg_partial]);
  const auto least = [](uint64_t a, uint64_t b) { return static_cast<uint32_t>(a < b ? a : b); };
  counts->works = least(works, scratch.max_works);
  counts->tiles = least(tiles, scratch.max_tiles);
}

}  // namespace gyre::cuda
