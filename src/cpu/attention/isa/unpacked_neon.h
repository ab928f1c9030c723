#pragma once
// Many rows on NEON: a block is unpacked once, to levels in the order in which the kernels' vectors
// hold them, and all rows are multiplied with these.

#include "cpu/attention/isa/prefetch.h"
#include "cpu/attention/isa/unpack_neon_k.h"
#include "cpu/attention/isa/unpack_neon_v.h"

namespace gyre::cpu {
namespace {

constexpr uint32_t kUnpacked = ~0u;  // stands for a format: levels that were unpacked

// Bytes are levels already; few rows do not pay for storing them and loading them again.
template <uint32_t kFormat>
inline bool unpacks_once(uint32_t rows) {
  return kFormat != abi::kTq8 && rows >= 16;
}

// 64 coordinates of two keys, stored by unpack_keys.
struct UnpackedPair {
  struct Tables {};
  const int8_t* at;
  template <size_t j>
  int8x16_t level(const Tables&, size_t i) const {
    return vld1q_s8(at + 32 * j + 16 * i);
  }
};

template <class Bytes, uint32_t kFormat>
struct KeysOf {
  using Pair = KeyPair<Bytes, kFormat>;
};
template <class Bytes>
struct KeysOf<Bytes, kUnpacked> {
  using Pair = UnpackedPair;
};

// Two keys, `stride` bytes apart, from coordinate c on: a multiple of 64, for bytes of 16.
template <class Keys, uint32_t kFormat>
inline Keys load_pair(const uint8_t* keys, uint64_t stride, size_t head_dim, size_t c) {
  if constexpr (kFormat == kUnpacked) {
    return {reinterpret_cast<const int8_t*>(keys) + 2 * c};
  } else if constexpr (kFormat == abi::kTq8) {
    return {keys + c, keys + stride + c, head_dim, 0};
  } else {
    return {keys, keys + stride, head_dim, c / 64};
  }
}

// 16 coordinates of two keys, for what is left of a scale block after chunks of 64.
template <class Bytes, uint32_t kFormat>
inline auto load_sixteen(const uint8_t* keys, uint64_t stride, size_t head_dim, size_t c) {
  if constexpr (kFormat == abi::kTq4) {
    return Nibbles16<Bytes>(keys, keys + stride, head_dim, c);
  } else {
    return load_pair<typename KeysOf<Bytes, kFormat>::Pair, kFormat>(keys, stride, head_dim, c);
  }
}
// Whether there is something left: scale blocks of others are multiples of 64.
template <uint32_t kFormat>
inline constexpr bool kBySixteen =
    kFormat == abi::kTq8 || kFormat == abi::kTq4 || kFormat == kUnpacked;

// Levels of the block's keys, [two keys][16 coordinates][two vectors, in the order of Bytes].
template <class Bytes, uint32_t kFormat>
void unpack_keys(const ScoreJob& job, int8_t* to) {
  using Keys = KeyPair<Bytes, kFormat>;
  const typename Keys::Tables tables;
  const auto store = [&](int8x16_t first, int8x16_t second) {
    vst1q_s8(to, level_of<kFormat>(first));
    vst1q_s8(to + 16, level_of<kFormat>(second));
    to += 32;
  };
  for (size_t key = 0; key < job.key_count; key += 2) {
    prefetch_steps(job.prefetch, key, key + 2);
    const uint8_t* const keys = job.keys + key * job.key_stride;
    size_t c = 0;
    for (; c + 64 <= job.head_dim; c += 64) {
      const auto pair = load_pair<Keys, kFormat>(keys, job.key_stride, job.head_dim, c);
      store(pair.template level<0>(tables, 0), pair.template level<0>(tables, 1));
      store(pair.template level<1>(tables, 0), pair.template level<1>(tables, 1));
      store(pair.template level<2>(tables, 0), pair.template level<2>(tables, 1));
      store(pair.template level<3>(tables, 0), pair.template level<3>(tables, 1));
    }
    if constexpr (kBySixteen<kFormat>) {
      for (; c < job.head_dim; c += 16) {
        const auto pair = load_sixteen<Bytes, kFormat>(keys, job.key_stride, job.head_dim, c);
        store(pair.template level<0>(tables, 0), pair.template level<0>(tables, 1));
      }
    }
  }
}

// Turns a job into one over unpacked keys.
template <class Bytes, uint32_t kFormat>
inline ScoreJob with_unpacked_keys(const ScoreJob& job) {
  auto* const levels = static_cast<int8_t*>(job.scratch);
  if (job.fresh) unpack_keys<Bytes, kFormat>(job, levels);
  ScoreJob unpacked = job;
  unpacked.keys = reinterpret_cast<const uint8_t*>(levels);
  unpacked.key_stride = job.head_dim;
  unpacked.prefetch = {};
  return unpacked;
}

// Eight coordinates of eight tokens, stored by unpack_values.
struct UnpackedTile {
  void load(const uint8_t* tile, size_t, size_t c, int8x16_t (&v)[4]) const {
    const auto* const levels = reinterpret_cast<const int8_t*>(tile) + c * 8;
    for (size_t i = 0; i < 4; ++i) v[i] = vld1q_s8(levels + 16 * i);
  }
};

template <class Order, uint32_t kFormat>
struct ValuesOf {
  using Tile = ValueTile<Order, kFormat>;
};
template <class Order>
struct ValuesOf<Order, kUnpacked> {
  using Tile = UnpackedTile;
};

// Turns a job into one over unpacked values, [tile][eight coordinates][four vectors].
template <class Order, uint32_t kFormat>
inline AccumulateJob with_unpacked_values(const AccumulateJob& job) {
  auto* const levels = static_cast<int8_t*>(job.scratch);
  const ValueTile<Order, kFormat> unpack;
  for (size_t c = 0; job.fresh && c < job.head_dim; c += 8) {
    prefetch_steps(job.prefetch, c / 8, c / 8 + 1);
    for (size_t tile = 0; tile < job.tiles; ++tile) {
      int8x16_t v[4];
      unpack.load(job.values + tile * job.value_stride, job.head_dim, c, v);
      int8_t* const to = levels + (tile * job.head_dim + c) * 8;
      for (size_t i = 0; i < 4; ++i) vst1q_s8(to + 16 * i, level_of<kFormat>(v[i]));
    }
  }
  AccumulateJob unpacked = job;
  unpacked.values = reinterpret_cast<const uint8_t*>(levels);
  unpacked.value_stride = uint64_t{8} * job.head_dim;
  unpacked.prefetch = {};
  return unpacked;
}

}  // namespace
}  // namespace gyre::cpu
