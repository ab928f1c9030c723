#pragma once
// Where the rows of a block's tiles meet: codes, a byte each, and scales in shared memory.
#include "abi/kv_feedback.h"
#include "cuda/kernels/dense_row.cuh"
#include "cuda/kernels/encode.cuh"

namespace gyre::cuda {

struct alignas(16) TileShared {
  uint8_t codes[kBlockThreads * kManySlots * kChunk];
  uint16_t scales[kBlockThreads / 32][abi::kKvMaxScales][abi::kKvTile];
  uint8_t present[kBlockThreads / 32][abi::kKvTile];
};

// Where a thread is in its block.
struct TileThread {
  uint32_t tile;    // of the block
  uint32_t thread;  // of the tile
  uint32_t slot;    // of the tile: the thread's row

  __device__ explicit TileThread(uint32_t lanes)
      : tile(threadIdx.x / (abi::kKvTile * lanes)),
        thread(threadIdx.x & (abi::kKvTile * lanes - 1)),
        slot(thread / lanes) {}
};

// A row of the source, or none: then another's address, for lanes that only take part.
template <class Source>
struct PlainRow {
  const Source* row;
  bool is_present;

  __device__ bool present() const { return is_present; }
  template <uint32_t kSlots>
  __device__ void load(const RowPlace<kSlots>& at, float (&y)[kSlots][kChunk]) const {
    load_row(at, row, y);
  }
  template <class Loader>
  __device__ void visit(const Loader& loader) const {
    loader(row);
  }
};

// A source whose rows are calibrated already: kv_feedback's.
struct CalibratedRow {
  uint8_t first;
};
template <>
struct PlainRow<CalibratedRow> {
  const CalibratedRow* row;
  bool is_present;

  __device__ bool present() const { return is_present; }
  // Codes of `count` coordinates from `begin` on, 8 at a time, to shared memory.
  __device__ void copy_codes(uint32_t head_dim, uint32_t begin, uint32_t count,
                             uint8_t* codes) const {
    const uint8_t* const from = &row->first + abi::kv_calibrated_codes(head_dim) + begin;
    for (uint32_t i = 0; i < count; i += kChunk) {
      uint32_t words[2];
      load_words(from + i, words);
      *reinterpret_cast<uint2*>(codes + begin + i) = make_uint2(words[0], words[1]);
    }
  }
  // The scale of block `block`.
  __device__ uint32_t scale(uint32_t head_dim, uint32_t block) const {
    const uint8_t* const at = &row->first + abi::kv_calibrated_scale(head_dim) + 2 * block;
    return at[0] | static_cast<uint32_t>(at[1]) << 8;
  }
};
template <class Row>
inline constexpr bool is_calibrated_row = is_same_type<Row, PlainRow<CalibratedRow>>;

// Source of a stream, 0 K or 1 V, if those in the mask kCalibrated are calibrated rows.
template <class Source, uint32_t kCalibrated, uint32_t kStream>
using SourceOf = typename Choose<(kCalibrated >> kStream & 1) != 0, CalibratedRow, Source>::type;

// Codes and scales of a row, or of part of one of `row_slots` slots, to shared memory.
template <uint32_t kSlots>
__device__ void put_row(const RowPlace<kSlots>& at, const TileThread& me, uint32_t row_slots,
                        const EncodedRow<kSlots>& encoded, TileShared& shared) {
  const uint32_t stride = at.lanes * row_slots * kChunk;
  uint8_t* const codes = shared.codes + (me.tile * abi::kKvTile + me.slot) * stride;
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    const uint32_t begin = at.begin(s);
    *reinterpret_cast<uint2*>(codes + begin) = make_uint2(encoded.codes[s][0], encoded.codes[s][1]);
    const uint32_t scale_size = least_of(at.size[s], abi::kKvScaleBlock);
    if (at.active(s) && (begin & (scale_size - 1)) == 0)
      shared.scales[me.tile][scale_index(at.head_dim, at.size[s], begin)][me.slot] =
          static_cast<uint16_t>(encoded.scale[s]);
  }
}

}  // namespace gyre::cuda
