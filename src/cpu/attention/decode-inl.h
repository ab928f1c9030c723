// Attention for few queries: the keys stream by once, block by block; scores, softmax and the
// weighted sum of values follow each other while the block is near. Levels, f16 and bf16 go through
// the machine's own kernels where it has them, everything else is f32.

#if defined(GYRE_CPU_ATTENTION_STREAM_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_STREAM_INL_H
#undef GYRE_CPU_ATTENTION_STREAM_INL_H
#else
#define GYRE_CPU_ATTENTION_STREAM_INL_H
#endif

#include <cmath>
#include <cstring>

#include "cpu/attention/problem-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

constexpr uint32_t kFewRows = 16;  // up to here the keys stream by, beyond they go in tiles

enum class Route : uint8_t { f32, bf16, f16, levels, unpacked_levels, decoded };

// Whether a row of K lies in whole groups of 16 bytes, 64 coordinates at a time.
inline bool KeysAreWhole(const abi::KvCacheLayout& cache) {
  const uint32_t unit = abi::kv_high_bits(cache.format) == 1 ? 128 : 64;
  return cache.head_dim % unit == 0;
}

inline Route RouteOf(const abi::KvCacheLayout& cache, bool keys) {
  const AttentionKernels& kernels = attention_kernels();
  switch (static_cast<KvFormat>(cache.format)) {
    case KvFormat::f32:
      return Route::f32;
    case KvFormat::bf16:
      return Route::bf16;
    case KvFormat::f16:
      return Route::f16;
    default:
      break;
  }
  if (!abi::kv_is_native(cache.format)) return Route::decoded;
  if (!keys) return kernels.accumulate_levels != nullptr ? Route::levels : Route::decoded;
  if (kernels.score_levels == nullptr) return Route::decoded;
  return KeysAreWhole(cache) ? Route::levels : Route::unpacked_levels;
}

// Levels padded so that every scale block fills units of 64; padding holds zeros on the query's
// side.
inline LevelBlocks PaddedBlocks(uint32_t head_dim, uint32_t unit) {
  const abi::KvScaleBlocks scales = abi::kv_scale_blocks(head_dim);
  LevelBlocks blocks;
  blocks.count = scales.count;
  uint32_t begin = 0;
  for (uint32_t b = 0; b < scales.count; ++b) {
    blocks.begin[b] = begin;
    blocks.size[b] = (scales.size[b] + unit - 1) / unit * unit;
    begin += blocks.size[b];
  }
  return blocks;
}

template <class T, uint32_t kRows>
HWY_INLINE void ScoreRows(const ScoreJob& job, uint32_t row, uint32_t key, uint32_t keys) {
  const DF d;
  const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
  const T* k[4];
  for (uint32_t i = 0; i < 4; ++i)
    k[i] = reinterpret_cast<const T*>(job.keys + (key + (i < keys ? i : 0)) * job.key_stride);
  VF acc[kRows][4];
  for (auto& of_row : acc) {
    for (auto& a : of_row) a = hn::Zero(d);
  }
  for (uint32_t c = 0; c < job.head_dim; c += lanes) {
    const VF v[4] = {LoadF32(d, k[0] + c), LoadF32(d, k[1] + c), LoadF32(d, k[2] + c),
                     LoadF32(d, k[3] + c)};
    for (uint32_t r = 0; r < kRows; ++r) {
      const auto query = hn::LoadU(d, job.q_plain + size_t{row + r} * job.head_dim + c);
      for (uint32_t i = 0; i < 4; ++i) acc[r][i] = hn::MulAdd(query, v[i], acc[r][i]);
    }
  }
  for (uint32_t r = 0; r < kRows; ++r) {
    for (uint32_t i = 0; i < keys; ++i) {
      job.scores[(row + r) * kAttentionBlock + key + i] = hn::GetLane(hn::SumOfLanes(d, acc[r][i]));
    }
  }
}

// Dense keys are read one by one, never past the last that is seen.
template <class T>
void ScoreDense(const ScoreJob& job) {
  for (uint32_t key = 0; key < job.key_count; key += 4) {
    const uint32_t keys = std::min(job.key_count - key, 4u);
    uint32_t row = 0;
    for (; row + 4 <= job.rows; row += 4) ScoreRows<T, 4>(job, row, key, keys);
    for (; row < job.rows; ++row) ScoreRows<T, 1>(job, row, key, keys);
  }
}

template <class T, uint32_t kRows, uint32_t kVectors>
HWY_INLINE void AccumulateChunk(const AccumulateJob& job, uint32_t row, uint32_t c) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  VF acc[kRows][kVectors];
  for (auto& of_row : acc) {
    for (auto& a : of_row) a = hn::Zero(d);
  }
  for (uint32_t key = job.begin; key < job.end; ++key) {
    const T* const v = reinterpret_cast<const T*>(job.values + key * job.value_stride) + c;
    for (uint32_t i = 0; i < kVectors; ++i) {
      const auto value = LoadF32(d, v + i * lanes);
      for (uint32_t r = 0; r < kRows; ++r) {
        acc[r][i] =
            hn::MulAdd(hn::Set(d, job.p[(row + r) * kAttentionBlock + key]), value, acc[r][i]);
      }
    }
  }
  // A block's sum joins the rest as a whole: single keys would vanish beside a large sum.
  float* const place = job.acc + size_t{row} * job.head_dim + c;
  for (uint32_t r = 0; r < kRows; ++r) {
    const auto keep = hn::Set(d, job.keep[row + r]);
    for (uint32_t i = 0; i < kVectors; ++i) {
      float* const at = place + size_t{r} * job.head_dim + i * lanes;
      hn::StoreU(hn::MulAdd(hn::LoadU(d, at), keep, acc[r][i]), d, at);
    }
  }
}

template <class T, uint32_t kRows>
void AccumulateRows(const AccumulateJob& job, uint32_t row) {
  const auto lanes = static_cast<uint32_t>(hn::Lanes(DF()));
  uint32_t c = 0;
  for (; c + 4 * lanes <= job.head_dim; c += 4 * lanes) AccumulateChunk<T, kRows, 4>(job, row, c);
  for (; c < job.head_dim; c += lanes) AccumulateChunk<T, kRows, 1>(job, row, c);
}

template <class T>
void AccumulateDense(const AccumulateJob& job) {
  uint32_t row = 0;
  for (; row + 4 <= job.rows; row += 4) AccumulateRows<T, 4>(job, row);
  for (; row < job.rows; ++row) AccumulateRows<T, 1>(job, row);
}

class Stream {
 public:
  explicit Stream(AttentionUnit& unit)
      : u_(unit),
        k_route_(RouteOf(*unit.k.layout, true)),
        v_route_(RouteOf(*unit.v.layout, false)) {
    blocks_ = PaddedBlocks(u_.k_dim(), k_route_ == Route::unpacked_levels ? 64 : 8);
    value_blocks_ = PaddedBlocks(u_.v_dim(), 8);
    for (uint32_t b = 0; b < blocks_.count; ++b) padded_ = blocks_.begin[b] + blocks_.size[b];
    prepare_queries();
  }

  void run() {
    std::fill_n(u_.scratch->acc, size_t{u_.rows} * u_.v_dim(), 0.0f);
    u_.for_blocks([&](const KeyBlock& block) {
      score(block);
      float keep[kAttentionRows];
      const bool alike = make_probabilities(block, keep);
      accumulate(block, keep, alike);
    });
  }

  void read_row(uint32_t row, float* values) const {
    std::copy_n(u_.scratch->acc + size_t{row} * u_.v_dim(), u_.v_dim(), values);
  }

 private:
  bool k_is_levels() const {
    return k_route_ == Route::levels || k_route_ == Route::unpacked_levels;
  }

  // Four coordinates of a row's operand.
  template <class V>
  void store_query(V whole, int8_t* row, uint32_t at) const {
    const hn::DFromV<V> di;
    const hn::Rebind<int8_t, decltype(di)> d8;
    const hn::Rebind<int16_t, decltype(di)> d16;
    if (q_layout_ == QueryLayout::whole) {
      hn::StoreU(hn::DemoteTo(d16, whole), d16, reinterpret_cast<int16_t*>(row) + at);
      return;
    }
    const auto upper = hn::ShiftRight<8>(hn::Add(whole, hn::Set(di, 128)));
    const auto lower = hn::Sub(whole, hn::ShiftLeft<8>(upper));
    const bool apart = q_layout_ == QueryLayout::bytes_apart;
    int8_t* const place = apart ? row + at : row + size_t{at / 8} * 16 + at % 8;
    hn::StoreU(hn::DemoteTo(d8, upper), d8, place);
    hn::StoreU(hn::DemoteTo(d8, lower), d8, place + (apart ? padded_ : 8));
  }

  void prepare_queries() {
    std::fill_n(q_scale_, u_.rows, 1.0f);
    if (k_is_levels()) return round_queries();
    if (k_route_ == Route::bf16 && attention_kernels().score_bf16 != nullptr) split_queries();
  }

  // Queries as sums of two bf16: of each four coordinates the nearest, then those of what is left,
  // lifted.
  void split_queries() {
    static_assert(sizeof(AttentionScratch::operand) >= size_t{4} * kFewRows * abi::kKvMaxHeadDim);
    const hn::CappedTag<float, 4> d;
    const hn::RebindToUnsigned<decltype(d)> du;
    const hn::Rebind<uint16_t, decltype(d)> d16;
    const auto half = hn::Set(du, 0x8000);
    const auto cut = [&](auto bits) {
      return hn::BitCast(d, hn::And(bits, hn::Set(du, ~0xFFFFu)));
    };
    const auto store = [&](auto x, uint16_t* to) {
      hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(hn::BitCast(du, x))), d16, to);
    };
    auto* const to = reinterpret_cast<uint16_t*>(u_.scratch->operand);
    for (size_t i = 0; i < size_t{u_.rows} * u_.k_dim(); i += 4) {
      const auto q = hn::Load(d, u_.scratch->q + i);
      const auto bits = hn::BitCast(du, q);
      // The largest numbers would be rounded to infinity, a NaN to anything.
      const auto nearest = cut(hn::Add(bits, half));
      const auto upper = hn::IfThenElse(hn::IsFinite(nearest), nearest, cut(bits));
      const auto nan = hn::IfThenElseZero(hn::IsNaN(q), hn::NaN(d));
      const auto rest = hn::IfThenElseZero(hn::IsFinite(q), hn::Sub(q, upper));
      const auto lifted = hn::BitCast(du, hn::Mul(rest, hn::Set(d, kBf16Lift)));
      store(hn::Or(upper, nan), to + 2 * i);
      store(hn::BitCast(d, hn::Add(lifted, half)), to + 2 * i + 4);
    }
  }

  // Queries as 16-bit integers, and their sums.
  void round_queries() {
    constexpr float kTinyQuery = 0x1p-110f;   // below, the inverse of a step would overflow
    constexpr float kMost = 127.0f * 256.0f;  // so that the upper byte fits
    const hn::CappedTag<float, 4> d;
    const hn::RebindToSigned<decltype(d)> di;
    const abi::KvScaleBlocks scales = abi::kv_scale_blocks(u_.k_dim());
    std::memset(u_.scratch->operand, 0, size_t{2} * u_.rows * padded_);
    for (uint32_t r = 0; r < u_.rows; ++r) {
      const float* const q = u_.scratch->q + size_t{r} * u_.k_dim();
      const float unit = query_unit(q);  // NaN if the query is not finite: that shows in its scale
      const float largest = std::max(std::isnan(unit) ? 0.0f : unit, kTinyQuery);
      q_scale_[r] = std::isnan(unit) ? unit : largest / kMost;
      const auto inverse = hn::Set(d, std::isnan(unit) ? 0.0f : kMost / largest);
      for (uint32_t b = 0; b < scales.count; ++b) {
        auto sum = hn::Zero(di);
        for (uint32_t i = 0; i < scales.size[b]; i += 4) {
          const auto whole = hn::NearestInt(hn::Mul(hn::Load(d, q + scales.begin[b] + i), inverse));
          sum = hn::Add(sum, whole);
          store_query(whole, u_.scratch->operand + size_t{2} * r * padded_, blocks_.begin[b] + i);
        }
        q_sums_[r * abi::kKvMaxScales + b] = hn::GetLane(hn::SumOfLanes(di, sum));
      }
    }
  }

  // The largest magnitude of a query's coordinates; NaN if one is not finite.
  float query_unit(const float* q) const {
    const DF d;
    auto top = hn::Zero(d), sick = hn::Zero(d);
    for (uint32_t i = 0; i < u_.k_dim(); i += static_cast<uint32_t>(hn::Lanes(d))) {
      const auto x = hn::LoadU(d, q + i);
      top = hn::Max(top, hn::Abs(x));
      sick = hn::Add(sick, hn::Sub(x, x));  // NaN unless finite
    }
    return hn::GetLane(hn::MaxOfLanes(d, top)) + hn::GetLane(hn::SumOfLanes(d, sick));
  }

  // A block of the other operand, to be fetched in `units` steps: two streams keep the bus busy.
  static Ahead block_ahead(const Cache& cache, uint64_t tile, uint32_t tiles, uint32_t units) {
    const uint64_t stride = cache.layout->codes_tile_stride;
    if (stride > uint64_t{4096} * abi::kKvTile)
      return {};  // rows far apart: fetching all between helps nobody
    return {cache.tile(tile), static_cast<uint32_t>((tiles * stride + units - 1) / units)};
  }

  void score(const KeyBlock& block) {
    const Cache& k = u_.k;
    ScoreJob job{};
    job.keys = k.tile(block.tile);
    job.key_stride = k.slot_stride();
    job.scales = k.tile_scales(block.tile);
    job.scales_stride = k.layout->scales_tile_stride;
    job.format = k.layout->format;
    job.head_dim = u_.k_dim();
    job.key_count = block.lanes();
    job.rows = u_.rows;
    job.blocks = &blocks_;
    job.q = u_.scratch->operand;
    job.q_sums = q_sums_;
    job.q_plain = u_.scratch->q;
    job.scores = u_.scratch->logits;
    job.ahead = block_ahead(u_.v, block.tile, block.tiles(), block.lanes());
    if (k_route_ == Route::levels) return attention_kernels().score_levels(job);
    if (k_route_ == Route::unpacked_levels) return score_unpacked(block, job);
    // Dense rows are taken one by one, from the first that is seen.
    if (k_route_ == Route::decoded) {
      DecodeBlock(k, block, u_.scratch->tile);
      job.keys = reinterpret_cast<const uint8_t*>(u_.scratch->tile);
      job.key_stride = u_.k_dim() * sizeof(float);
    }
    job.keys += block.begin * job.key_stride;
    job.scores += block.begin;
    job.key_count = block.end - block.begin;
    switch (k_route_) {
      case Route::f16:
        return attention_kernels().score_f16 != nullptr ? attention_kernels().score_f16(job)
                                                        : ScoreDense<Half>(job);
      case Route::bf16:
        return attention_kernels().score_bf16 != nullptr ? attention_kernels().score_bf16(job)
                                                         : ScoreDense<BFloat16>(job);
      default:
        return ScoreDense<float>(job);
    }
  }

  // Rows that do not lie in whole groups are unpacked to one byte a level first.
  void score_unpacked(const KeyBlock& block, ScoreJob& job) {
    alignas(64) int8_t rows[abi::kKvTile * abi::kKvMaxHeadDim];
    const abi::KvScaleBlocks scales = abi::kv_scale_blocks(u_.k_dim());
    const uint32_t stride = (u_.k_dim() + 15) / 16 * 16;
    int8_t* const levels = u_.scratch->levels;
    for (uint32_t t = 0; t < block.tiles(); ++t) {
      DecodeTileLevels(*u_.k.layout, u_.k.tile(block.tile + t), stride, rows);
      for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
        int8_t* const to = levels + size_t{t * abi::kKvTile + slot} * padded_;
        for (uint32_t b = 0; b < scales.count; ++b) {
          std::memcpy(to + blocks_.begin[b], rows + size_t{slot} * stride + scales.begin[b],
                      scales.size[b]);
          std::memset(to + blocks_.begin[b] + scales.size[b], 0, blocks_.size[b] - scales.size[b]);
        }
      }
    }
    job.keys = reinterpret_cast<const uint8_t*>(levels);
    job.key_stride = padded_;
    job.format = abi::kTq8;
    job.head_dim = padded_;
    attention_kernels().score_levels(job);
  }

  // Scores become base-2 logits, then probabilities. True if all rows see the same keys.
  bool make_probabilities(const KeyBlock& block, float* keep) {
    const bool branches = u_.touches_tree(block);
    bool alike = !branches;
    for (uint32_t r = 0; r < u_.rows; ++r) {
      float* const logits = u_.scratch->logits + size_t{r} * kAttentionBlock;
      const Share seen = u_.seen(block, r);
      const bool whole = !branches && seen.begin == 0 && seen.end == block.lanes();
      alike = alike && seen.begin == block.begin && seen.end == block.end;
      float factor = u_.params->scale * kLog2E * q_scale_[r];
      if (!u_.plain() || !(factor > 0)) {
        scale_logits(block, r, logits);
        factor = 1.0f;
      }
      if (!whole) blank(block, r, seen, kMinusInfinity);
      keep[r] = FoldLogits(logits, block.lanes(), factor, u_.state[r]);
      if (!whole) blank(block, r, seen, 0.0f);
    }
    return alike;
  }

  // Lanes that the row does not see.
  void blank(const KeyBlock& block, uint32_t row, const Share& seen, float value) const {
    float* const lane = u_.scratch->logits + size_t{row} * kAttentionBlock;
    std::fill(lane, lane + std::min<uint64_t>(seen.begin, block.lanes()), value);
    std::fill(lane + std::min<uint64_t>(seen.end, block.lanes()), lane + block.lanes(), value);
    if (!u_.touches_tree(block)) return;
    for (uint64_t i = seen.begin; i < seen.end; ++i) {
      if (u_.tree_hides(block, row, i)) lane[i] = value;
    }
  }

  void scale_logits(const KeyBlock& block, uint32_t row, float* logits) const {
    const DF d;
    const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
    const float cap = u_.params->soft_cap;
    const auto scale = hn::Set(d, u_.params->scale * q_scale_[row]), to_base2 = hn::Set(d, kLog2E);
    const auto caps = hn::Set(d, cap);
    const auto slope = hn::Set(d, u_.slope[row]);
    for (uint32_t i = 0; i < block.lanes(); i += lanes) {
      auto x = hn::Mul(hn::Load(d, logits + i), scale);
      if (cap > 0) x = SoftCap(x, caps);
      const auto away = static_cast<float>(block.key + i - u_.position[row]);
      x = hn::MulAdd(slope, hn::Iota(d, away), x);
      hn::Store(hn::Mul(x, to_base2), d, logits + i);
    }
  }

  void accumulate(const KeyBlock& block, const float* keep, bool alike) {
    const Cache& v = u_.v;
    AccumulateJob job{};
    job.values = v.tile(block.tile);
    job.value_stride = v.slot_stride();
    job.scales = v.tile_scales(block.tile);
    job.scales_stride = v.layout->scales_tile_stride;
    job.format = v.layout->format;
    job.head_dim = u_.v_dim();
    job.begin = block.begin;
    job.end = block.end;
    job.tiles = block.tiles();
    job.rows = u_.rows;
    job.blocks = &value_blocks_;
    job.p = u_.scratch->logits;
    job.keep = keep;
    job.acc = u_.scratch->acc;
    job.ahead = block_ahead(u_.k, block.tile + block.tiles(), block.tiles(), job.head_dim / 8);
    if (v_route_ == Route::levels) {
      job.value_stride = v.layout->codes_tile_stride;
      return attention_kernels().accumulate_levels(job);
    }
    if (v_route_ == Route::decoded) {
      DecodeBlock(v, block, u_.scratch->tile);
      job.values = reinterpret_cast<const uint8_t*>(u_.scratch->tile);
      job.value_stride = u_.v_dim() * sizeof(float);
    }
    if (alike) return accumulate_dense(job);
    accumulate_apart(block, job);
  }

  void accumulate_dense(const AccumulateJob& job) const {
    switch (v_route_) {
      case Route::f16:
        return attention_kernels().accumulate_f16 != nullptr
                   ? attention_kernels().accumulate_f16(job)
                   : AccumulateDense<Half>(job);
      case Route::bf16:
        return attention_kernels().accumulate_bf16 != nullptr
                   ? attention_kernels().accumulate_bf16(job)
                   : AccumulateDense<BFloat16>(job);
      default:
        return AccumulateDense<float>(job);
    }
  }

  // A value that one row sees may be NaN to the next: each row takes its own runs of keys.
  void accumulate_apart(const KeyBlock& block, AccumulateJob job) const {
    const float* const p = job.p;
    const float* const keep = job.keep;
    float* const acc = job.acc;
    constexpr float kAll = 1.0f;
    job.rows = 1;
    for (uint32_t r = 0; r < u_.rows; ++r) {
      const Share seen = u_.seen(block, r);
      job.p = p + size_t{r} * kAttentionBlock;
      job.acc = acc + size_t{r} * job.head_dim;
      job.keep = keep + r;
      for (uint64_t lane = seen.begin; lane < seen.end;) {
        uint64_t end = lane;
        while (end < seen.end && !u_.tree_hides(block, r, end)) ++end;
        job.begin = static_cast<uint32_t>(lane);
        job.end = static_cast<uint32_t>(end);
        if (lane < end) {
          accumulate_dense(job);
          job.keep = &kAll;  // once
        }
        lane = std::max(end, lane + 1);
      }
      if (job.keep == keep + r) {  // nothing seen: the old sum still has to be brought down
        for (uint32_t c = 0; c < job.head_dim; ++c) job.acc[c] *= keep[r];
      }
    }
  }

  AttentionUnit& u_;
  const Route k_route_, v_route_;
  const QueryLayout q_layout_ = attention_kernels().query_layout;
  LevelBlocks blocks_, value_blocks_;
  uint32_t padded_ = 0;  // levels of a row of K, padding included
  float q_scale_[kAttentionRows];
  int32_t q_sums_[kAttentionRows * abi::kKvMaxScales];
};

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
