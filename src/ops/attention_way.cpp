#include "ops/attention_way.h"

#include <algorithm>

#include "ops/attention_spec.h"
#include "ops/kv_layout.h"

namespace gyre {
namespace {

// (token, query head) pairs of a KV head.
uint64_t rows_of(const AttentionPartialInputs& in) {
  return in.q.shape(0) * (in.q.shape(1) / in.k_cache.shape.kv_heads);
}

// If the device has such a kernel. Fewer rows to a block than there could be where it has no room
// for them.
DecodeSpec find_decode(const Recording& recording, const AttentionPartialInputs& in,
                       uint64_t cluster) {
  const KvShape &k = in.k_cache.shape, &v = in.v_cache.shape;
  const uint64_t least = describe(v.format).compressed ? 4 : 8;
  for (uint64_t rows =
           abi::attention_decode_rows(static_cast<uint32_t>(v.format), v.head_dim, rows_of(in));
       rows >= least; rows -= least) {
    const auto spec = make_decode_spec(k.format, v.format, k.head_dim, rows, cluster);
    if (recording.has(kAttentionDecode, spec)) return spec;
  }
  return {};
}

// KV heads, with as many of a head's rows each as a block takes.
uint64_t decode_units(const AttentionPartialInputs& in, const abi::AttentionDecodeSpec& spec) {
  return in.k_cache.shape.kv_heads * ceil_div(rows_of(in), spec.rows);
}

// 16 bytes can be copied from wherever a key, a value or a tile begins; offsets fit into 32 bits.
bool is_aligned(const KvBuffer& cache) {
  const abi::KvCacheLayout layout = kv_cache_layout(cache);
  const bool tiled = cache.shape.role == KvRole::v && describe(cache.shape.format).compressed;
  const uint64_t row = tiled ? layout.codes_tile_stride : layout.codes_tile_stride / abi::kKvTile;
  const uint64_t all = cache.codes.address() | cache.scales.address() | row |
                       layout.codes_head_stride | layout.scales_tile_stride |
                       layout.scales_head_stride;
  return all % 16 == 0 && layout.codes_tile_stride < uint64_t{1} << 26 &&
         layout.scales_tile_stride < uint64_t{1} << 26;
}

// Few keys: as many splits as a cluster has blocks, which put them together faster than through
// global memory. Where there are more keys, more blocks than that are worth waiting for: measured,
// sooner where codes must be unpacked than where bytes are all there is to wait for.
DecodeSpec cluster_for(const Recording& recording, const AttentionPartialInputs& in,
                       uint64_t keys) {
  constexpr uint64_t kFewBytes = 4 << 20, kFewCodes = uint64_t{6144} * 128;
  const KvShape &k = in.k_cache.shape, &v = in.v_cache.shape;
  const auto whole_bytes = [](KvFormat f) { return !describe(f).compressed || f == KvFormat::tq8; };
  const uint64_t slot = (in.k_cache.bytes() + in.v_cache.bytes()) / k.kv_heads / k.capacity;
  const bool few = whole_bytes(k.format) && whole_bytes(v.format)
                       ? keys * slot <= kFewBytes
                       : keys * k.head_dim * ceil_div(rows_of(in), 4) <= kFewCodes;
  if (!few || keys <= recording.device().attention_fewest_keys) return {};
  const DecodeSpec spec = find_decode(recording, in, abi::kAttentionCluster);
  if (!spec) return {};
  const uint64_t blocks = decode_units(in, *spec) * abi::kAttentionCluster;
  const uint64_t units = recording.device().compute_units;
  return blocks <= units && 4 * blocks >= units ? spec : DecodeSpec{};
}

// Splits that are put together in global memory, by pairs of blocks that first do so among
// themselves: where a block has many sums, one alone would read all of theirs at the end.
DecodeSpec pair_for(const Recording& recording, const AttentionPartialInputs& in,
                    const abi::AttentionDecodeSpec& decode, uint64_t splits) {
  constexpr uint64_t kManySums = uint64_t{12} * 128;
  const bool pays = decode.rows * in.v_cache.shape.head_dim >= kManySums;
  return pays && splits % 2 == 0 ? find_decode(recording, in, abi::kAttentionPair) : DecodeSpec{};
}

}  // namespace

uint64_t choose_splits(const DeviceInfo& device, const AttentionPartialInputs& in, uint64_t keys) {
  constexpr uint64_t kRows = 64;
  const uint64_t pieces = device.attention_pieces;
  const uint64_t kv_heads = in.k_cache.shape.kv_heads;
  const uint64_t wanted = pieces / std::min(pieces, kv_heads * ceil_div(rows_of(in), kRows));
  const uint64_t most = ceil_div(keys, device.attention_fewest_keys);
  return std::clamp<uint64_t>(wanted, 1, std::max<uint64_t>(most, 1));
}

DecodeSpec decode_for(const Recording& recording, const AttentionPartialInputs& in) {
  constexpr uint64_t kMostHeads = 65535, kMostKeys = uint64_t{1} << 30;
  const KvShape &k = in.k_cache.shape, &v = in.v_cache.shape;
  const bool takes = rows_of(in) <= abi::kAttentionRows && !in.tree.defined() &&
                     k.head_dim == v.head_dim &&
                     (in.q.shape(0) == 1 || describe(v.format).compressed) &&
                     k.kv_heads <= kMostHeads && k.capacity != 0 && k.capacity <= kMostKeys &&
                     is_aligned(in.k_cache) && is_aligned(in.v_cache);
  return takes ? find_decode(recording, in, 1) : DecodeSpec{};
}

uint64_t decode_splits(const DeviceInfo& device, const AttentionPartialInputs& in,
                       const abi::AttentionDecodeSpec& decode, uint64_t keys) {
  constexpr uint64_t kMostSplits = 8;
  const uint64_t units = std::max<uint64_t>(device.compute_units, 1);
  const uint64_t heads = decode_units(in, decode);
  const uint64_t most = std::max<uint64_t>(ceil_div(keys, device.attention_fewest_keys), 1);
  uint64_t best = std::clamp<uint64_t>(units / heads, 1, most);
  if (units / heads > 1) return best;
  for (uint64_t s = 2; s <= std::min(most, kMostSplits); ++s) {
    const uint64_t rounds = ceil_div(heads * s, units), of_best = ceil_div(heads * best, units);
    if (10 * rounds * best < 9 * of_best * s) best = s;
  }
  return best;
}

Way decode_way(const Recording& recording, const AttentionPartialInputs& in,
               const abi::AttentionDecodeSpec& decode, uint64_t keys) {
  if (const DecodeSpec clustered = cluster_for(recording, in, keys))
    return {clustered, abi::kAttentionWhole, abi::kAttentionCluster};
  const uint64_t splits = decode_splits(recording.device(), in, decode, keys);
  if (splits == 1) return {decode, abi::kAttentionWhole, 1};
  const DecodeSpec pair = pair_for(recording, in, decode, splits);
  return {pair ? pair : decode, abi::kAttentionMerged, splits};
}

}  // namespace gyre
