#pragma once
// AMX's tiles: eight registers of 16 rows of 64 bytes. All of it anonymous, so that each file has
// its own copy.

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace gyre::cpu {
namespace {

constexpr size_t kTileSide = 16;  // rows of a tile, and its columns of 32 bits
constexpr size_t kTileBytes = 1024;

// Makes the tiles: eight, all of the full size. It takes hundreds of cycles, so that a work tile
// does it once.
inline void configure_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  static_assert(sizeof(config) == 64);
  // g++'s intrinsic reads eight bytes as far as the optimizer knows: it would drop the other
  // stores.
  asm volatile("" : : "m"(config));
  _tile_loadconfig(&config);
}

// Without tiles a thread has nothing that a context switch would have to save.
inline void release_tiles() { _tile_release(); }

// Between stores and the tile loads that read them: g++ does not know what a tile load reads.
inline void stores_are_done() { asm volatile("" ::: "memory"); }

// Sums of four tiles, as integers or floats.
template <class T>
struct alignas(64) TileSums {
  T at[4][kTileSide][kTileSide];
};

// out[i] gets 32-bit lane i of every v.
inline void transpose_lanes(const __m512i (&v)[kTileSide], __m512i (&out)[kTileSide]) {
  __m512i pairs[16], quads[16], halves[16];
  for (size_t i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  // quads[4 b + j]: lane 4 l + j of v[4 b] to v[4 b + 3] in each 128-bit part l.
  for (size_t b = 0; b < 16; b += 4) {
    quads[b] = _mm512_unpacklo_epi64(pairs[b], pairs[b + 2]);
    quads[b + 1] = _mm512_unpackhi_epi64(pairs[b], pairs[b + 2]);
    quads[b + 2] = _mm512_unpacklo_epi64(pairs[b + 1], pairs[b + 3]);
    quads[b + 3] = _mm512_unpackhi_epi64(pairs[b + 1], pairs[b + 3]);
  }
  for (size_t j = 0; j < 4; ++j) {
    halves[j] = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0x88);
    halves[4 + j] = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0xDD);
    halves[8 + j] = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0x88);
    halves[12 + j] = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0xDD);
  }
  for (size_t j = 0; j < 4; ++j) {
    out[j] = _mm512_shuffle_i32x4(halves[j], halves[8 + j], 0x88);
    out[8 + j] = _mm512_shuffle_i32x4(halves[j], halves[8 + j], 0xDD);
    out[4 + j] = _mm512_shuffle_i32x4(halves[4 + j], halves[12 + j], 0x88);
    out[12 + j] = _mm512_shuffle_i32x4(halves[4 + j], halves[12 + j], 0xDD);
  }
}

}  // namespace
}  // namespace gyre::cpu
