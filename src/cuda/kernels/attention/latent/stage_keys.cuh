#pragma once
// Latent attention: the keys of a stage, from the cache to an operand of 16-bit floats. All threads
// of the producer warpgroup together.
#include "cuda/kernels/attention/common/float_bits.cuh"
#include "cuda/kernels/attention/common/key_words.cuh"
#include "cuda/kernels/attention/common/row_products.cuh"
#include "cuda/kernels/attention/common/typed_memory.cuh"
#include "cuda/kernels/attention/common/value_pair.cuh"
#include "cuda/kernels/attention/latent/stage_tiles.cuh"

namespace gyre::cuda {

template <class T>
class StageKeys : protected StageTiles<T> {
 protected:
  using Base = StageTiles<T>;
  using Base::args_, Base::p_, Base::state_, Base::walk_, Base::count_, Base::hidden_;
  using Base::in_run, Base::key_number, Base::sync, Base::thread;
  using typename Base::LaneTile;
  using typename Base::Scales;

  // Chunks of 16 bytes in a latent row; a thread has one of every kStep-th key.
  static constexpr uint32_t kUnits = T::kLatentDim / 8, kStep = kLatentGroup / kUnits,
                            kRows = T::kKeys / kStep, kRotaryUnits = T::kRotaryDim / 8;
  static constexpr uint32_t kRowBytes =
      T::kLatentDim * (T::kLevelsK ? abi::kv_bits(T::kK) : 16) / 8;
  // Whether 16-bit values may have to be multiplied: bf16's leave f16's range, and so may levels
  // beside them.
  static constexpr bool kConverts = !T::kBf16K && (T::kK == kFormatBf16 || T::kV == kFormatBf16);
  static constexpr bool kMayLeave = kConverts || T::kLevelsK != T::kRotatedV;

  // Codes of a thread's keys that are on their way together.
  static constexpr uint32_t kMax = 8, kAtOnce = kRows < kMax ? kRows : kMax;
  // Pairs of rotary coordinates, of eight tokens each, that a thread unpacks.
  static constexpr uint32_t kPairUnits = T::kTiles * (T::kRotaryDim / 2),
                            kPairsOfThread = (kPairUnits + kLatentGroup - 1) / kLatentGroup;
  using Pair = ValuePair<T::kRotatedV ? T::kV : abi::kTq8>;
  using Words = KeyWords<T::kLevelsK ? T::kK : abi::kTq8>;
  struct Loaded {  // codes of some of a thread's keys
    Words of[kAtOnce];
    Pair pairs[kPairsOfThread];
  };
  StageKeys(const abi::AttentionParams& p, const Args& args) : Base(p, args) {}

  // Numbers and units of the stage's keys, and the ratios of their scales to the units; `all`: from
  // all of a key's values, else from scales alone.
  void describe_keys(uint32_t stage, const LaneTile& tile, const Scales& stored, bool all) {
    const uint32_t key = thread() % T::kKeys, slot = count_.slot();
    const uint32_t number = key_number(stage, key);
    float scales[3] = {0, 0, 0}, max_value = 0;
    if (number != walk_.kNoKey) {
      scales[0] = from_stored(stored.k[0]);
      scales[1] = from_stored(stored.k[T::kScales - 1]);
      scales[2] = from_stored(stored.v);
      // Levels are below 2^7.
      max_value = fmaxf(fmaxf(scales[0], scales[1]), scales[2]) * 128.0f;
    }
    if (all) {
      const uint64_t k_row = shuffled(tile.offset(p_.k.codes_tile_stride), key / 8),
                     v_row = shuffled(tile.offset(p_.v.codes_tile_stride), key / 8);
      if (number != walk_.kNoKey) {
        max_value =
            fmaxf(max_value, largest<T::kK, T::kLatentDim>(args_.at[arg_k_codes] + k_row, key % 8,
                                                           p_.k.codes_tile_stride));
        max_value =
            fmaxf(max_value, largest<T::kV, T::kRotaryDim>(args_.at[arg_v_codes] + v_row, key % 8,
                                                           p_.v.codes_tile_stride));
      }
    }
    float unit = 1.0f;
    if (is_finite(max_value) && max_value != 0 && (max_value > 0x1p15f || max_value < 0x1p-5f)) {
      int32_t up = exponent_of(max_value) - 14;
      if (up > 0 || T::kLevelsK || all) {
        up = up < -110 ? -110 : (up > 110 ? 110 : up);
        unit = power_of_two(up);
      }
    }
    const bool plain = __all_sync(kAll, unit == 1.0f) != 0;
    whole_ = walk_.whole(stage * T::kKeys) && hidden_ == 0;
    if (thread() < T::kKeys) {
      state_.numbers[slot][key] = static_cast<int32_t>(number);  // kNoKey is -1
      state_.units[slot][key] = unit;
      const float over = 1.0f / unit;
      const auto f16 = [&](float x) { return uint32_t{from_float<Half>(x * over).bits}; };
#pragma unroll
      for (uint32_t i = 0; i < 3; ++i) state_.ratios[slot][i][key] = f16(scales[i]) * 0x10001u;
      if (thread() % kWarp == 0) state_.has_units[slot][thread() / kWarp] = plain ? 0 : 1;
      if (kMayLeave && !plain && !all) state_.leaves[slot] = 1;
    }
  }

  // The first codes of a thread's keys: they are on their way while it waits for the slot.
  void load_first(const LaneTile& tile, Loaded& to) const {
    load_pairs(tile, to);
    load_codes(tile, runs(tile), 0, to);
  }
  bool runs(const LaneTile& tile) const {
    return in_run(tile, p_.k.codes_tile_stride, kRowBytes * abi::kKvTile);
  }

  // Rows that are not of levels, begun; `kScaled`: they will be divided by their units.
  template <bool kScaled>
  void copy_keys(const LaneTile& tile) {
    if constexpr (!T::kLevelsK)
      copy_rows<T::kK, kUnits, kScaled>(tile, args_.at[arg_k_codes], p_.k.codes_tile_stride, 0);
    if constexpr (!T::kRotatedV)
      copy_rows<T::kV, kRotaryUnits, kScaled>(tile, args_.at[arg_v_codes], p_.v.codes_tile_stride,
                                              kUnits);
  }
  void unpack_keys(const LaneTile& tile, Loaded& first) {
    if constexpr (T::kRotatedV) unpack_rotary(first);
    if constexpr (T::kLevelsK) unpack_latents(tile, runs(tile), first);
  }

  // Infinity times a weight of 0 is NaN: where rows do not see all keys of a stage, a row that is
  // not finite becomes 0, and its unit NaN for the rows that see it.
  void mend() {
    sync();
    const uint32_t slot = count_.slot(), key = thread();
    if (key < T::kKeys) {
      bool non_finite = false;
      for (uint32_t c = 0; c < kUnits + kRotaryUnits; ++c) {
        const auto* const words = reinterpret_cast<const uint32_t*>(
            latent_slot<T>(slot) + operand_byte(T::kLayout.k_panel, key, c));
        for (uint32_t w = 0; w < 4; ++w)
          non_finite = non_finite || not_finite(words[w], T::kBf16K ? 0x7F80u : 0x7C00u);
      }
      if (non_finite) {
        state_.units[slot][key] = __uint_as_float(0x7FC00000u);
        state_.has_units[slot][0] = 1;
        for (uint32_t c = 0; c < kUnits + kRotaryUnits; ++c)
          *reinterpret_cast<uint4*>(latent_slot<T>(slot) +
                                    operand_byte(T::kLayout.k_panel, key, c)) =
              make_uint4(0, 0, 0, 0);
      }
    }
  }

 private:
  static float from_stored(uint16_t bits) {
    return __uint_as_float(uint32_t{bits} << 15) * 0x1p-31f;
  }
  // The largest finite magnitude of a row that is not of levels.
  template <uint32_t kFormat, uint32_t kDim>
  static float largest(uint64_t tile, uint32_t row, uint64_t tile_stride) {
    float max_value = 0;
    if constexpr (is_float16_format(kFormat)) {
      for (uint32_t i = 0; i < kDim; ++i) {
        const float x = fabsf(load_as_float(tile + row * (tile_stride / 8), kFormat, i));
        if (is_finite(x)) max_value = fmaxf(max_value, x);
      }
    }
    return max_value;
  }

  void load_codes(const LaneTile& tile, bool run, uint32_t batch, Loaded& to) const {
    if constexpr (T::kLevelsK) {
      const uint64_t tile_at = args_.at[arg_k_codes] + tile.offset(p_.k.codes_tile_stride);
      const uint32_t there = __ballot_sync(kAll, tile.present ? 1 : 0);
      const uint32_t chunk = thread() % kUnits, first = thread() / kUnits;
      if (run) {
        const auto* const from = pointer<const uint8_t>(
            shuffled(tile_at, 0) + (batch * kAtOnce * kStep + first) * kRowBytes);
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i)
          to.of[i] = {from + i * kStep * kRowBytes, T::kLatentDim, chunk / 4, chunk % 4};
        return;
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t key = (batch * kAtOnce + i) * kStep + first;
        const uint64_t row = shuffled(tile_at, key / 8) + key % 8 * kRowBytes;
        to.of[i] = {};
        if ((there >> (key / 8) & 1) != 0)
          to.of[i] = {pointer<const uint8_t>(row), T::kLatentDim, chunk / 4, chunk % 4};
      }
    }
  }
  // Slots without a key have the ratio 0.
  void unpack_latents(const LaneTile& tile, bool run, Loaded& first) {
    constexpr uint32_t kBatches = kRows / kAtOnce, kBases = kStep < 8 ? 8 / kStep : 1;
    constexpr uint32_t kFormat = T::kLevelsK ? T::kK : abi::kTq8;
    const LevelTable table = level_table<kFormat, true>();
    const uint32_t chunk = thread() % kUnits, key = thread() / kUnits, slot = count_.slot();
    unsigned char* bases[kBases];
#pragma unroll
    for (uint32_t i = 0; i < kBases; ++i)
      bases[i] = latent_slot<T>(slot) + operand_byte(T::kLayout.k_panel, key + i * kStep, chunk);
    const uint32_t* const ratios = state_.ratios[slot][chunk / 32] + key;
    Words now[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) now[i] = first.of[i];
#pragma unroll
    for (uint32_t batch = 0; batch < kBatches; ++batch) {
      Loaded next;
      if (batch + 1 < kBatches) load_codes(tile, run, batch + 1, next);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t nth = batch * kAtOnce + i, ratio = ratios[nth * kStep];
        const Operands<1> x = now[i].operands(table, chunk / 4);
        uint4 w;
        to_f16x2(raised_levels<kFormat>(x.term[0][0]), w.x, w.y);
        to_f16x2(raised_levels<kFormat>(x.term[0][1]), w.z, w.w);
        *reinterpret_cast<uint4*>(bases[nth % kBases] + nth / kBases * kBases * kStep * 128) =
            make_uint4(mul_f16x2(w.x, ratio), mul_f16x2(w.y, ratio), mul_f16x2(w.z, ratio),
                       mul_f16x2(w.w, ratio));
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) now[i] = next.of[i];
    }
  }

  // Tiles of the rotary part hold eight tokens of a coordinate: two coordinates at a time, a word
  // to each token's row.
  void load_pairs(const LaneTile& tile, Loaded& to) const {
    if constexpr (T::kRotatedV) {
      constexpr uint32_t kHalf = T::kRotaryDim / 2;
      const uint64_t tile_at = args_.at[arg_v_codes] + tile.offset(p_.v.codes_tile_stride);
      const uint32_t there = __ballot_sync(kAll, tile.present ? 1 : 0);
#pragma unroll
      for (uint32_t i = 0; i < kPairsOfThread; ++i) {
        const uint32_t unit = i * kLatentGroup + thread(), nth = unit / kHalf % T::kTiles,
                       a = unit % kHalf * 2;
        const uint64_t from = shuffled(tile_at, nth);
        to.pairs[i] = {};
        if (unit < kPairUnits && (there >> nth & 1) != 0)
          to.pairs[i] = {pointer<const uint8_t>(from), T::kRotaryDim, a, a + 1};
      }
    }
  }
  void unpack_rotary(const Loaded& loaded) {
    constexpr uint32_t kFormat = T::kRotatedV ? T::kV : abi::kTq8, kHalf = T::kRotaryDim / 2;
    const LevelTable table = level_table<kFormat, true>();
    const uint32_t slot = count_.slot();
#pragma unroll
    for (uint32_t i = 0; i < kPairsOfThread; ++i) {
      const uint32_t unit = i * kLatentGroup + thread();
      if (unit >= kPairUnits) continue;
      const uint32_t nth = unit / kHalf, a = unit % kHalf * 2;
      Operands<1> x[2];
      unpack_values<kFormat, true>(table, loaded.pairs[i].low, loaded.pairs[i].high, 0, x);
#pragma unroll
      for (uint32_t four = 0; four < 2; ++four) {
        uint32_t of[2][2];
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e)
          to_f16x2(raised_levels<kFormat>(x[e].term[0][four]), of[e][0], of[e][1]);
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
          const uint32_t key = nth * 8 + value_token<kFormat>(four * 4 + k);
          const uint32_t two = permute(of[0][k / 2], of[1][k / 2], k % 2 == 0 ? 0x5410 : 0x7632);
          *reinterpret_cast<uint32_t*>(latent_slot<T>(slot) +
                                       operand_byte(T::kLayout.k_panel, key, kUnits + a / 8) +
                                       a % 8 * 2) = mul_f16x2(two, state_.ratios[slot][2][key]);
        }
      }
    }
  }

  // Rows of 16-bit floats; slots without a key become zeros.
  template <uint32_t kFormat, uint32_t kChunks, bool kScaled>
  void copy_rows(const LaneTile& tile, uint64_t codes, uint64_t tile_stride, uint32_t first) {
    const uint64_t tile_at = codes + tile.offset(tile_stride), stride = tile_stride / abi::kKvTile;
    const uint32_t slot = count_.slot();
    unsigned char* const operand = latent_slot<T>(slot);
    constexpr uint32_t kStepKeys = kLatentGroup / kChunks,
                       kTimes = T::kKeys * kChunks / kLatentGroup;
    if (!kScaled && kTimes >= 4 && kStepKeys <= 8 &&
        in_run(tile, tile_stride, kChunks * 16 * abi::kKvTile) && whole_) {
      const uint32_t key = thread() / kChunks, chunk = thread() % kChunks;
      const uint64_t from = shuffled(tile_at, 0) + key * (kChunks * 16) + chunk * 16;
      constexpr uint32_t kBases = 8 / (kStepKeys < 8 ? kStepKeys : 8);
      SharedAddress bases[kBases];
#pragma unroll
      for (uint32_t i = 0; i < kBases; ++i)
        bases[i] = shared_address(
            operand + operand_byte(T::kLayout.k_panel, key + i * kStepKeys, first + chunk));
#pragma unroll
      for (uint32_t i = 0; i < kTimes; ++i)
        copy_async<16>(bases[i % kBases] + i / kBases * kBases * kStepKeys * 128,
                       pointer<const void>(from + i * kStepKeys * kChunks * 16), true);
      return;
    }
#pragma unroll 4
    for (uint32_t i = thread(); i < T::kKeys * kChunks; i += kLatentGroup) {
      const uint32_t key = i / kChunks, chunk = i % kChunks;
      const uint64_t from = shuffled(tile_at, key / 8) + key % 8 * stride + chunk * 16;
      const bool there = state_.numbers[slot][key] >= 0;
      copy_async<16>(shared_address(operand + operand_byte(T::kLayout.k_panel, key, first + chunk)),
                     pointer<const void>(there ? from : codes), there);
    }
  }
  // bf16 that was copied becomes f16, divided by the keys' units if `kScaled`; what leaves f16's
  // range is noticed. All of the operand's chunks of one half.
  template <uint32_t kFormat, uint32_t kChunks, bool kScaled>
  void convert_rows(uint32_t first) {
    if constexpr (kFormat == kFormatBf16 || kScaled) {
      constexpr uint32_t kStepKeys = kLatentGroup / kChunks,
                         kTimes = (T::kKeys + kStepKeys - 1) / kStepKeys;
      const uint32_t slot = count_.slot(), key = thread() / kChunks, chunk = thread() % kChunks;
      uint32_t max_value = 0;
      const auto f16 = [&](uint32_t two, float over) {
        max_value = max_u16x2(max_value, two & 0x7FFF7FFFu);
        float a = as_float(two & 0xFFFFu, kFormat), b = as_float(two >> 16, kFormat);
        if constexpr (kScaled) a *= over, b *= over;
        return pack_16(a, b, false);
      };
#pragma unroll 8
      for (uint32_t i = 0; i < kTimes; ++i) {
        const uint32_t of = key + i * kStepKeys;
        if (T::kKeys % kStepKeys != 0 && of >= T::kKeys) continue;
        auto* const at = reinterpret_cast<uint4*>(
            latent_slot<T>(slot) + operand_byte(T::kLayout.k_panel, of, first + chunk));
        const uint4 x = *at;
        const float over = kScaled ? 1.0f / state_.units[slot][of] : 1.0f;
        *at = make_uint4(f16(x.x, over), f16(x.y, over), f16(x.z, over), f16(x.w, over));
      }
      // 2^16 in bf16. Infinity counts: it stays one where all values are looked at.
      if (!kScaled && kFormat == kFormatBf16 &&
          ((max_value & 0xFFFFu) >= 0x4780u || max_value >> 16 >= 0x4780u))
        state_.leaves[slot] = 1;
    }
  }

 protected:
  template <bool kScaled>
  void convert_keys() {
    if constexpr (!T::kLevelsK) convert_rows<T::kK, kUnits, kScaled>(0);
    if constexpr (!T::kRotatedV) convert_rows<T::kV, kRotaryUnits, kScaled>(kUnits);
  }

 private:
  bool whole_ = false;  // all slots of the stage have a key
};

}  // namespace gyre::cuda
