// Quantizing a tile: 8 slots of one head of K or V. Tokens are rotated and calibrated one by one;
// K's rows are stored one by one too, V's tile at once, because eight tokens share V's bytes.

#if defined(GYRE_CPU_KV_TILE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_KV_TILE_INL_H
#undef GYRE_CPU_KV_TILE_INL_H
#else
#define GYRE_CPU_KV_TILE_INL_H
#endif

#include <bit>
#include <cstring>

#include "abi/kv_feedback.h"
#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/kv_feedback-inl.h"
#include "cpu/kernels/kv_mlx_native.h"
#include "cpu/kernels/kv_pack-inl.h"
#include "cpu/kernels/kv_signs.h"
#include "cpu/kernels/native_format.h"
#include "cpu/kernels/select.h"
#include "gyre/format.h"

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

// Which token each slot of a tile gets.
struct TileTokens {
  uint32_t mask = 0;  // slots that get one
  uint64_t token[abi::kKvTile] = {};
};

// How a tile is written: which slots get which token, and where its memory is.
struct KvTileJob {
  const KvHead* head;
  DType dtype;                 // of sources
  bool is_calibrated = false;  // sources are calibrated rows
  uint32_t mask = 0;           // slots that are written
  const std::byte* source[abi::kKvTile] = {};
  // Rows that are read soon: bytes from a slot's row to such a row, and the slots that have one. No
  // pointers: stores to a cache that is not in L1 leave no room for others in the store buffer.
  uint64_t next = 0;
  uint32_t next_mask = 0;
  uint8_t* codes;
  uint8_t* scales;
};

template <uint32_t kFormat>
HWY_NOINLINE void StoreTile(const abi::KvCacheLayout& cache, const KvTileJob& job,
                            const KvScratch& scratch) {
  const uint32_t scales = job.head->scales.count;
  const uint8_t* codes[abi::kKvTile];
  for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
    const bool written = (job.mask >> slot & 1) != 0;
    // Any codes of this format stand in for a slot that is not written; they are not stored.
    codes[slot] = scratch.rows[written ? slot : std::countr_zero(job.mask)].codes;
    if (!written) continue;
    for (uint32_t i = 0; i < scales; ++i) {
      std::memcpy(job.scales + size_t{2} * (i * abi::kKvTile + slot),
                  &scratch.facts.scales[i][slot], 2);
    }
    if (cache.role != kRoleV) {
      PackRow<kFormat>(codes[slot], cache.head_dim,
                       job.codes + slot * (cache.codes_tile_stride / abi::kKvTile));
    }
  }
  if (cache.role == kRoleV) PackTile<kFormat>(codes, job.mask, cache.head_dim, job.codes);
}

// Rows are transformed in code of their dtype, coded in code of the format: two functions a tile,
// not one of each pair.
template <bool kLargest, class Source>
HWY_NOINLINE void TransformTile(const abi::KvCacheLayout& cache, const KvTileJob& job,
                                KvScratch& scratch) {
  const uint32_t* const signs = native_signs().data();
  const size_t code_bytes = cache.codes_tile_stride / abi::kKvTile;
  for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
    if ((job.mask >> slot & 1) == 0) continue;
    const auto* const source = reinterpret_cast<const Source*>(job.source[slot]);
    // Rows of one head are a token apart, too far for the hardware prefetcher; one tile ahead is
    // early enough, for codes too.
    if ((job.next_mask >> slot & 1) != 0) {
      for (size_t at = 0; at < cache.head_dim * sizeof(Source); at += 64)
        __builtin_prefetch(job.source[slot] + job.next + at);
    }
    for (size_t at = 0; at < code_bytes; at += 64)
      __builtin_prefetch(job.codes + slot * code_bytes + at, 1);
    const auto first = [&](size_t i, VHadamard& v0, VHadamard& v1) HWY_ATTR {
      v0 = LoadFlipped(source, signs, i), v1 = LoadFlipped(source, signs, i + 4);
      Butterfly(v0, v1);
    };
    TransformRow<kLargest>(*job.head, first, slot, scratch.rows[slot].y, scratch.facts);
  }
}

template <uint32_t kFormat>
HWY_NOINLINE void CodeTile(const abi::KvCacheLayout& cache, const KvTileJob& job,
                           KvScratch& scratch) {
  const KvHead& head = *job.head;
  KvFacts& facts = scratch.facts;
  FindFactors<kFormat>(head, facts);
  for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
    if ((job.mask >> slot & 1) != 0) CodeRow<kFormat>(head, slot, scratch.rows[slot], facts);
  }
  FindScales(head, 1.0f, facts);
  for (uint32_t left = job.mask & facts.extreme; left != 0; left &= left - 1) {
    const auto slot = static_cast<uint32_t>(std::countr_zero(left));
    RowToF32(reinterpret_cast<uintptr_t>(job.source[slot]), job.dtype, scratch.x, cache.head_dim);
    for (size_t i = 0; i < cache.head_dim; i += 4)
      hn::Store(LoadFlipped(scratch.x, native_signs().data(), i), DHadamard(), scratch.x + i);
    EncodeExtreme<kFormat>(head, scratch.x, slot, scratch.rows[slot], facts);
  }
  StoreTile<kFormat>(cache, job, scratch);
}

inline void QuantizeMlxNativeTile(const abi::KvCacheLayout& cache, const KvTileJob& job,
                                  KvScratch& scratch) {
  const uint64_t row_bytes = cache.codes_tile_stride / abi::kKvTile;
  const uint64_t norm_bytes = cache.scales_tile_stride / abi::kKvTile;
  for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
    if ((job.mask >> slot & 1) == 0) continue;
    RowToF32(reinterpret_cast<uintptr_t>(job.source[slot]), job.dtype, scratch.x, cache.head_dim);
    uint8_t* codes = scratch.rows[0].codes;
    float norms[2] = {};
    encode_mlx_native(cache, scratch.x, codes, norms);
    std::memcpy(job.scales + slot * norm_bytes, norms, norm_bytes);
    uint8_t* row = job.codes + slot * row_bytes;
    for (uint64_t i = 0; i < row_bytes; ++i) {
      row[i] = cache.format == abi::kMlxNative4
                   ? static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4)
                   : codes[i];
    }
  }
}

template <class Source, class Target>
HWY_INLINE void CopyRows(const abi::KvCacheLayout& cache, const KvTileJob& job) {
  const size_t head_dim = cache.head_dim;
  const uint64_t row_bytes = cache.codes_tile_stride / abi::kKvTile;
  for (uint32_t left = job.mask; left != 0; left &= left - 1) {
    const int slot = std::countr_zero(left);
    CopyRow(reinterpret_cast<const Source*>(job.source[slot]),
            reinterpret_cast<Target*>(job.codes + slot * row_bytes), head_dim);
  }
}

template <class Source>
void StoreDense(const abi::KvCacheLayout& cache, const KvTileJob& job) {
  switch (static_cast<KvFormat>(cache.format)) {
    case KvFormat::f32:
      return CopyRows<Source, float>(cache, job);
    case KvFormat::f16:
      return CopyRows<Source, Half>(cache, job);
    default:
      CopyRows<Source, BFloat16>(cache, job);
  }
}

template <class Source>
void TransformTile(const abi::KvCacheLayout& cache, const KvTileJob& job, KvScratch& scratch) {
  if (abi::kv_has_magnitudes(cache.format))
    return TransformTile<false, Source>(cache, job, scratch);
  TransformTile<true, Source>(cache, job, scratch);
}

// Sources are calibrated rows: codes and scales are made already.
inline void StoreCalibratedTile(const abi::KvCacheLayout& cache, const KvTileJob& job,
                                KvScratch& scratch) {
  const DCode d;
  alignas(16) static constexpr uint8_t kTransposed[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                          2, 6, 10, 14, 3, 7, 11, 15};
  const auto order = hn::Load(d, kTransposed);
  for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
    if ((job.mask >> slot & 1) == 0) continue;
    const auto* const row = reinterpret_cast<const uint8_t*>(job.source[slot]);
    const uint8_t* const codes = row + abi::kv_calibrated_codes(cache.head_dim);
    for (uint32_t i = 0; i < cache.head_dim; i += 16)
      hn::StoreU(hn::TableLookupBytes(hn::LoadU(d, codes + i), order), d,
                 scratch.rows[slot].codes + i);
    for (uint32_t i = 0; i < job.head->scales.count; ++i)
      std::memcpy(&scratch.facts.scales[i][slot],
                  row + abi::kv_calibrated_scale(cache.head_dim) + i * sizeof(uint16_t),
                  sizeof(uint16_t));
  }
  with_native_format(cache.format, [&](auto format) HWY_ATTR {
    StoreTile<decltype(format)::value>(cache, job, scratch);
  });
}

// Any format, dense ones included.
inline void WriteTile(const abi::KvCacheLayout& cache, const KvTileJob& job, KvScratch& scratch) {
  if (job.mask == 0) return;
  if (job.is_calibrated) return StoreCalibratedTile(cache, job, scratch);
  if (abi::kv_is_mlx_native(cache.format)) return QuantizeMlxNativeTile(cache, job, scratch);
  const bool is_dense = !abi::kv_is_native(cache.format);
  select_float(static_cast<uint32_t>(job.dtype), [&](auto source) HWY_ATTR {
    if (is_dense) return StoreDense<decltype(source)>(cache, job);
    TransformTile<decltype(source)>(cache, job, scratch);
  });
  if (is_dense) return;
  with_native_format(cache.format, [&](auto format) HWY_ATTR {
    CodeTile<decltype(format)::value>(cache, job, scratch);
  });
}

HWY_NOINLINE inline KvHead MakeHead(const abi::KvCacheLayout& cache) {
  return {cache.head_dim, cache.role == kRoleV ? abi::kv_codec(cache.format).value_stretch : 1.0f};
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
