#pragma once
// attention, attention_partial and attention_merge.
#include "abi/kv_codec.h"
#include "abi/kv_layout.h"
#include "abi/kv_state.h"

namespace gyre::abi {

struct AttentionSpec {
  uint8_t q_dtype;    // DType
  uint8_t out_dtype;  // DType; f32 for partial states
  uint8_t k_format;   // KvFormat
  uint8_t v_format;
  uint8_t paged;   // 1: keys of several sequences in pages, see KvTable
  uint8_t latent;  // 1: AttentionParams::latent
  uint8_t unused[2];
};

// A kernel for few rows, one pair of head dims.
struct AttentionDecodeSpec {
  uint8_t k_format;  // KvFormat
  uint8_t v_format;
  uint8_t rows;         // of a block: 4, 8, 12 or 16
  uint8_t cluster;      // blocks that reduce their splits in each other's shared memory: 1, 2 or 8
  uint8_t paged;        // not 0: keys of several sequences in pages, see KvTable; 1: of any size,
                        // 2: of a multiple of what the kernel takes at a time
  uint8_t value_dim16;  // head_dim of V / 16; 0: that of K
  uint16_t head_dim;    // of K
};

constexpr AttentionDecodeSpec attention_decode_spec(uint32_t k_format, uint32_t v_format,
                                                    uint32_t head_dim, uint32_t rows,
                                                    uint32_t cluster) {
  return {static_cast<uint8_t>(k_format),
          static_cast<uint8_t>(v_format),
          static_cast<uint8_t>(rows),
          static_cast<uint8_t>(cluster),
          0,
          0,
          static_cast<uint16_t>(head_dim)};
}
constexpr uint32_t decode_value_dim(const GYRE_THREAD AttentionDecodeSpec& s) {
  return s.value_dim16 != 0 ? uint32_t{s.value_dim16} * 16 : s.head_dim;
}

// A kernel for many rows on tensor cores.
struct AttentionRowsSpec {
  uint8_t k_format;  // KvFormat
  uint8_t v_format;
  uint8_t gpu;  // what a block may use of it; the backend's
  uint8_t unused;
  uint16_t k_dim;
  uint16_t v_dim;
};

constexpr AttentionRowsSpec attention_rows_spec(uint32_t k_format, uint32_t v_format,
                                                uint32_t k_dim, uint32_t v_dim, uint32_t gpu) {
  return {static_cast<uint8_t>(k_format), static_cast<uint8_t>(v_format),
          static_cast<uint8_t>(gpu),      0,
          static_cast<uint16_t>(k_dim),   static_cast<uint16_t>(v_dim)};
}

// A kernel for latent attention, in three commands over the same arguments.
struct AttentionLatentSpec {
  uint8_t k_format;  // KvFormat of the latent
  uint8_t v_format;  // of the rotary part
  uint8_t part;      // 0: prepares the queries, 1: attends, 2: reduces partial states
  uint8_t k_dim16;   // head_dim of the latent / 16
  uint8_t v_dim16;   // of the rotary part
  uint8_t gpu;       // what the kernel may use of it; the backend's
  uint8_t bf16;      // 1: q, latent and rotary part are bf16, and multiplied as that
  uint8_t unused;
};
GYRE_CONSTANT uint32_t kLatentParts = 3;

constexpr AttentionLatentSpec attention_latent_spec(uint32_t k_format, uint32_t v_format,
                                                    uint32_t k_dim, uint32_t v_dim, uint32_t part) {
  return {static_cast<uint8_t>(k_format),
          static_cast<uint8_t>(v_format),
          static_cast<uint8_t>(part),
          static_cast<uint8_t>(k_dim / 16),
          static_cast<uint8_t>(v_dim / 16),
          0,
          0,
          0};
}

// Places of the arguments of attention, in every kernel.
enum AttentionArg : uint32_t {
  arg_q,
  arg_k_codes,
  arg_k_scales,
  arg_v_codes,
  arg_v_scales,
  arg_out,
  arg_lse,
  arg_sink_logits,
  arg_alibi_slopes,
  arg_tree_mask,
  arg_partial,
  arg_state,
  // With a KvTable:
  arg_table,         // i32 [sequences][table.stride]
  arg_kv_lengths,    // i32 [sequences]
  arg_cu_seqlens_q,  // i32 [sequences + 1]
  arg_is_prefill,    // u8 [sequences], or absent
  // A table has no KvState, but says with a tail where each sequence's begins: i32 [sequences], or
  // absent. In its place: with more than 16 arguments NVRTC compiles for minutes, not seconds.
  arg_tail_begin = arg_state,
  arg_schedule = arg_tree_mask  // attention_schedule.h; a table has no tree mask
};

// Pages of several sequences. Everything else about a sequence is in device memory and may be
// anything: entries that are not below `pages` must not be used as addresses.
struct KvTable {
  uint64_t sequences;
  uint64_t stride;         // entries from a sequence's row of the table to the next
  uint64_t pages;          // in the pool
  uint64_t page_stride;    // bytes
  uint64_t max_kv_length;  // of a sequence: what the row has entries for, or less
  uint32_t max_query_length;
  uint32_t page_tokens;   // 0: no pages, one cache of AttentionParams::capacity slots
  uint32_t first_entry;   // of the row
  uint32_t ring_entries;  // 0: key j lies in entry j / page_tokens; else modulo ring_entries
  uint32_t page_inverse;  // kv_page_inverse(page_tokens)
  uint32_t unused;
};

// 2^32 / tiles of a page, rounded up: the upper half of its product with a tile's number is the
// page that the tile lies in, below 2^25 tiles and from two tiles on. GPUs take long to divide.
constexpr uint32_t kv_page_inverse(uint32_t page_tokens) {
  return static_cast<uint32_t>(0xFFFFFFFFu / (page_tokens / kKvTile) + 1);
}

// Which sequences of a batch a command takes: those with as many (token, query head) rows of a KV
// head, from the lower 16 bits to the upper. Prompts, and what the caller marks as one, have 65535.
// Commands for `decode` and `prompt` take all of a batch, or, where a device has a kernel for draft
// tokens, those for fewer rows than its plan says, for `drafts` and for `many_rows`.
enum class AttentionPhase : uint32_t {
  all = 0,  // no upper bound
  decode = 16 << 16,
  prompt = 0xFFFF0000 | 17,
  drafts = 64 << 16 | 9,
  many_rows = 0xFFFF0000 | 65
};
constexpr AttentionPhase phase_of_rows(uint32_t fewest, uint32_t max_rows) {
  return static_cast<AttentionPhase>(max_rows << 16 | fewest);
}
constexpr uint32_t phase_fewest_rows(AttentionPhase phase) {
  return static_cast<uint32_t>(phase) & 0xFFFFu;
}
constexpr uint32_t phase_max_rows(AttentionPhase phase) {
  const uint32_t max_rows = static_cast<uint32_t>(phase) >> 16;
  return max_rows == 0 ? 0xFFFFu : max_rows;
}

// Strides in bytes. Rows of a KV head are its (token, query head) pairs, the head running fastest.
struct AttentionParams {
  uint64_t tokens;
  uint64_t heads;
  uint64_t kv_heads;
  uint64_t length;
  uint64_t capacity;
  uint64_t ring_start;
  uint64_t first_key;   // no query sees an older one
  uint64_t end_key;     // no query sees this key or a newer one of the cache
  uint64_t tail_begin;  // RowMask's
  uint64_t window;      // 0: all
  uint64_t splits;
  uint64_t split_keys;  // keys per split, counted from first_key
  uint64_t q_token_stride;
  uint64_t q_head_stride;
  uint64_t out_token_stride;
  uint64_t out_head_stride;
  uint64_t lse_token_stride;
  uint64_t lse_head_stride;
  uint64_t tree_stride;
  // A command ahead unpacks keys: room in `partial` for so many tiles of 8 keys of each KV head; 0:
  // none does.
  uint64_t unpacked_room;
  // Over pages, 0: all sequences have room and are unpacked. Else a command behind takes those that
  // are not, and where only some have room, these must make so many work tiles.
  uint64_t unpacked_work;
  KvPlaces places;  // with a state: length, first_key, end_key, tail_begin and split_keys come from
                    // it, and these say how
  KvCacheLayout k;
  KvCacheLayout v;
  KvTable table;
  float scale;
  float soft_cap;        // 0: off
  AttentionPhase phase;  // with a table
  uint32_t causal;
  uint32_t partial;            // kAttentionWhole, kAttentionPartial or kAttentionMerged
  uint32_t segment;            // KvSegment, with a state
  uint32_t fewest_split_keys;  // AttentionPlan's, with a state
  uint32_t group;              // query heads of a KV head
  uint32_t used_splits;        // that have keys, at least 1; 0: the state says
  uint32_t q_dtype;            // DType, for backends that branch on it
  uint32_t out_dtype;
  uint32_t schedule_key;  // AttentionScheduleParams::key of the schedule that the kernel reads
  uint32_t settled_keys;  // 1: commands that may still run write no key before the queries' own
  // 1: k is a latent that is both K and V, v the rotary part of K. There is one KV head; a query
  // has the coordinates of the latent, then those of the rotary part; an output row has the
  // latent's.
  uint32_t latent;
};

// Coordinates of an output row.
constexpr uint32_t attention_out_dim(const GYRE_PARAMS AttentionParams& p) {
  return p.latent != 0 ? p.k.head_dim : p.v.head_dim;
}

// AttentionParams::partial. Whole: the kernel writes the output. Partial: the splits' states, over
// pages in its own order. Merged: the output, reducing states in `partial`, which holds
// zeros before the first call; after it the first kScratchCounterBytes bytes are the kernel's.
// States: as Merged or, where it is absent, as Whole, but of every row it writes the state instead
// of the output: f32 [tokens][heads][v_head_dim + 2], contiguous, in the argument `out`.
GYRE_CONSTANT uint32_t kAttentionWhole = 0, kAttentionPartial = 1, kAttentionMerged = 2,
                       kAttentionStates = 3;

// Scratch memory begins with a kernel's counters: calls of other shapes write behind this many
// bytes.
GYRE_CONSTANT uint64_t kScratchCounterBytes = 16384;

GYRE_CONSTANT uint64_t kSplitMultiple = 64;  // keys of a split: what a kernel takes at a time

inline uint64_t attention_split_keys(uint64_t keys, uint64_t splits) {
  const uint64_t each = keys / splits + (keys % splits != 0 ? 1 : 0);
  return (each + kSplitMultiple - 1) / kSplitMultiple * kSplitMultiple;
}

// Oldest key that any query's window reaches.
inline uint64_t attention_first_key(uint64_t tokens, uint64_t length, uint64_t window) {
  if (window == 0 || tokens > length) return 0;
  const uint64_t before = length - tokens + 1;  // keys up to the first query's own
  return before > window ? before - window : 0;
}

// Keys of the command's segment that some query sees, where the sequence is now; row_bounds cuts
// them for each row. The boundary between body and tail grows with the query: the first one's is
// the tail's begin, the last one's the body's end.
inline KvKeys attention_keys(const GYRE_THREAD KvState& state,
                             const GYRE_PARAMS AttentionParams& p) {
  KvKeys keys = kv_segment_keys(p.segment, p.places, state);
  uint64_t first = attention_first_key(p.tokens, state.length, p.window);
  if (p.segment == kSegmentTail)
    first = kv_max(first, attention_first_key(p.tokens, state.length, p.places.tail));
  if (p.segment == kSegmentBody && p.places.tail != 0) {
    const uint64_t newest = state.length > p.places.tail ? state.length - p.places.tail : 0;
    keys.end = kv_least(keys.end, kv_max(kv_max(newest, state.tail_begin), keys.begin));
  }
  return {kv_least(kv_max(keys.begin, first), keys.end), keys.end};
}

#if !defined(__METAL_VERSION__)  // where Params are constants
// What a recorded command cannot know: where the sequence is now.
inline void attention_follow(const KvState& state, AttentionParams& p) {
  const KvKeys keys = attention_keys(state, p);
  p.length = state.length;
  p.end_key = keys.end;
  p.first_key = keys.begin;
  p.tail_begin = state.tail_begin;
  p.split_keys =
      kv_max(attention_split_keys(p.end_key - p.first_key, p.splits), p.fewest_split_keys);
}
#endif

// A sequence of a batch, from numbers that may be anything. Not `valid`: its rows, as far as they
// are rows of q, become NaN.
struct BatchSequence {
  uint64_t first_token;  // row of q
  uint64_t tokens;       // 0: nothing to do
  uint64_t length;       // keys
  bool valid;
};
constexpr BatchSequence batch_sequence(const GYRE_PARAMS KvTable& table, uint64_t all_tokens,
                                       int32_t begin, int32_t end, int32_t length) {
  if (begin < 0 || end <= begin || static_cast<uint64_t>(begin) >= all_tokens)
    return {0, 0, 0, true};
  const auto first = static_cast<uint64_t>(begin), last = static_cast<uint64_t>(end);
  const uint64_t count = (last < all_tokens ? last : all_tokens) - first;
  const bool valid = last <= all_tokens && count <= table.max_query_length && length >= 0 &&
                     static_cast<uint64_t>(length) <= table.max_kv_length;
  return {first, count, valid ? static_cast<uint64_t>(length) : 0, valid};
}

// Where a sequence's 16-bit tail begins; a list that is absent says at its beginning.
template <class Int32Pointer>
constexpr uint64_t batch_tail_begin(Int32Pointer list, uint64_t sequence, uint64_t length) {
  if (list == nullptr || list[sequence] < 0) return 0;
  const auto begin = static_cast<uint64_t>(list[sequence]);
  return begin < length ? begin : length;
}

GYRE_CONSTANT uint64_t kDecodePhaseRows = phase_max_rows(AttentionPhase::decode);
// A sequence of more than max_tokens queries is taken, and gets NaN, where the longest ones are;
// max_tokens 0: not known.
constexpr bool attention_takes(AttentionPhase phase, uint64_t tokens, uint64_t max_tokens,
                               uint64_t group, bool prompt) {
  const uint64_t all = (max_tokens != 0 && tokens > max_tokens ? max_tokens : tokens) * group;
  const uint64_t rows = prompt || all > 0xFFFF ? 0xFFFF : all;
  return rows >= phase_fewest_rows(phase) && rows <= phase_max_rows(phase);
}

struct AttentionMergeSpec {
  uint8_t out_dtype;
  uint8_t unused[7];
};

struct AttentionMergeParams {
  uint64_t splits;
  uint64_t tokens;
  uint64_t heads;
  uint64_t head_dim;
  uint64_t out_token_stride;
  uint64_t out_head_stride;
  uint64_t lse_token_stride;
  uint64_t lse_head_stride;
};

}  // namespace gyre::abi
