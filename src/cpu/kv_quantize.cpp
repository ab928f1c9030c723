// kv_quantize and kv_dequantize on the CPU. A unit of work is a tile (8 slots) of one head of K or
// V: its tokens are rotated and coded one by one, then K's rows are stored one by one and V's tile
// at once, because eight tokens share V's words. A task is an equal share of the units.
#include "abi/kv_quantize.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/kv_compat.h"
#include "cpu/kv_signs.h"
#include "cpu/native_format.h"
#include "cpu/select.h"
#include "gyre/kv_format.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kv_quantize.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/copy-inl.h"
#include "cpu/kv_decode-inl.h"
#include "cpu/kv_encode-inl.h"
#include "cpu/kv_pack-inl.h"
#include "cpu/rotation-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

constexpr auto kRoleV = static_cast<uint32_t>(KvRole::v);

struct KvScratch {
  alignas(64) float x[abi::kKvMaxHeadDim];
  KvRow rows[abi::kKvTile];
  KvFacts facts;
};

// Four coordinates with their signs flipped.
template <class Source>
HWY_INLINE VHadamard LoadFlipped(const Source* HWY_RESTRICT source,
                                 const uint32_t* HWY_RESTRICT masks, size_t i) {
  const DHadamard d;
  const hn::RebindToUnsigned<DHadamard> du;
  return hn::Xor(LoadF32(d, source + i), hn::BitCast(d, hn::Load(du, masks + i)));
}

template <class Source>
HWY_INLINE void PrefetchRow(const std::byte* row, uint32_t head_dim) {
  if (row == nullptr) return;  // a slot without a row: fetching nothing would take a page walk
  for (size_t at = 0; at < head_dim * sizeof(Source); at += 64) __builtin_prefetch(row + at);
}

// One unit: which of its slots get which token, and where its memory is.
struct KvUnit {
  const KvHead* head;
  uint64_t stream;
  uint32_t mask = 0;  // slots that are written
  const std::byte* source[abi::kKvTile] = {};
  const std::byte* next[abi::kKvTile];  // sources of the unit after this one, null if not needed
  uint8_t* codes;
  uint8_t* scales;
};

template <uint32_t kFormat>
HWY_INLINE void StoreUnit(const abi::KvCacheLayout& cache, const KvUnit& unit,
                          const KvScratch& scratch) {
  const uint32_t scales = unit.head->scales.count;
  const uint8_t* codes[abi::kKvTile];
  for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
    const bool written = (unit.mask >> slot & 1) != 0;
    // A slot that is not written stands in with any codes of this format; they are not stored.
    codes[slot] = scratch.rows[written ? slot : std::countr_zero(unit.mask)].codes;
    if (!written) continue;
    for (uint32_t i = 0; i < scales; ++i) {
      std::memcpy(unit.scales + size_t{2} * (i * abi::kKvTile + slot),
                  &scratch.facts.scales[i][slot], 2);
    }
    if (cache.role != kRoleV) {
      PackRow<kFormat>(codes[slot], cache.head_dim,
                       unit.codes + slot * (cache.codes_tile_stride / abi::kKvTile));
    }
  }
  if (cache.role == kRoleV) PackTile<kFormat>(codes, unit.mask, cache.head_dim, unit.codes);
}

template <uint32_t kFormat, class Source>
void QuantizeUnit(const abi::KvCacheLayout& cache, const KvUnit& unit, const SignMasks& signs,
                  KvScratch& scratch) {
  const KvHead& head = *unit.head;
  KvFacts& facts = scratch.facts;
  const size_t code_bytes = cache.codes_tile_stride / abi::kKvTile;
  const auto each = [&](uint32_t mask, const auto& step) HWY_ATTR {
    for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
      if ((mask >> slot & 1) != 0)
        step(slot, reinterpret_cast<const Source*>(unit.source[slot]), scratch.rows[slot]);
    }
  };
  each(unit.mask, [&](uint32_t slot, const Source* source, KvRow& row) HWY_ATTR {
    // Rows of one head are a token apart, too far for the hardware to guess; a unit ahead is time
    // enough. So are the places of codes.
    PrefetchRow<Source>(unit.next[slot], cache.head_dim);
    for (size_t at = 0; at < code_bytes; at += 64)
      __builtin_prefetch(unit.codes + slot * code_bytes + at, 1);
    const auto first = [&](size_t i, VHadamard& v0, VHadamard& v1) HWY_ATTR {
      v0 = LoadFlipped(source, signs.data(), i), v1 = LoadFlipped(source, signs.data(), i + 4);
      Butterfly(v0, v1);
    };
    TransformRow<kFormat>(head, first, slot, row.y, facts);
  });
  FindFactors<kFormat>(head, facts);
  each(unit.mask, [&](uint32_t slot, const Source*, KvRow& row)
                      HWY_ATTR { CodeRow<kFormat>(head, slot, row, facts); });
  FindScales(head, 1.0f, facts);
  each(unit.mask & facts.extreme, [&](uint32_t slot, const Source* source, KvRow& row) HWY_ATTR {
    for (size_t i = 0; i < cache.head_dim; i += 4) {
      hn::Store(LoadFlipped(source, signs.data(), i), DHadamard(), scratch.x + i);
    }
    EncodeExtreme<kFormat>(head, scratch.x, slot, row, facts);
  });
  StoreUnit<kFormat>(cache, unit, scratch);
}

template <class Source>
void QuantizeCompatUnit(const abi::KvCacheLayout& cache, const KvUnit& unit, KvScratch& scratch) {
  const uint64_t row_bytes = cache.codes_tile_stride / abi::kKvTile;
  const uint64_t norm_bytes = cache.scales_tile_stride / abi::kKvTile;
  for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
    if ((unit.mask >> slot & 1) == 0) continue;
    CopyRow(reinterpret_cast<const Source*>(unit.source[slot]), scratch.x, cache.head_dim);
    uint8_t* codes = scratch.rows[0].codes;
    float norms[2] = {};
    encode_compat(cache.format, scratch.x, cache.head_dim, codes, norms);
    std::memcpy(unit.scales + slot * norm_bytes, norms, norm_bytes);
    uint8_t* row = unit.codes + slot * row_bytes;
    for (uint64_t i = 0; i < row_bytes; ++i) {
      row[i] = cache.format == abi::kCompat4
                   ? static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4)
                   : codes[i];
    }
  }
}

template <class Source>
void QuantizeAnyUnit(const abi::KvCacheLayout& cache, const KvUnit& unit, const SignMasks& signs,
                     KvScratch& scratch) {
  if (!abi::kv_is_native(cache.format)) return QuantizeCompatUnit<Source>(cache, unit, scratch);
  with_native_format(cache.format, [&](auto format) HWY_ATTR {
    QuantizeUnit<decltype(format)::value, Source>(cache, unit, signs, scratch);
  });
}

// Unit number `index`. Heads come before tiles: a token's heads usually lie together in memory.
inline KvUnit FindUnit(const abi::KvQuantizeParams& p, const uint64_t* args, uint64_t index) {
  const uint64_t head = index % p.heads;
  const uint64_t tile = (p.first_tile + index / p.heads % p.tiles) % p.all_tiles;
  KvUnit unit;
  unit.stream = index / p.heads / p.tiles;
  const abi::KvQuantizeStream& s = p.stream[unit.stream];
  const uint64_t* const stream_args = args + 3 * unit.stream;
  unit.codes = pointer<uint8_t>(stream_args[1]) + head * s.cache.codes_head_stride +
               tile * s.cache.codes_tile_stride;
  unit.scales = pointer<uint8_t>(stream_args[2]) + head * s.cache.scales_head_stride +
                tile * s.cache.scales_tile_stride;
  for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
    const uint64_t at = tile * abi::kKvTile + slot;
    if (at >= p.capacity) break;
    const uint64_t token = at >= p.first_slot ? at - p.first_slot : at + p.capacity - p.first_slot;
    if (token >= p.tokens) continue;
    unit.mask |= 1u << slot;
    unit.source[slot] = pointer<const std::byte>(stream_args[0]) + token * s.source_token_stride +
                        head * s.source_head_stride;
  }
  return unit;
}

inline KvHead MakeHead(const abi::KvCacheLayout& cache) {
  return {cache.head_dim, cache.role == kRoleV ? abi::kv_value_stretch(cache.format) : 1.0f};
}

template <class Source>
void KvQuantize(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::KvQuantizeParams*>(params);
  const SignMasks& signs = native_signs();
  const KvHead heads[2] = {MakeHead(p.stream[0].cache), MakeHead(p.stream[1].cache)};
  KvScratch scratch;
  scratch.facts.Clear(std::max(heads[0].scales.count, heads[1].scales.count));
  const Share share = share_of(p.streams * p.heads * p.tiles, task, tasks);
  KvUnit next;
  if (share.begin < share.end) {
    next = FindUnit(p, args, share.begin);
    for (const std::byte* row : next.source) {
      PrefetchRow<Source>(row, p.stream[next.stream].cache.head_dim);
    }
  }
  for (uint64_t index = share.begin; index < share.end; ++index) {
    KvUnit unit = next;
    if (index + 1 < share.end) next = FindUnit(p, args, index + 1);
    for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) unit.next[slot] = next.source[slot];
    unit.head = &heads[unit.stream];
    if (unit.mask != 0) {
      QuantizeAnyUnit<Source>(p.stream[unit.stream].cache, unit, signs, scratch);
    }
  }
}

template <class Out>
void KvDequantize(const void* params, const uint64_t* args, uint32_t task,
                  uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::KvDequantizeParams*>(params);
  const uint64_t head_dim = p.cache.head_dim, last_slot = p.first_slot + p.tokens;
  const uint64_t first_tile = p.first_slot / abi::kKvTile;
  const uint64_t tiles = (last_slot + abi::kKvTile - 1) / abi::kKvTile - first_tile;
  alignas(64) float rows[abi::kKvTile * abi::kKvMaxHeadDim];
  const Share share = share_of(tiles * p.heads, task, tasks);
  for (uint64_t unit = share.begin; unit < share.end; ++unit) {
    const uint64_t tile = first_tile + unit / p.heads, head = unit % p.heads;
    const uint64_t tile_slot = tile * abi::kKvTile;
    const Share slots{std::max(p.first_slot, tile_slot) - tile_slot,
                      std::min(last_slot, tile_slot + abi::kKvTile) - tile_slot};
    DecodeTile(p.cache,
               pointer<const uint8_t>(args[0]) + head * p.cache.codes_head_stride +
                   tile * p.cache.codes_tile_stride,
               pointer<const uint8_t>(args[1]) + head * p.cache.scales_head_stride +
                   tile * p.cache.scales_tile_stride,
               slots, rows);
    for (uint64_t slot = slots.begin; slot < slots.end; ++slot) {
      float* const row = rows + slot * head_dim;
      if (p.rotated == 0) Restore(p.cache.format, p.cache.head_dim, row);
      auto* out = pointer<std::byte>(args[2]) +
                  (tile_slot + slot - p.first_slot) * p.out_token_stride + head * p.out_head_stride;
      CopyRow(static_cast<const float*>(row), reinterpret_cast<Out*>(out), head_dim);
    }
  }
}

TaskFn SelectKvQuantize(uint64_t key) {
  return select_float(spec_from_key<abi::KvQuantizeSpec>(key).source_dtype,
                      [](auto source) -> TaskFn { return KvQuantize<decltype(source)>; });
}

TaskFn SelectKvDequantize(uint64_t key) {
  return select_float(spec_from_key<abi::KvDequantizeSpec>(key).out_dtype,
                      [](auto out) -> TaskFn { return KvDequantize<decltype(out)>; });
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectKvQuantize);
HWY_EXPORT(SelectKvDequantize);

TaskFn select_kv_quantize(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectKvQuantize)(spec); }
TaskFn select_kv_dequantize(uint64_t spec) {
  return HWY_DYNAMIC_DISPATCH(SelectKvDequantize)(spec);
}

namespace {
constexpr uint64_t kCoordinatesPerTask = 8 << 10;  // some microseconds
constexpr uint64_t kMostTasks = 1 << 20;
}  // namespace

uint32_t kv_quantize_tasks(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::KvQuantizeParams*>(params);
  const uint64_t units = p.streams * p.heads * p.tiles;
  const uint64_t coordinates = p.streams * p.heads * p.tokens * p.stream[0].cache.head_dim;
  return static_cast<uint32_t>(
      std::clamp<uint64_t>(coordinates / kCoordinatesPerTask, 1, std::min(units, kMostTasks)));
}

uint32_t kv_dequantize_tasks(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::KvDequantizeParams*>(params);
  const uint64_t rows = p.tokens * p.heads;  // a unit is at most eight of them
  const uint64_t units = (rows + abi::kKvTile - 1) / abi::kKvTile;
  return static_cast<uint32_t>(std::clamp<uint64_t>(rows * p.cache.head_dim / kCoordinatesPerTask,
                                                    1, std::min(units, kMostTasks)));
}

}  // namespace gyre::cpu
#endif
