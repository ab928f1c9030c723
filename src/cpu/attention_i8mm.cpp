// Attention's inner loops with Armv8.6's int8 matrix product and f16 widening product. Nothing here
// may be instantiated elsewhere: the file is compiled with instructions other machines lack.
#include <arm_neon.h>

#include "cpu/attention_kernels.h"

namespace gyre::cpu {
namespace {

constexpr uint32_t kTile = abi::kKvTile;

// Into the second cache: the first is full of what is worked on.
inline void fetch(const Ahead& ahead, uint32_t begin, uint32_t end) {
  const uint8_t* const last = ahead.at + uint64_t{end} * ahead.bytes_per_unit;
  for (const uint8_t* at = ahead.at + uint64_t{begin} * ahead.bytes_per_unit; at < last; at += 64)
    __builtin_prefetch(at, 0, 2);
}

template <uint32_t kFormat, class At>
inline int8x16_t level_table(const At& at) {
  alignas(16) int8_t table[16];
  for (uint32_t i = 0; i < 16; ++i) table[i] = static_cast<int8_t>(at(i));
  return vld1q_s8(table);
}

inline int8x16_t look_up(int8x16_t table, uint8x16_t index) { return vqtbl1q_s8(table, index); }

// Turns the sign of magnitudes where the mask is all ones.
inline int8x16_t negate_where(int8x16_t magnitude, uint8x16_t mask) {
  const int8x16_t m = vreinterpretq_s8_u8(mask);
  return vsubq_s8(veorq_s8(magnitude, m), m);
}

// Two-bit fields: the two of a nibble are looked up by the whole nibble, which spares isolating
// them.
template <uint32_t kFormat>
struct FieldTables {
  static constexpr int32_t level(uint32_t field) {
    return abi::kv_level(kFormat,
                         field);  // tq3: the magnitudes, the sign comes from the high plane
  }
  int8x16_t even = level_table<kFormat>([](uint32_t i) { return level(i & 3); });
  int8x16_t odd = level_table<kFormat>([](uint32_t i) { return level(i >> 2); });
};

inline uint8x16_t pair_lower(uint8x16_t a, uint8x16_t b) {
  return vreinterpretq_u8_u64(vtrn1q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}
inline uint8x16_t pair_upper(uint8x16_t a, uint8x16_t b) {
  return vreinterpretq_u8_u64(vtrn2q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}

// 16 stored bytes of two keys, as two vectors of eight bytes of one and eight of the other: what
// the matrix product wants. Unpacking works on bytes, so it may come after.
struct BytePair {
  uint8x16_t half[2];
  BytePair(const uint8_t* a, const uint8_t* b) {
    const uint8x16_t first = vld1q_u8(a), second = vld1q_u8(b);
    half[0] = pair_lower(first, second);
    half[1] = pair_upper(first, second);
  }
};

inline uint8x16_t low_nibbles(uint8x16_t bytes) { return vandq_u8(bytes, vdupq_n_u8(15)); }
inline uint8x16_t high_nibbles(uint8x16_t bytes) { return vshrq_n_u8(bytes, 4); }

// 64 coordinates of two rows of K: at<j, half>() gives the levels of 8 coordinates, 16 j + 8 half
// on, of both. Rows have whole groups of 16 bytes.
template <uint32_t kFormat>
struct KeyPair;

template <>
struct KeyPair<abi::kTq8> {
  struct Tables {};
  const uint8_t *a, *b;
  KeyPair(const uint8_t* first, const uint8_t* second, uint32_t, uint32_t unit)
      : a(first + unit * 64), b(second + unit * 64) {}
  template <uint32_t j>
  void levels(const Tables&, int8x16_t (&v)[2]) const {
    const BytePair pair(a + 16 * j, b + 16 * j);
    v[0] = vreinterpretq_s8_u8(pair.half[0]);
    v[1] = vreinterpretq_s8_u8(pair.half[1]);
  }
};

// The low plane of 4, 5 and 6 bits.
struct NibblePair {
  BytePair raw[2];
  NibblePair(const uint8_t* a, const uint8_t* b, uint32_t unit)
      : raw{{a + unit * 32, b + unit * 32}, {a + unit * 32 + 16, b + unit * 32 + 16}} {}
  template <uint32_t j>
  void look_up_both(int8x16_t table, int8x16_t (&v)[2]) const {
    for (uint32_t half = 0; half < 2; ++half) {
      const uint8x16_t bytes = raw[j / 2].half[half];
      v[half] = look_up(table, j % 2 == 0 ? low_nibbles(bytes) : high_nibbles(bytes));
    }
  }
};

template <uint32_t kFormat>
struct NibbleTables {
  int8x16_t level = level_table<kFormat>([](uint32_t i) { return abi::kv_level(kFormat, i); });
};

template <>
struct KeyPair<abi::kTq4> {
  using Tables = NibbleTables<abi::kTq4>;
  NibblePair low;
  KeyPair(const uint8_t* a, const uint8_t* b, uint32_t, uint32_t unit) : low(a, b, unit) {}
  template <uint32_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.look_up_both<j>(t.level, v);
  }
};

// The low plane of 2 and 3 bits.
template <uint32_t kFormat>
struct FieldPair {
  uint8x16_t nibbles[2][2];
  FieldPair(const uint8_t* a, const uint8_t* b, uint32_t unit) {
    const BytePair raw(a + unit * 16, b + unit * 16);
    for (uint32_t half = 0; half < 2; ++half) {
      nibbles[0][half] = low_nibbles(raw.half[half]);
      nibbles[1][half] = high_nibbles(raw.half[half]);
    }
  }
  template <uint32_t j>
  void look_up_both(const FieldTables<kFormat>& t, int8x16_t (&v)[2]) const {
    for (uint32_t half = 0; half < 2; ++half)
      v[half] = look_up(j % 2 == 0 ? t.even : t.odd, nibbles[j / 2][half]);
  }
};

template <>
struct KeyPair<abi::kTq2> {
  using Tables = FieldTables<abi::kTq2>;
  FieldPair<abi::kTq2> low;
  KeyPair(const uint8_t* a, const uint8_t* b, uint32_t, uint32_t unit) : low(a, b, unit) {}
  template <uint32_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.look_up_both<j>(t, v);
  }
};

// A one-bit plane: 128 coordinates in 16 bytes, bit j of a byte belongs to coordinates 16 j on.
struct BitPair {
  uint8x16_t half[2];
  BitPair(const uint8_t* a, const uint8_t* b, uint32_t unit) {
    const BytePair raw(a + unit / 2 * 16, b + unit / 2 * 16);
    for (uint32_t i = 0; i < 2; ++i)
      half[i] = unit % 2 == 0 ? raw.half[i] : high_nibbles(raw.half[i]);
  }
  template <uint32_t j>
  uint8x16_t mask(uint32_t i) const {
    return vtstq_u8(half[i], vdupq_n_u8(1u << j));
  }
};

template <>
struct KeyPair<abi::kTq3> {
  using Tables = FieldTables<abi::kTq3>;
  FieldPair<abi::kTq3> low;
  BitPair signs;
  KeyPair(const uint8_t* a, const uint8_t* b, uint32_t head_dim, uint32_t unit)
      : low(a, b, unit), signs(a + head_dim / 4, b + head_dim / 4, unit) {}
  template <uint32_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.look_up_both<j>(t, v);
    for (uint32_t half = 0; half < 2; ++half) v[half] = negate_where(v[half], signs.mask<j>(half));
  }
};

template <>
struct KeyPair<abi::kTq5> {
  using Tables = NibbleTables<abi::kTq5>;
  NibblePair low;
  BitPair high;
  KeyPair(const uint8_t* a, const uint8_t* b, uint32_t head_dim, uint32_t unit)
      : low(a, b, unit), high(a + head_dim / 2, b + head_dim / 2, unit) {}
  template <uint32_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.look_up_both<j>(t.level, v);
    for (uint32_t half = 0; half < 2; ++half) {
      const uint8x16_t upper = vandq_u8(high.mask<j>(half), vdupq_n_u8(32));
      v[half] = vaddq_s8(v[half], vreinterpretq_s8_u8(upper));
    }
  }
};

template <>
struct KeyPair<abi::kTq6> {
  using Tables = NibbleTables<abi::kTq6>;
  NibblePair low;
  BytePair high;
  KeyPair(const uint8_t* a, const uint8_t* b, uint32_t head_dim, uint32_t unit)
      : low(a, b, unit), high(a + head_dim / 2 + unit * 16, b + head_dim / 2 + unit * 16) {}
  template <uint32_t j>
  static uint8x16_t to_place(uint8x16_t bytes) {  // bits 2j and 2j + 1 to 5 and 6
    if constexpr (j == 0) return vshlq_n_u8(bytes, 5);
    if constexpr (j == 1) return vshlq_n_u8(bytes, 3);
    if constexpr (j == 2) return vshlq_n_u8(bytes, 1);
    return vshrq_n_u8(bytes, 1);
  }
  template <uint32_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.look_up_both<j>(t.level, v);
    for (uint32_t half = 0; half < 2; ++half) {
      const uint8x16_t upper = vandq_u8(to_place<j>(high.half[half]), vdupq_n_u8(0x60));
      v[half] = vaddq_s8(v[half], vreinterpretq_s8_u8(upper));
    }
  }
};

// Four keys times kOperands pairs of query rows, 16 of a unit's coordinates: acc[operand][pair of
// keys] holds {first row x key 0, first x key 1, second x key 0, second x key 1}.
template <uint32_t kFormat, uint32_t kOperands, uint32_t j>
inline void multiply_keys(const typename KeyPair<kFormat>::Tables& t,
                          const KeyPair<kFormat> (&keys)[2], const int8_t* q, uint64_t q_stride,
                          int32x4_t (&acc)[kOperands][2]) {
  int8x16_t k[2][2];
  for (uint32_t pair = 0; pair < 2; ++pair) keys[pair].template levels<j>(t, k[pair]);
  for (uint32_t r = 0; r < kOperands; ++r) {
    for (uint32_t half = 0; half < 2; ++half) {
      const int8x16_t query = vld1q_s8(q + r * q_stride + (2 * j + half) * 16);
      for (uint32_t pair = 0; pair < 2; ++pair)
        acc[r][pair] = vmmlaq_s32(acc[r][pair], query, k[pair][half]);
    }
  }
}

inline float32x4_t key_scales(const uint8_t* scales) {
  const uint16x4_t stored = vreinterpret_u16_u8(vld1_u8(scales));
  return vmulq_n_f32(vreinterpretq_f32_u32(vshll_n_u16(stored, 15)), 0x1p-31f);
}

inline int32x4_t first_rows(const int32x4_t (&acc)[2]) {
  return vreinterpretq_s32_s64(
      vtrn1q_s64(vreinterpretq_s64_s32(acc[0]), vreinterpretq_s64_s32(acc[1])));
}
inline int32x4_t second_rows(const int32x4_t (&acc)[2]) {
  return vreinterpretq_s32_s64(
      vtrn2q_s64(vreinterpretq_s64_s32(acc[0]), vreinterpretq_s64_s32(acc[1])));
}

// Four keys times kOperands pairs: of the two bytes of a row, or of two rows.
template <uint32_t kFormat, uint32_t kOperands, bool kBytes>
inline void score_keys(const ScoreJob& job, const typename KeyPair<kFormat>::Tables& tables,
                       uint32_t operand, uint32_t key) {
  constexpr uint32_t kRows = kBytes ? 2 * kOperands : kOperands;
  const uint64_t q_stride = uint64_t{2} * job.head_dim, stride = job.key_stride;
  const int8_t* const q = job.q + operand * q_stride;
  const uint8_t* const keys = job.keys + key * stride;
  const uint8_t* const scales = job.scales + key / kTile * job.scales_stride + key % kTile * 2;
  float32x4_t score[kRows];
  for (uint32_t r = 0; r < kRows; ++r) score[r] = vdupq_n_f32(0);
  for (uint32_t b = 0; b < job.blocks->count; ++b) {
    int32x4_t acc[kOperands][2];
    for (uint32_t r = 0; r < kOperands; ++r) acc[r][0] = acc[r][1] = vdupq_n_s32(0);
    const uint32_t first = job.blocks->begin[b] / 64, units = job.blocks->size[b] / 64;
    for (uint32_t unit = first; unit < first + units; ++unit) {
      const KeyPair<kFormat> loaded[2] = {
          {keys, keys + stride, job.head_dim, unit},
          {keys + 2 * stride, keys + 3 * stride, job.head_dim, unit}};
      const int8_t* const at = q + uint64_t{128} * unit;
      multiply_keys<kFormat, kOperands, 0>(tables, loaded, at, q_stride, acc);
      multiply_keys<kFormat, kOperands, 1>(tables, loaded, at, q_stride, acc);
      multiply_keys<kFormat, kOperands, 2>(tables, loaded, at, q_stride, acc);
      multiply_keys<kFormat, kOperands, 3>(tables, loaded, at, q_stride, acc);
    }
    const float32x4_t scale = key_scales(scales + b * kTile * 2);
    for (uint32_t r = 0; r < kOperands; ++r) {
      const int32x4_t one = first_rows(acc[r]), other = second_rows(acc[r]);
      if constexpr (kBytes) {
        score[2 * r] = vfmaq_f32(score[2 * r], vcvtq_f32_s32(one), scale);
        score[2 * r + 1] = vfmaq_f32(score[2 * r + 1], vcvtq_f32_s32(other), scale);
      } else {
        const int32x4_t whole = vaddq_s32(vshlq_n_s32(one, 8), other);
        score[r] = vfmaq_f32(score[r], vcvtq_f32_s32(whole), scale);
      }
    }
  }
  const uint32_t row = kBytes ? 2 * operand : operand;
  for (uint32_t r = 0; r < kRows && row + r < job.rows; ++r)
    vst1q_f32(job.scores + (row + r) * kAttentionBlock + key, score[r]);
}

template <uint32_t kFormat, uint32_t kOperands, bool kBytes>
void score_operands(const ScoreJob& job, uint32_t operand) {
  const typename KeyPair<kFormat>::Tables tables;
  for (uint32_t key = 0; key < job.tiles * kTile; key += 4) {
    if (operand == 0) fetch(job.ahead, key, key + 4);
    score_keys<kFormat, kOperands, kBytes>(job, tables, operand, key);
  }
}

template <uint32_t kFormat, bool kBytes>
void score_all(const ScoreJob& job) {
  const uint32_t operands = kBytes ? (job.rows + 1) / 2 : job.rows;
  uint32_t at = 0;
  for (; at + 4 <= operands; at += 4) score_operands<kFormat, 4, kBytes>(job, at);
  if (operands - at == 3) return score_operands<kFormat, 3, kBytes>(job, at);
  if (operands - at == 2) return score_operands<kFormat, 2, kBytes>(job, at);
  if (operands - at == 1) return score_operands<kFormat, 1, kBytes>(job, at);
}

template <uint32_t kFormat>
void score_format(const ScoreJob& job) {
  job.byte_queries ? score_all<kFormat, true>(job) : score_all<kFormat, false>(job);
}

void score_levels(const ScoreJob& job) {
  switch (job.format) {
    case abi::kTq2:
      return score_format<abi::kTq2>(job);
    case abi::kTq3:
      return score_format<abi::kTq3>(job);
    case abi::kTq4:
      return score_format<abi::kTq4>(job);
    case abi::kTq5:
      return score_format<abi::kTq5>(job);
    case abi::kTq6:
      return score_format<abi::kTq6>(job);
    default:
      return score_format<abi::kTq8>(job);
  }
}

inline int8x16_t zip1_32(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}
inline int8x16_t zip2_32(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}
inline int8x16_t zip1_16(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s16(vzip1q_s16(vreinterpretq_s16_s8(a), vreinterpretq_s16_s8(b)));
}
inline int8x16_t zip2_16(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s16(vzip2q_s16(vreinterpretq_s16_s8(a), vreinterpretq_s16_s8(b)));
}

// Eight coordinates of a tile of V from the low plane: v[i] holds the eight tokens of coordinate
// 2i, then those of 2i + 1.
inline void load_nibbles(int8x16_t level, const uint8_t* plane, int8x16_t (&v)[4]) {
  for (uint32_t i = 0; i < 2; ++i) {
    const uint8x16_t raw = vld1q_u8(plane + 16 * i);
    const int8x16_t early = look_up(level, low_nibbles(raw));
    const int8x16_t late = look_up(level, high_nibbles(raw));
    v[2 * i] = zip1_32(early, late);
    v[2 * i + 1] = zip2_32(early, late);
  }
}

// Two-bit fields of eight coordinates, through one table per field of a nibble.
inline void load_fields(int8x16_t even, int8x16_t odd, const uint8_t* plane, int8x16_t (&v)[4]) {
  const uint8x16_t raw = vld1q_u8(plane);
  const uint8x16_t low = low_nibbles(raw), high = high_nibbles(raw);
  const int8x16_t t01 = look_up(even, low), t23 = look_up(odd, low);
  const int8x16_t t45 = look_up(even, high), t67 = look_up(odd, high);
  const int8x16_t early1 = zip1_16(t01, t23), early2 = zip2_16(t01, t23);
  const int8x16_t late1 = zip1_16(t45, t67), late2 = zip2_16(t45, t67);
  v[0] = zip1_32(early1, late1), v[1] = zip2_32(early1, late1);
  v[2] = zip1_32(early2, late2), v[3] = zip2_32(early2, late2);
}

// One-bit plane, a byte per coordinate: all ones where the bit is set.
inline uint8x16_t bits_of_pair(uint8x16_t bytes, uint32_t i) {
  alignas(16) static constexpr uint8_t kRepeat[4][16] = {
      {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1},
      {2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3},
      {4, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5},
      {6, 6, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7}};
  alignas(16) static constexpr uint8_t kBit[16] = {1, 2, 4, 8, 16, 32, 64, 128,
                                                   1, 2, 4, 8, 16, 32, 64, 128};
  return vtstq_u8(vqtbl1q_u8(bytes, vld1q_u8(kRepeat[i])), vld1q_u8(kBit));
}

template <uint32_t kFormat>
struct ValueLoader;

template <>
struct ValueLoader<abi::kTq8> {
  void load(const uint8_t* tile, uint32_t, uint32_t c, int8x16_t (&v)[4]) const {
    for (uint32_t i = 0; i < 4; ++i)
      v[i] = vld1q_s8(reinterpret_cast<const int8_t*>(tile) + c * 8 + 16 * i);
  }
};

template <>
struct ValueLoader<abi::kTq4> : NibbleTables<abi::kTq4> {
  void load(const uint8_t* tile, uint32_t, uint32_t c, int8x16_t (&v)[4]) const {
    load_nibbles(level, tile + c * 4, v);
  }
};

template <>
struct ValueLoader<abi::kTq2> : FieldTables<abi::kTq2> {
  void load(const uint8_t* tile, uint32_t, uint32_t c, int8x16_t (&v)[4]) const {
    load_fields(even, odd, tile + c * 2, v);
  }
};

template <>
struct ValueLoader<abi::kTq3> : FieldTables<abi::kTq3> {
  void load(const uint8_t* tile, uint32_t head_dim, uint32_t c, int8x16_t (&v)[4]) const {
    load_fields(even, odd, tile + c * 2, v);
    const uint8x8_t signs = vld1_u8(tile + head_dim * 2 + c);
    for (uint32_t i = 0; i < 4; ++i)
      v[i] = negate_where(v[i], bits_of_pair(vcombine_u8(signs, signs), i));
  }
};

template <>
struct ValueLoader<abi::kTq5> : NibbleTables<abi::kTq5> {
  void load(const uint8_t* tile, uint32_t head_dim, uint32_t c, int8x16_t (&v)[4]) const {
    load_nibbles(level, tile + c * 4, v);
    const uint8x8_t high = vld1_u8(tile + head_dim * 4 + c);
    for (uint32_t i = 0; i < 4; ++i) {
      const uint8x16_t upper = vandq_u8(bits_of_pair(vcombine_u8(high, high), i), vdupq_n_u8(32));
      v[i] = vaddq_s8(v[i], vreinterpretq_s8_u8(upper));
    }
  }
};

template <>
struct ValueLoader<abi::kTq6> : NibbleTables<abi::kTq6> {
  int8x16_t even = level_table<abi::kTq6>([](uint32_t i) { return (i & 3) * 32; });
  int8x16_t odd = level_table<abi::kTq6>([](uint32_t i) { return (i >> 2) * 32; });
  void load(const uint8_t* tile, uint32_t head_dim, uint32_t c, int8x16_t (&v)[4]) const {
    int8x16_t upper[4];
    load_nibbles(level, tile + c * 4, v);
    load_fields(even, odd, tile + head_dim * 4 + c * 2, upper);
    for (uint32_t i = 0; i < 4; ++i) v[i] = vaddq_s8(v[i], upper[i]);
  }
};

// Probabilities of a block, times the values' scales, in 8 bits against the largest of their row.
struct ByteProbabilities {
  alignas(16) uint8_t p[kAttentionRows * kAttentionBlock];  // [pair of rows][tile][row][token]
  float unit[kAttentionRows];
};

constexpr float kHuge = 1e38f;

// A key that is not seen must not bring in its scale, which may be NaN. Returns the largest
// product.
float weigh_with_care(const float* p, const float* scales, uint32_t vectors,
                      float32x4_t* weighted) {
  float32x4_t largest = vdupq_n_f32(0);
  for (uint32_t i = 0; i < vectors; ++i) {
    const float32x4_t probability = vld1q_f32(p + 4 * i);
    const uint32x4_t unseen = vceqzq_f32(probability);
    const float32x4_t product = vmulq_f32(probability, vld1q_f32(scales + 4 * i));
    weighted[i] = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(product), unseen));
    largest = vmaxq_f32(largest, weighted[i]);
  }
  return vmaxvq_f32(largest);
}

void quantize_row(const AccumulateJob& job, const float* scales, uint32_t row,
                  ByteProbabilities& out) {
  const float* const p = job.p + row * kAttentionBlock;
  float32x4_t weighted[kAttentionBlock / 4];
  float32x4_t largest = vdupq_n_f32(0);
  const uint32_t vectors = job.tiles * 2;
  for (uint32_t i = 0; i < vectors; ++i) {
    weighted[i] = vmulq_f32(vld1q_f32(p + 4 * i), vld1q_f32(scales + 4 * i));
    largest = vmaxq_f32(largest, weighted[i]);
  }
  float top = vmaxvq_f32(largest);
  if (!(top < kHuge)) top = weigh_with_care(p, scales, vectors, weighted);
  out.unit[row] = top * (1.0f / 255.0f);
  const float inverse = top > 0 ? 255.0f / top : 0.0f;
  uint8_t* const place = out.p + row / 2 * (2 * kAttentionBlock) + row % 2 * kTile;
  for (uint32_t tile = 0; tile < job.tiles; ++tile) {
    const uint32x4_t a = vcvtnq_u32_f32(vmulq_n_f32(weighted[2 * tile], inverse));
    const uint32x4_t b = vcvtnq_u32_f32(vmulq_n_f32(weighted[2 * tile + 1], inverse));
    const uint16x8_t both = vcombine_u16(vmovn_u32(a), vmovn_u32(b));
    vst1_u8(place + tile * (2 * kTile), vqmovn_u16(both));
  }
}

// kUnits * 8 coordinates from c on, kPairs pairs of rows, all tiles of the block.
template <uint32_t kFormat, uint32_t kPairs, uint32_t kUnits>
inline void accumulate_unit(const AccumulateJob& job, const ValueLoader<kFormat>& loader,
                            const ByteProbabilities& bytes, uint32_t pair, uint32_t c) {
  int32x4_t acc[kPairs][kUnits * 4];
  for (uint32_t i = 0; i < kPairs; ++i) {
    for (uint32_t j = 0; j < kUnits * 4; ++j) acc[i][j] = vdupq_n_s32(0);
  }
  for (uint32_t tile = 0; tile < job.tiles; ++tile) {
    uint8x16_t p[kPairs];
    for (uint32_t i = 0; i < kPairs; ++i)
      p[i] = vld1q_u8(bytes.p + (pair + i) * (2 * kAttentionBlock) + tile * (2 * kTile));
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      int8x16_t v[4];
      loader.load(job.values + tile * job.value_stride, job.head_dim, c + 8 * unit, v);
      for (uint32_t j = 0; j < 4; ++j) {
        for (uint32_t i = 0; i < kPairs; ++i)
          acc[i][unit * 4 + j] = vusmmlaq_s32(acc[i][unit * 4 + j], p[i], v[j]);
      }
    }
  }
  for (uint32_t i = 0; i < kPairs; ++i) {
    const uint32_t row = 2 * (pair + i), other = row + 1 < job.rows ? row + 1 : row;
    const float32x4_t keep = vcombine_f32(vdup_n_f32(job.keep[row]), vdup_n_f32(job.keep[other]));
    const float32x4_t unit =
        vcombine_f32(vdup_n_f32(bytes.unit[row]), vdup_n_f32(bytes.unit[other]));
    float* const place = job.acc + level_acc_index(row, c, job.head_dim);
    const bool kept = job.keep[row] == 1 && job.keep[other] == 1;
    for (uint32_t j = 0; j < kUnits * 4; ++j) {
      float32x4_t old = vld1q_f32(place + 4 * j);
      if (!kept) old = vmulq_f32(old, keep);
      vst1q_f32(place + 4 * j, vfmaq_f32(old, vcvtq_f32_s32(acc[i][j]), unit));
    }
  }
}

template <uint32_t kFormat, uint32_t kPairs>
void accumulate_pairs(const AccumulateJob& job, const ByteProbabilities& bytes, uint32_t pair,
                      uint32_t block) {
  constexpr uint32_t kUnits = kPairs <= 2 ? 2 : 1;
  const ValueLoader<kFormat> loader;
  uint32_t c = job.blocks->begin[block];
  const uint32_t end = c + job.blocks->size[block];
  for (; c + 8 * kUnits <= end; c += 8 * kUnits) {
    if (pair == 0) fetch(job.ahead, c / 8, c / 8 + kUnits);
    accumulate_unit<kFormat, kPairs, kUnits>(job, loader, bytes, pair, c);
  }
  if (c < end) accumulate_unit<kFormat, kPairs, 1>(job, loader, bytes, pair, c);
}

template <uint32_t kFormat>
void accumulate_tiles(const AccumulateJob& job) {
  ByteProbabilities bytes;
  for (uint32_t block = 0; block < job.blocks->count; ++block) {
    float scales[kAttentionBlock];
    for (uint32_t tile = 0; tile < job.tiles; ++tile) {
      const uint8_t* const stored = job.scales + tile * job.scales_stride + block * kTile * 2;
      vst1q_f32(scales + tile * kTile, key_scales(stored));
      vst1q_f32(scales + tile * kTile + 4, key_scales(stored + 8));
    }
    for (uint32_t row = 0; row < job.rows; ++row) quantize_row(job, scales, row, bytes);
    if (job.rows % 2 != 0) {  // the other half of the last pair
      uint8_t* const pair = bytes.p + job.rows / 2 * (2 * kAttentionBlock);
      for (uint32_t tile = 0; tile < job.tiles; ++tile) vst1_u8(pair + tile * 16 + 8, vdup_n_u8(0));
    }
    const uint32_t pairs = (job.rows + 1) / 2;
    uint32_t pair = 0;
    for (; pair + 4 <= pairs; pair += 4) accumulate_pairs<kFormat, 4>(job, bytes, pair, block);
    for (; pair + 2 <= pairs; pair += 2) accumulate_pairs<kFormat, 2>(job, bytes, pair, block);
    if (pair < pairs) accumulate_pairs<kFormat, 1>(job, bytes, pair, block);
  }
}

// Up to 64 keys share the unit of their 8-bit probabilities. For 8-bit values that would show: 32
// do.
template <uint32_t kFormat>
void accumulate_format(const AccumulateJob& job) {
  constexpr uint32_t kTogether = kFormat == abi::kTq8 ? 4 : kAttentionBlock / kTile;
  static constexpr float kOnes[kAttentionRows] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                  1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                  1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                  1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  AccumulateJob part = job;
  for (uint32_t tile = 0; tile < job.tiles; tile += kTogether) {
    part.values = job.values + tile * job.value_stride;
    part.scales = job.scales + tile * job.scales_stride;
    part.p = job.p + tile * kTile;
    part.tiles = job.tiles - tile < kTogether ? job.tiles - tile : kTogether;
    accumulate_tiles<kFormat>(part);
    part.keep = kOnes;
    part.ahead = {};
  }
}

void accumulate_levels(const AccumulateJob& job) {
  switch (job.format) {
    case abi::kTq2:
      return accumulate_format<abi::kTq2>(job);
    case abi::kTq3:
      return accumulate_format<abi::kTq3>(job);
    case abi::kTq4:
      return accumulate_format<abi::kTq4>(job);
    case abi::kTq5:
      return accumulate_format<abi::kTq5>(job);
    case abi::kTq6:
      return accumulate_format<abi::kTq6>(job);
    default:
      return accumulate_format<abi::kTq8>(job);
  }
}

// kKeys keys times kRows queries in f16. Eight products of a lane are summed in f16, then widened:
// an error of 1e-7 of the logit's variance, and a third fewer instructions than widening each. The
// caller scales queries to at most 1/16, so that eight products cannot overflow.
template <uint32_t kRows, uint32_t kKeys, uint32_t kFirst>
inline void score_f16_keys(const ScoreJob& job, uint32_t row, const float16_t* const (&k)[4],
                           float32x4_t (&sums)[kRows][4]) {
  constexpr uint32_t kRun = 64;  // coordinates: eight per lane
  const auto* const q = reinterpret_cast<const float16_t*>(job.q_half) + row * job.head_dim;
  const float16x8_t ones = vdupq_n_f16(1);
  float32x4_t sum[kRows][kKeys];
  for (uint32_t r = 0; r < kRows; ++r) {
    for (uint32_t i = 0; i < kKeys; ++i) sum[r][i] = vdupq_n_f32(0);
  }
  for (uint32_t begin = 0; begin < job.head_dim; begin += kRun) {
    const uint32_t end = begin + kRun < job.head_dim ? begin + kRun : job.head_dim;
    float16x8_t run[kRows][kKeys];
    for (uint32_t r = 0; r < kRows; ++r) {
      for (uint32_t i = 0; i < kKeys; ++i) run[r][i] = vdupq_n_f16(0);
    }
    for (uint32_t c = begin; c < end; c += 8) {
      float16x8_t key[kKeys];
      for (uint32_t i = 0; i < kKeys; ++i) key[i] = vld1q_f16(k[kFirst + i] + c);
      for (uint32_t r = 0; r < kRows; ++r) {
        const float16x8_t query = vld1q_f16(q + r * job.head_dim + c);
        for (uint32_t i = 0; i < kKeys; ++i) run[r][i] = vfmaq_f16(run[r][i], query, key[i]);
      }
    }
    for (uint32_t r = 0; r < kRows; ++r) {
      for (uint32_t i = 0; i < kKeys; ++i) {
        sum[r][i] = vfmlalq_low_f16(sum[r][i], run[r][i], ones);
        sum[r][i] = vfmlalq_high_f16(sum[r][i], run[r][i], ones);
      }
    }
  }
  for (uint32_t r = 0; r < kRows; ++r) {
    for (uint32_t i = 0; i < kKeys; ++i) sums[r][kFirst + i] = sum[r][i];
  }
}

template <uint32_t kRows>
void score_f16_rows(const ScoreJob& job, uint32_t row, uint32_t key, uint32_t keys) {
  const float16_t* k[4];
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t at = key + (i < keys ? i : 0);  // a key that is not there is replaced, not read
    k[i] = reinterpret_cast<const float16_t*>(job.keys + at * job.key_stride);
  }
  float32x4_t sums[kRows][4];
  if constexpr (kRows > 1) {  // as many as the registers hold
    score_f16_keys<kRows, 2, 0>(job, row, k, sums);
    score_f16_keys<kRows, 2, 2>(job, row, k, sums);
  } else {
    score_f16_keys<kRows, 4, 0>(job, row, k, sums);
  }
  for (uint32_t r = 0; r < kRows; ++r) {
    float lanes[4];
    vst1q_f32(lanes,
              vpaddq_f32(vpaddq_f32(sums[r][0], sums[r][1]), vpaddq_f32(sums[r][2], sums[r][3])));
    for (uint32_t i = 0; i < keys; ++i)
      job.scores[(row + r) * kAttentionBlock + key + i] = lanes[i];
  }
}

void score_f16(const ScoreJob& job) {
  const uint32_t keys = job.tiles;  // dense caches count slots
  for (uint32_t key = 0; key < keys; key += 4) {
    fetch(job.ahead, key, key + 4);
    const uint32_t count = keys - key < 4 ? keys - key : 4;
    uint32_t row = 0;
    for (; row + 4 <= job.rows; row += 4) score_f16_rows<4>(job, row, key, count);
    for (; row + 2 <= job.rows; row += 2) score_f16_rows<2>(job, row, key, count);
    if (row < job.rows) score_f16_rows<1>(job, row, key, count);
  }
}

// One value row times one probability of each row.
template <int kLane, uint32_t kRows, uint32_t kVectors>
inline void add_value(const uint8_t* value, const float16x8_t (&p)[kRows],
                      float32x4_t (&acc)[kRows][2 * kVectors]) {
  for (uint32_t i = 0; i < kVectors; ++i) {
    const float16x8_t v = vld1q_f16(reinterpret_cast<const float16_t*>(value) + 8 * i);
    for (uint32_t r = 0; r < kRows; ++r) {
      acc[r][2 * i] = vfmlalq_laneq_low_f16(acc[r][2 * i], v, p[r], kLane);
      acc[r][2 * i + 1] = vfmlalq_laneq_high_f16(acc[r][2 * i + 1], v, p[r], kLane);
    }
  }
}

template <uint32_t kRows, uint32_t kVectors>
inline void accumulate_f16_chunk(const AccumulateJob& job, const float16_t (*p)[kAttentionBlock],
                                 uint32_t row, uint32_t c) {
  float32x4_t acc[kRows][2 * kVectors];
  float* const place = job.acc + uint64_t{row} * job.head_dim + c;
  for (uint32_t r = 0; r < kRows; ++r) {
    for (uint32_t i = 0; i < 2 * kVectors; ++i)
      acc[r][i] = vmulq_n_f32(vld1q_f32(place + r * job.head_dim + 4 * i), job.keep[row + r]);
  }
  const uint64_t stride = job.value_stride;
  const uint8_t* value = job.values + job.begin * stride + c * sizeof(float16_t);
  uint32_t key = job.begin;
  const auto one = [&] {
    float16x8_t weights[kRows];
    for (uint32_t r = 0; r < kRows; ++r) weights[r] = vdupq_n_f16(p[r][key]);
    add_value<0, kRows, kVectors>(value, weights, acc);
    ++key, value += stride;
  };
  while (key < job.end && key % 8 != 0) one();
  for (; key + 8 <= job.end; key += 8, value += 8 * stride) {
    float16x8_t weights[kRows];
    for (uint32_t r = 0; r < kRows; ++r) weights[r] = vld1q_f16(p[r] + key);
    add_value<0, kRows, kVectors>(value, weights, acc);
    add_value<1, kRows, kVectors>(value + stride, weights, acc);
    add_value<2, kRows, kVectors>(value + 2 * stride, weights, acc);
    add_value<3, kRows, kVectors>(value + 3 * stride, weights, acc);
    add_value<4, kRows, kVectors>(value + 4 * stride, weights, acc);
    add_value<5, kRows, kVectors>(value + 5 * stride, weights, acc);
    add_value<6, kRows, kVectors>(value + 6 * stride, weights, acc);
    add_value<7, kRows, kVectors>(value + 7 * stride, weights, acc);
  }
  while (key < job.end) one();
  for (uint32_t r = 0; r < kRows; ++r) {
    for (uint32_t i = 0; i < 2 * kVectors; ++i)
      vst1q_f32(place + r * job.head_dim + 4 * i, acc[r][i]);
  }
}

template <uint32_t kRows>
void accumulate_f16_rows(const AccumulateJob& job, uint32_t row) {
  alignas(16) float16_t p[kRows][kAttentionBlock];
  for (uint32_t r = 0; r < kRows; ++r) {
    const float* const from = job.p + (row + r) * kAttentionBlock;
    for (uint32_t i = 0; i < kAttentionBlock; i += 4)
      vst1_f16(p[r] + i, vcvt_f16_f32(vld1q_f32(from + i)));
  }
  constexpr uint32_t kVectors = kRows == 1 ? 8 : 2;  // enough sums not to wait for each other
  uint32_t c = 0;
  for (; c + 8 * kVectors <= job.head_dim; c += 8 * kVectors) {
    if (row == 0) fetch(job.ahead, c / 8, c / 8 + kVectors);
    accumulate_f16_chunk<kRows, kVectors>(job, p, row, c);
  }
  for (; c < job.head_dim; c += 8) accumulate_f16_chunk<kRows, 1>(job, p, row, c);
}

void accumulate_f16(const AccumulateJob& job) {
  uint32_t row = 0;
  for (; row + 4 <= job.rows; row += 4) accumulate_f16_rows<4>(job, row);
  for (; row + 2 <= job.rows; row += 2) accumulate_f16_rows<2>(job, row);
  if (row < job.rows) accumulate_f16_rows<1>(job, row);
}

}  // namespace

AttentionKernels i8mm_attention_kernels() {
  return {score_levels, accumulate_levels, score_f16, accumulate_f16};
}

}  // namespace gyre::cpu
