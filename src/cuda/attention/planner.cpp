#include "cuda/attention/planner.h"

#include <algorithm>
#include <optional>

#include "cuda/kernels/attention/decode/decode_layout.cuh"
#include "cuda/kernels/attention/decode/paged_layout.cuh"
#include "cuda/kernels/attention/many_rows/drafts_layout.cuh"
#include "cuda/kernels/attention/many_rows/layout.cuh"
#include "cuda/kernels/attention/many_rows/unpacked.cuh"
#include "cuda/names.h"

namespace gyre::cuda {
namespace {

using abi::AttentionReduce;
using Decode = std::optional<abi::AttentionDecodeSpec>;

constexpr uint32_t kFewestKeys = 128;  // in a split: two chunks of 64 keys are worth a block
// Bytes that unpacked keys may take: of memory that the caller keeps, and for one call, which a
// list or graph holds for as long as it lives. Of batches those beside the longest sequence.
constexpr uint64_t kMaxKept = uint64_t{640} << 20, kMaxTaken = uint64_t{32} << 20,
                   kMaxBeside = uint64_t{256} << 20;

constexpr uint64_t ceil_div(uint64_t a, uint64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// cp.async copies 16 bytes from wherever a key, a value or a tile of codes begins; offsets have 32
// bits. Codes have no gaps between their rows.
bool copies_16_bytes(const abi::KvCacheLayout& cache) {
  const uint64_t row = abi::kv_is_compressed(cache.format) ? cache.codes_tile_stride
                                                           : cache.codes_tile_stride / abi::kKvTile;
  const uint64_t all =
      row | cache.codes_head_stride | cache.scales_tile_stride | cache.scales_head_stride;
  return all % 16 == 0 && cache.codes_tile_stride < uint64_t{1} << 26 &&
         cache.scales_tile_stride < uint64_t{1} << 26;
}

// That a block may have to do with. In pages they are a sequence's.
uint64_t max_rows(const abi::AttentionProblem& p) {
  if (p.sequences == 0) return abi::attention_rows(p);
  const uint64_t limit = std::min<uint64_t>(kDecodeRows, abi::phase_max_rows(p.phase));
  return std::clamp<uint64_t>(p.max_query_length * (p.heads / p.kv_heads), 1, limit);
}

class Planner {
 public:
  Planner(const abi::AttentionProblem& problem, const CudaLimits& limits, HasKernel has_decode,
          HasKernel has_many_rows)
      : p_(problem),
        limits_(limits),
        has_(has_decode),
        has_many_rows_(has_many_rows),
        rows_(max_rows(problem)) {}

  abi::AttentionPlan plan() const {
    if (p_.latent != 0) return plan_latent(p_, limits_);
    if (p_.sequences != 0) return pages();
    const Decode decode = takes_few_rows() ? find_decode(1) : Decode{};
    if (!decode || !pays(*decode))
      return takes_many_rows() ? linear_rows(many_rows_splits()) : any_shape();
    if (p_.states != 0)
      return with(*decode, p_.splits != 0 ? p_.splits : decode_splits(*decode),
                  AttentionReduce::none);
    if (const Decode cluster = find_cluster())
      return with(*cluster, kDecodeCluster, AttentionReduce::in_kernel);
    const uint64_t splits = decode_splits(*decode);
    if (splits == 1) return with(*decode, 1, AttentionReduce::none);
    const Decode pair = find_pair(*decode, splits);
    return with_scratch(with(pair ? *pair : *decode, splits, AttentionReduce::in_kernel));
  }

 private:
  // Sequences of the decode phase to attention_decode, if there is a kernel: it cuts each one's
  // keys by itself. Prompts, and what it does not take, in one split: bits must not follow the
  // batch.
  abi::AttentionPlan pages() const {
    if (p_.phase == abi::AttentionPhase::drafts) return drafts();
    const Decode decode = decodes_pages() ? find_decode(1) : Decode{};
    if (!decode) {
      const bool prompts = abi::phase_fewest_rows(p_.phase) != 0 && takes_many_rows();
      return prompts ? prompt_pages() : abi::attention_any_shape_plan(p_, 1, kFewestKeys);
    }
    const uint32_t blocks = paged_blocks(limits_.multiprocessors);
    abi::AttentionPlan plan = with(*decode, 1, AttentionReduce::in_kernel);
    plan.scratch_floats = paged_scratch_floats(decode->v_format, dims(), decode->rows, blocks);
    plan.schedule = {decode_cut(decode->rows), blocks, decode->rows};
    plan.own_rows = own_rows(decode->rows);
    return plan;
  }
  // Up to four rows keys are cut, taken and, tq4, unpacked otherwise than for more; up to eight
  // rows over 16-bit keys, one MMA has the hi and the lo parts of queries. Tokens of so few rows
  // are not taken by a kernel for more: bits must not follow the batch.
  uint32_t own_rows(uint32_t rows) const {
    const uint64_t few = levels() ? 4 : 8;
    return rows > few ? static_cast<uint32_t>(few / group() * group()) : 0;
  }
  // Rows from which on attention_drafts is faster than decode: where a block of decode holds all
  // rows of a KV head, it reads the keys once, too.
  uint32_t draft_rows() const {
    abi::AttentionProblem most = p_;
    most.phase = abi::AttentionPhase::decode;
    most.max_query_length = static_cast<uint32_t>(kDecodeRows / group());
    const abi::AttentionPlan decode = Planner(most, limits_, has_, has_many_rows_).pages();
    const bool all = decode.kernel == abi::AttentionKernel::attention_decode &&
                     decode.schedule.rows >= most.max_query_length * group();
    return all ? kDecodeRows + 1 : abi::phase_fewest_rows(abi::AttentionPhase::drafts);
  }
  // attention_drafts in blocks of 32 rows or, where a sequence may have more, of 64.
  abi::AttentionPlan drafts() const {
    const uint64_t rows = p_.max_query_length * group();
    for (const uint32_t gpu : {kManyRowsDrafts2, kManyRowsDrafts}) {
      if (gpu == kManyRowsDrafts2 && rows <= kDraftRows) continue;
      const abi::AttentionRowsSpec s = rows_spec(gpu);
      if (!has_many_rows_(spec_key(s), limits_) || !lists_pages() || !codes_together()) continue;
      const DraftsLayout layout =
          drafts_layout(s.k_format, s.v_format, s.k_dim, s.v_dim, draft_groups(gpu));
      const uint32_t blocks = drafts_blocks(layout, limits_.multiprocessors);
      abi::AttentionPlan plan = draft_plan(s);
      plan.scratch_floats = drafts_scratch_floats(layout, s.v_dim, blocks);
      plan.schedule = {kDraftCut, blocks, layout.rows()};
      return plan;
    }
    return many_rows_drafts();
  }
  // What attention_drafts does not take, or another GPU.
  abi::AttentionPlan many_rows_drafts() const {
    const abi::AttentionRowsSpec s = rows_spec(many_rows_gpu(limits_, true));
    if (!lists_pages() || !takes_many_rows(s))
      return abi::attention_any_shape_plan(p_, 1, kFewestKeys);
    const uint32_t blocks =
        paged_blocks(limits_.multiprocessors) *
        many_rows_layout(s.k_format, s.v_format, s.k_dim, s.v_dim, s.gpu).blocks;
    const uint64_t rows = many_rows_item_rows(p_.max_query_length, group());
    abi::AttentionPlan plan = draft_plan(s);
    plan.scratch_floats = many_rows_scratch_floats(rows, s.v_dim, blocks);
    plan.schedule = {kManyRowsCut, blocks, static_cast<uint32_t>(rows)};
    return plan;
  }
  abi::AttentionPlan draft_plan(const abi::AttentionRowsSpec& spec) const {
    abi::AttentionPlan plan = abi::attention_any_shape_plan(p_, 1, kFewestKeys);
    plan.spec = spec_key(spec);
    plan.kernel = abi::AttentionKernel::attention_many_rows;
    plan.reduce = AttentionReduce::in_kernel;
    plan.drafts = draft_rows();
    return plan;
  }
  // Numbers that a schedule holds in 32 bits, pages that are copied by 16 bytes.
  bool lists_pages() const {
    constexpr uint64_t kMaxKeys = uint64_t{1} << 28, kMax32 = uint64_t{1} << 31;
    return p_.tree_mask == 0 && p_.keys <= kMaxKeys && p_.sequences < kMax32 &&
           p_.tokens < kMax32 && p_.page_stride < kMax32 &&
           (p_.addresses | p_.page_stride) % 16 == 0 && copies_16_bytes(p_.k) &&
           copies_16_bytes(p_.v);
  }
  bool decodes_pages() const {
    // One offset of page and head for K, V and their scales; see PageTiles.
    const auto same = [&](const abi::KvCacheLayout& half) {
      return half.codes_head_stride == p_.k.codes_head_stride &&
             (!abi::kv_is_compressed(half.format) ||
              half.scales_head_stride == half.codes_head_stride);
    };
    return abi::phase_max_rows(p_.phase) <= kDecodeRows && group() <= kDecodeRows && same(p_.k) &&
           same(p_.v) && lists_pages();
  }
  uint64_t group() const { return p_.heads / p_.kv_heads; }
  HeadDims dims() const { return {p_.k.head_dim, p_.v.head_dim}; }
  bool levels() const {
    return abi::kv_is_compressed(p_.k.format) && abi::kv_is_compressed(p_.v.format);
  }

  // attention_many_rows takes queries that its operands hold: of K's own type, bf16 as f16, and
  // over levels all, which rotation rounds anyway.
  bool takes_many_rows() const { return takes_many_rows(rows_spec()); }
  bool takes_many_rows(const abi::AttentionRowsSpec& spec) const {
    constexpr uint64_t kMaxKeys = uint64_t{1} << 30;
    const uint32_t k = p_.k.format;
    const bool queries = abi::kv_is_compressed(k) || p_.q_dtype == k ||
                         (k == kFormatF16 && p_.q_dtype == kFormatBf16);
    return queries && codes_together() && p_.keys <= kMaxKeys && p_.capacity <= kMaxKeys &&
           (p_.addresses | p_.page_stride) % 16 == 0 && copies_16_bytes(p_.k) &&
           copies_16_bytes(p_.v) && has_many_rows_(spec_key(spec), limits_);
  }
  // Tiles of K's codes lie one behind the other.
  bool codes_together() const {
    return !abi::kv_is_compressed(p_.k.format) ||
           p_.k.codes_tile_stride == uint64_t{p_.k.head_dim} * abi::kv_bits(p_.k.format);
  }
  abi::AttentionRowsSpec rows_spec(uint32_t gpu) const {
    return abi::attention_rows_spec(p_.k.format, p_.v.format, p_.k.head_dim, p_.v.head_dim, gpu);
  }
  abi::AttentionRowsSpec rows_spec() const {
    return rows_spec(many_rows_gpu(limits_, p_.sequences == 0 && rows_ <= kGroupRows));
  }
  // Few rows, which blocks of one KV head have all of: the GPU is filled with splits. A prompt's
  // keys are not cut: its rows' bits must not depend on the chunk that they came in.
  uint64_t many_rows_splits() const {
    if (p_.splits != 0) return p_.splits;
    if (rows_ > kGroupRows) return 1;
    constexpr uint64_t kFewest = 256;  // keys, two stages
    const uint64_t max_splits = std::max<uint64_t>(ceil_div(p_.keys, kFewest), 1);
    const abi::AttentionRowsSpec s = rows_spec();
    const uint64_t blocks =
        uint64_t{limits_.multiprocessors} *
        many_rows_layout(s.k_format, s.v_format, s.k_dim, s.v_dim, s.gpu).blocks;
    return std::clamp<uint64_t>(blocks / p_.kv_heads, 1, max_splits);
  }
  // Rows over one cache.
  abi::AttentionPlan linear_rows(uint64_t splits) const {
    const abi::AttentionPlan plan = many_rows(splits);
    const uint32_t stage = splits == 1 && rows_ > kGroupRows ? unpacked_stage() : 0;
    if (stage == 0) return plan;
    const uint64_t tiles = unpacked_tiles(p_.capacity, p_.keys, stage);
    return tiles <= max_tiles(max_bytes()) ? unpacked(plan, tiles) : plan;
  }
  // Prompts of a batch. Those that have no room, or do not gain by it, are another command's: it
  // has the same bits. Lengths are on the device: see find_unpacked_end.
  abi::AttentionPlan prompt_pages() const {
    constexpr uint64_t kKeysOfToken = 16, kFewTiles = 3, kFewHeads = 36, kWaves = 3;
    const abi::AttentionPlan plan = many_rows(1);
    const uint32_t stage = unpacked_stage();
    const bool few_heads = p_.sequences * p_.kv_heads <= kFewHeads;
    const uint64_t rows = p_.max_query_length * group(),
                   few_rows = few_heads ? kGroupRows : kFewTiles * 2 * kGroupRows;
    if (stage == 0 || rows <= few_rows || max_tiles(max_bytes()) == 0) return plan;
    const uint64_t each = unpacked_page_tiles(p_.keys, stage), all = each * p_.sequences,
                   beside =
                       std::min(p_.tokens * kKeysOfToken / abi::kKvTile, max_tiles(kMaxBeside));
    abi::AttentionPlan of_some =
        unpacked(plan, std::min({all, each + beside, max_tiles(max_bytes())}));
    if (of_some.unpacked_room == all && few_heads) return of_some;
    of_some.unpacked_work = kWaves * limits_.multiprocessors;
    of_some.behind = plan.spec;
    return of_some;
  }
  // Keys of a stage, where a command ahead unpacks levels once for all rows; 0: none does.
  uint32_t unpacked_stage() const {
    constexpr uint64_t kFewest = 256, kMaxHeads = 65535;  // fewer keys are not worth a command
    const abi::AttentionRowsSpec s = rows_spec(kManyRowsUnpacked);
    if (p_.keys < kFewest || p_.kv_heads > kMaxHeads || !has_many_rows_(spec_key(s), limits_))
      return 0;
    return many_rows_layout(s.k_format, s.v_format, s.k_dim, s.v_dim, s.gpu).keys;
  }
  uint64_t max_bytes() const { return p_.keeps_scratch != 0 ? kMaxKept : kMaxTaken; }
  uint64_t max_tiles(uint64_t bytes) const {
    return (bytes - abi::kScratchCounterBytes) / unpacked_tile_bytes();
  }
  uint64_t unpacked_tile_bytes() const {
    return p_.kv_heads * unpacked_head_bytes(1, p_.k.head_dim, p_.v.head_dim);
  }
  abi::AttentionPlan unpacked(abi::AttentionPlan plan, uint64_t tiles) const {
    plan.ahead = spec_key(rows_spec(kManyRowsUnpack));
    plan.spec = spec_key(rows_spec(kManyRowsUnpacked));
    plan.reduce = AttentionReduce::in_kernel;  // one split, but scratch memory
    plan.unpacked_room = tiles;
    plan.scratch_floats =
        (abi::kScratchCounterBytes + tiles * unpacked_tile_bytes()) / sizeof(float);
    return plan;
  }
  abi::AttentionPlan many_rows(uint64_t splits) const {
    abi::AttentionPlan plan = abi::attention_any_shape_plan(p_, splits, kFewestKeys);
    plan.spec = spec_key(rows_spec());
    plan.kernel = abi::AttentionKernel::attention_many_rows;
    return plan;
  }

  // attention_decode takes few rows, over levels more, in several blocks.
  bool takes_few_rows() const {
    constexpr uint64_t kMaxHeads = 65535, kMaxKeys = uint64_t{1} << 30;
    return rows_ <= (levels() ? kGroupRows : kDecodeRows) && p_.tree_mask == 0 &&
           p_.kv_heads <= kMaxHeads && p_.capacity != 0 && p_.capacity <= kMaxKeys &&
           p_.addresses % 16 == 0 && copies_16_bytes(p_.k) && copies_16_bytes(p_.v);
  }

  // Whether up to 64 rows that a block does not hold are faster in several blocks than in one of
  // attention_many_rows: four take 0.91 of its time at head_dim 128, three 0.43 at 256.
  bool pays(const abi::AttentionDecodeSpec& decode) const {
    constexpr uint64_t kMostTiles = 6;
    return ceil_div(rows_, decode.rows) <= kMostTiles || !takes_many_rows();
  }

  // Fewer rows to a block than there could be where shared memory does not hold them.
  Decode find_decode(uint32_t cluster) const {
    const bool one_dim = p_.k.head_dim == p_.v.head_dim;
    if (!one_dim && p_.v.head_dim % 16 != 0) return {};
    const uint64_t step = abi::kv_is_compressed(p_.v.format) ? 4 : 8;
    for (uint64_t rows = decode_block_rows(p_.v.format, p_.v.head_dim, rows_); rows >= step;
         rows -= step) {
      abi::AttentionDecodeSpec spec = abi::attention_decode_spec(
          p_.k.format, p_.v.format, p_.k.head_dim, static_cast<uint32_t>(rows), cluster);
      const uint32_t stage_keys =
          decode_keys(p_.k.format, p_.v.format, dims(), spec.rows, kDecodePages);
      if (p_.sequences != 0) spec.paged = p_.page_tokens % stage_keys == 0 ? 2 : 1;
      if (!one_dim) spec.value_dim16 = static_cast<uint8_t>(p_.v.head_dim / 16);
      if (has_(spec_key(spec), limits_)) return spec;
    }
    return {};
  }

  // KV heads, with as many of a head's rows each as a block takes.
  uint64_t row_tiles(const abi::AttentionDecodeSpec& spec) const {
    return p_.kv_heads * ceil_div(rows_, spec.rows);
  }

  // Few keys: as many splits as a cluster has blocks, which reduce them through DSMEM, faster than
  // through global memory. Where there are more keys, more blocks than that are worth waiting for:
  // measured, sooner where codes must be unpacked than where time is bytes alone.
  Decode find_cluster() const {
    constexpr uint64_t kFewBytes = 4 << 20, kFewCodes = uint64_t{6144} * 128;
    const auto whole_bytes = [](uint32_t f) { return !abi::kv_is_compressed(f) || f == abi::kTq8; };
    const bool few = whole_bytes(p_.k.format) && whole_bytes(p_.v.format)
                         ? p_.keys * p_.key_bytes <= kFewBytes
                         : p_.keys * p_.k.head_dim * ceil_div(rows_, 4) <= kFewCodes;
    if (!few || p_.keys <= kFewestKeys || rows_ > kDecodeRows) return {};
    const Decode spec = find_decode(kDecodeCluster);
    if (!spec) return {};
    const uint64_t blocks = row_tiles(*spec) * kDecodeCluster;
    return blocks <= limits_.multiprocessors && 4 * blocks >= limits_.multiprocessors ? spec
                                                                                      : Decode{};
  }

  // Pairs of blocks reduce their two splits through DSMEM first: where a block has many sums, the
  // last one to end would read those of all splits.
  Decode find_pair(const abi::AttentionDecodeSpec& decode, uint64_t splits) const {
    constexpr uint64_t kManySums = uint64_t{12} * 128;
    const bool pays = decode.rows * uint64_t{p_.v.head_dim} >= kManySums;
    return pays && splits % 2 == 0 ? find_decode(kDecodePair) : Decode{};
  }

  // One block for each multiprocessor; where row tiles alone are more than half of that, the number
  // of splits that leaves the fewest idle in the last wave, if that is a tenth better.
  uint64_t decode_splits(const abi::AttentionDecodeSpec& decode) const {
    constexpr uint64_t kMaxSplits = 8;
    if (p_.states == 0 && p_.tokens * p_.heads > kDecodeCounters) return 1;
    const uint64_t blocks = std::max<uint64_t>(limits_.multiprocessors, 1);
    const uint64_t tiles = row_tiles(decode);
    const uint64_t max_splits = std::max<uint64_t>(ceil_div(p_.keys, kFewestKeys), 1);
    uint64_t best = std::clamp<uint64_t>(blocks / tiles, 1, max_splits);
    if (blocks / tiles > 1) return best;
    for (uint64_t s = 2; s <= std::min(max_splits, kMaxSplits); ++s) {
      const uint64_t waves = ceil_div(tiles * s, blocks);
      const uint64_t of_best = ceil_div(tiles * best, blocks);
      if (10 * waves * best < 9 * of_best * s) best = s;
    }
    return best;
  }

  // Four blocks of 128 threads to a multiprocessor.
  abi::AttentionPlan any_shape() const {
    constexpr uint64_t kBlocks = 4, kRows = 64;
    const uint64_t blocks = std::max<uint64_t>(kBlocks * limits_.multiprocessors, 1);
    const uint64_t wanted = blocks / std::min(blocks, p_.kv_heads * ceil_div(rows_, kRows));
    const uint64_t max_splits = std::max<uint64_t>(ceil_div(p_.keys, kFewestKeys), 1);
    const uint64_t splits =
        p_.splits != 0 ? p_.splits : std::clamp<uint64_t>(wanted, 1, max_splits);
    return abi::attention_any_shape_plan(p_, splits, kFewestKeys);
  }

  static abi::AttentionPlan with(const abi::AttentionDecodeSpec& spec, uint64_t splits,
                                 AttentionReduce reduce) {
    abi::AttentionPlan plan{};
    plan.spec = spec_key(spec);
    plan.splits = splits;
    plan.fewest_split_keys = kFewestKeys;
    plan.kernel = abi::AttentionKernel::attention_decode;
    plan.reduce = reduce;
    return plan;
  }
  // For what is reduced through global memory.
  abi::AttentionPlan with_scratch(abi::AttentionPlan plan) const {
    const uint64_t state = decode_row_dim(p_.v.head_dim) + 2;
    plan.scratch_floats = kDecodeCounters + plan.splits * p_.tokens * p_.heads * state;
    return plan;
  }

  const abi::AttentionProblem& p_;
  const CudaLimits& limits_;
  HasKernel has_, has_many_rows_;
  uint64_t rows_;
};

}  // namespace

abi::AttentionPlan plan_attention(const abi::AttentionProblem& problem, const CudaLimits& limits,
                                  HasKernel has_decode, HasKernel has_many_rows) {
  return Planner(problem, limits, has_decode, has_many_rows).plan();
}

uint32_t many_rows_gpu(const CudaLimits& limits, bool few) {
  const auto has = [&](uint32_t gpu) {
    return limits.shared_bytes_per_block >= kManyRowsBytes[gpu];
  };
  if (limits.arch == 90 && has(kManyRowsHopper)) return few ? kManyRowsHalf : kManyRowsHopper;
  if (has(kManyRowsMedium)) return kManyRowsMedium;
  return has(kManyRowsSmall) ? kManyRowsSmall : kManyRowsNone;
}

bool plan_attention(const void* problem, const CudaLimits& limits, void* plan) {
  *static_cast<abi::AttentionPlan*>(plan) =
      plan_attention(*static_cast<const abi::AttentionProblem*>(problem), limits);
  return true;
}

}  // namespace gyre::cuda
