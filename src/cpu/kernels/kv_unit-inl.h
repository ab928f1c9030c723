// Compressing a unit: a tile (8 slots) of one head of K or V. Its tokens are rotated and coded one
// by one, then K's rows are stored one by one and V's tile at once, because eight tokens share V's
// words.

#if defined(GYRE_CPU_KV_UNIT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_KV_UNIT_INL_H
#undef GYRE_CPU_KV_UNIT_INL_H
#else
#define GYRE_CPU_KV_UNIT_INL_H
#endif

#include <bit>
#include <cstring>

#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/kv_compat.h"
#include "cpu/kernels/kv_encode-inl.h"
#include "cpu/kernels/kv_pack-inl.h"
#include "cpu/kernels/kv_signs.h"
#include "cpu/kernels/native_format.h"
#include "gyre/kv_format.h"

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

inline KvHead MakeHead(const abi::KvCacheLayout& cache) {
  return {cache.head_dim, cache.role == kRoleV ? abi::kv_value_stretch(cache.format) : 1.0f};
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
