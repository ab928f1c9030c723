// rope_append on the CPU. The first tasks rotate q, as rope does. The others take tiles: the tokens
// of the step (or of the list of slots) that share a tile of 8 slots, for a group of heads. They
// rotate K's rows into scratch memory, in the dtype that rope would leave them in, and store them
// and V's rows as kv_append and kv_write do. So every byte of q, k and v is read once.
#include "abi/rope_append.h"

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/kernels/select.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/rope_append.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/kv_append-inl.h"
#include "cpu/kernels/kv_write-inl.h"
#include "cpu/kernels/rope_token-inl.h"

#ifndef GYRE_CPU_ROPE_APPEND_WORK  // once for all instruction sets
#define GYRE_CPU_ROPE_APPEND_WORK
namespace gyre::cpu {

constexpr uint64_t kRowBytes = 64 << 10;  // of scratch memory for rotated rows: stays in L2

// How a call is cut, by params alone.
struct RopeAppendWork {
  uint64_t tokens, kv_heads;
  uint64_t group;  // heads of a tile that are done together
  uint64_t groups;
  uint32_t q_tasks, tile_tasks;  // one task in all does both

  RopeAppendWork(const abi::RopeAppendParams& p, uint64_t element_bytes) {
    constexpr uint64_t kRotatedPerTask = 16 << 10, kStoredPerTask = 8 << 10;  // some microseconds
    constexpr uint64_t kManyTokens = 64;
    const uint64_t k_dim = p.rope.head_dim, v_dim = p.slot_bytes != 0
                                                        ? p.write.stream[1].cache.head_dim
                                                        : p.append.stream[1].body.head_dim;
    tokens = p.rope.tokens;
    kv_heads = p.rope.stream[1].heads;
    const uint64_t fits = std::max<uint64_t>(1, kRowBytes / (abi::kKvTile * k_dim * element_bytes));
    const uint64_t in_tile = std::min<uint64_t>(tokens, abi::kKvTile);
    // Each group makes its angles again: only few tokens are cut that way.
    group = tokens >= kManyTokens ? kv_heads : kStoredPerTask / (in_tile * (k_dim + v_dim));
    group = std::clamp<uint64_t>(group, 1, std::min(kv_heads, fits));
    groups = (kv_heads + group - 1) / group;
    const uint64_t q = p.rope.streams != 0 ? p.rope.stream[0].heads * k_dim : 0;
    const uint64_t kv = kv_heads * (k_dim + v_dim);
    q_tasks = task_count(tokens * q / kRotatedPerTask, q != 0 ? tokens : 0);
    tile_tasks = task_count(tokens * kv / kStoredPerTask, tokens * groups);
    if (tokens * (q + kv) <= kRotatedPerTask) q_tasks = 0, tile_tasks = 1;
  }
};

}  // namespace gyre::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

constexpr uint32_t kWhere = 7;  // from there on arguments are kv_append's

// The tile's rows of K, rotated: [slot][head of the group][head_dim].
struct RotatedRows {
  alignas(64) std::byte bytes[kRowBytes];
};

// Rotates k as rope would, as its only stream.
template <class In, bool kAdjacent, bool kNorm>
class KeyRotation {
 public:
  KeyRotation(const abi::RopeParams& params, const uint64_t* args) : p_(params) {
    p_.streams = 1;
    p_.stream[0] = params.stream[1];
    std::copy_n(args, kRope.info.arg_count, args_);
    args_[kStreamArgs[0][0]] = args[kWhere + 1];
    args_[kStreamArgs[0][2]] = args[kWhere - 1];
    args_[kStreamArgs[0][3]] = 0;
    MakeTables(p_, args_, tables_);
    if constexpr (kNorm) MakeWeights(p_, args_, tables_);
  }

  uint64_t row_bytes() const { return p_.head_dim * sizeof(In); }

  // `heads` heads from `first` on of the tokens that enter a tile.
  void Rotate(const TileTokens& tokens, uint64_t first, uint64_t heads, RotatedRows& rows) {
    const abi::RopeStream& s = p_.stream[0];
    for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
      if ((tokens.mask >> slot & 1) == 0) continue;
      const uint64_t token = tokens.token[slot];
      MakeTokenAngles<kAdjacent>(p_, args_, tables_, token, angles_);
      RotateHeads<kAdjacent, kNorm, In, In>(
          p_, FactorsOf<kAdjacent, kNorm>(p_, tables_, 0, angles_),
          {.x = args_[kStreamArgs[0][0]] + token * s.x_token_stride + first * s.x_head_stride,
           .x_step = s.x_head_stride,
           .out = reinterpret_cast<uintptr_t>(Row(rows, slot, 0, heads)),
           .out_step = row_bytes(),
           .second = 0,
           .second_step = 0,
           .second_dtype = abi::kRopeNoDtype},
          heads);
    }
  }
  std::byte* Row(RotatedRows& rows, uint32_t slot, uint64_t head, uint64_t heads) const {
    return rows.bytes + (slot * heads + head) * row_bytes();
  }

 private:
  abi::RopeParams p_;
  uint64_t args_[kRope.info.arg_count];
  RopeTables tables_;
  RopeAngles angles_;
};

// What both walks are told: the kernel's params and arguments, and where the task has its scratch.
template <class Rotation>
struct TileWork {
  const abi::RopeAppendParams& p;
  const uint64_t* args;
  const RopeAppendWork& cut;
  Rotation& rotation;
  RotatedRows& rows;
  KvScratch& scratch;
};

struct HeadGroup {
  uint64_t begin, end;
};
inline HeadGroup GroupOf(const RopeAppendWork& cut, uint64_t index) {
  const uint64_t begin = index % cut.groups * cut.group;
  return {begin, std::min(begin + cut.group, cut.kv_heads)};
}

// Tokens of a step into a cache, and into its sink tokens and tail. Tiles of the body come after
// runs of tokens for the sink tokens, which are no part of the body.
template <class In, class Rotation>
class AppendTiles {
 public:
  explicit AppendTiles(const TileWork<Rotation>& work)
      : work_(work),
        append_(work.p.append, work.args + kWhere),
        dims_{MakeHead(work.p.append.stream[0].body), MakeHead(work.p.append.stream[1].body)} {
    const uint64_t sink_tokens = std::min(append_.p.places.sink_tokens, append_.keys.end);
    sink_tokens_ = sink_tokens > append_.keys.begin ? sink_tokens - append_.keys.begin : 0;
    sink_runs_ = (sink_tokens_ + abi::kKvTile - 1) / abi::kKvTile;
  }

  const KvHead* dims() const { return dims_; }
  uint64_t count() const { return (sink_runs_ + append_.run.tiles) * work_.cut.groups; }

  void Do(uint64_t index) {
    const uint64_t run = index / work_.cut.groups;
    const HeadGroup heads = GroupOf(work_.cut, index);
    const bool body = run >= sink_runs_;
    const uint64_t tile = body ? append_.run.tile(run - sink_runs_) : 0;
    const TileTokens tokens = body ? append_.tokens_of(tile) : SinkTokens(run);
    work_.rotation.Rotate(tokens, heads.begin, heads.end - heads.begin, work_.rows);
    for (uint64_t stream = 0; stream < 2; ++stream) {
      for (uint64_t head = heads.begin; head < heads.end; ++head) {
        KvTileJob job = append_.job_of(stream, head, tile);
        job.head = &dims_[stream];
        job.mask = tokens.mask;
        for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
          job.source[slot] = Source(stream, heads, head, slot, tokens);
          if ((tokens.mask >> slot & 1) == 0) continue;
          Half* const near = append_.near_row(stream, head, tokens.token[slot]);
          if (near != nullptr)
            CopyRow(reinterpret_cast<const In*>(job.source[slot]), near,
                    append_.p.stream[stream].body.head_dim);
        }
        if (body) WriteTile<In>(append_.p.stream[stream].body, job, work_.scratch);
      }
    }
  }

 private:
  TileTokens SinkTokens(uint64_t run) const {
    TileTokens tokens;
    for (uint32_t i = 0; i < abi::kKvTile; ++i) {
      tokens.token[i] = run * abi::kKvTile + i;
      if (tokens.token[i] < sink_tokens_) tokens.mask |= 1u << i;
    }
    return tokens;
  }
  const std::byte* Source(uint64_t stream, const HeadGroup& heads, uint64_t head, uint32_t slot,
                          const TileTokens& tokens) const {
    if (stream == 0)
      return work_.rotation.Row(work_.rows, slot, head - heads.begin, heads.end - heads.begin);
    return append_.places(1, head).source +
           tokens.token[slot] * append_.p.stream[1].source_token_stride;
  }

  TileWork<Rotation> work_;
  Append append_;
  KvHead dims_[2];
  uint64_t sink_tokens_, sink_runs_;
};

// Tokens of a list of slots into pages. The first token of a tile stands for it.
template <class In, class Slot, class Rotation>
class WriteTiles {
 public:
  explicit WriteTiles(const TileWork<Rotation>& work)
      : work_(work),
        p_(work.p.write),
        list_{pointer<const Slot>(work.args[kWhere]), p_.tokens, p_.pages * p_.page_tokens},
        dims_{MakeHead(p_.stream[0].cache), MakeHead(p_.stream[1].cache)} {
    for (uint32_t i = 0; i < 3; ++i) {  // as kv_write has them
      args_[i] = work.args[kWhere + 1 + i];
      args_[3 + i] = work.args[kWhere + 5 + i];
    }
  }

  const KvHead* dims() const { return dims_; }
  uint64_t count() const { return p_.tokens * work_.cut.groups; }

  void Do(uint64_t index) {
    const uint64_t token = index / work_.cut.groups;
    if (!list_.leads(token)) return;
    const HeadGroup heads = GroupOf(work_.cut, index);
    const uint64_t count = heads.end - heads.begin;
    const TileRun run = FindRun(list_, token);
    work_.rotation.Rotate(run.tokens, heads.begin, count, work_.rows);
    for (uint64_t stream = 0; stream < 2; ++stream) {
      for (uint64_t head = heads.begin; head < heads.end; ++head) {
        KvTileJob job = FindTile(p_, args_, run, stream * p_.heads + head);
        job.head = &dims_[stream];
        if (stream == 1) {
          SetSources(p_, args_, run, head, job);
        } else {
          for (uint32_t slot = 0; slot < abi::kKvTile; ++slot)
            job.source[slot] = work_.rotation.Row(work_.rows, slot, head - heads.begin, count);
        }
        WriteTile<In>(p_.stream[stream].cache, job, work_.scratch);
      }
    }
  }

 private:
  TileWork<Rotation> work_;
  const abi::KvWriteParams& p_;
  uint64_t args_[6];
  SlotList<Slot> list_;
  KvHead dims_[2];
};

template <class Tiles>
void DoTiles(Tiles tiles, KvScratch& scratch, uint32_t task, uint32_t tasks) {
  scratch.facts.Clear(std::max(tiles.dims()[0].scales.count, tiles.dims()[1].scales.count));
  const Share share = share_of(tiles.count(), task, tasks);
  for (uint64_t i = share.begin; i < share.end; ++i) tiles.Do(i);
}

template <class In, bool kAdjacent, bool kNorm>
void RotateQueries(const abi::RopeAppendParams& p, const uint64_t* args, const Share& tokens) {
  const abi::RopeParams rope = p.rope;  // by value: stores could otherwise alias them
  uint64_t q_args[kRope.info.arg_count] = {};
  std::copy_n(args, kStreamArgs[0][2] + 1, q_args);
  RopeTokens<In, In, kAdjacent, kNorm>(rope, q_args, tokens);
}

template <class In, bool kAdjacent, bool kNorm>
void StoreTiles(const abi::RopeAppendParams& p, const uint64_t* args, const RopeAppendWork& cut,
                uint32_t task, uint32_t tasks) {
  using Rotation = KeyRotation<In, kAdjacent, kNorm>;
  Rotation rotation(p.rope, args);
  RotatedRows rows;
  KvScratch scratch;
  const TileWork<Rotation> work{p, args, cut, rotation, rows, scratch};
  if (p.slot_bytes == 0) {
    DoTiles(AppendTiles<In, Rotation>(work), scratch, task, tasks);
  } else if (p.slot_bytes == 4) {
    DoTiles(WriteTiles<In, int32_t, Rotation>(work), scratch, task, tasks);
  } else {
    DoTiles(WriteTiles<In, int64_t, Rotation>(work), scratch, task, tasks);
  }
}

template <class In, bool kAdjacent, bool kNorm>
void RopeAppend(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::RopeAppendParams*>(params);
  const RopeAppendWork cut(p, sizeof(In));
  const bool rotates = p.rope.streams != 0;
  if (rotates && (task < cut.q_tasks || tasks == 1)) {
    const Share all{0, p.rope.tokens};
    RotateQueries<In, kAdjacent, kNorm>(
        p, args, tasks == 1 ? all : share_of(p.rope.tokens, task, cut.q_tasks));
  }
  if (task >= cut.q_tasks)
    StoreTiles<In, kAdjacent, kNorm>(p, args, cut, task - cut.q_tasks, cut.tile_tasks);
}

TaskFn SelectRopeAppend(uint64_t key) {
  const auto spec = spec_from_key<abi::RopeAppendSpec>(key);
  return select_float(spec.dtype, [&](auto in) -> TaskFn {
    using In = decltype(in);
    if (spec.norm != 0)
      return spec.adjacent != 0 ? RopeAppend<In, true, true> : RopeAppend<In, false, true>;
    return spec.adjacent != 0 ? RopeAppend<In, true, false> : RopeAppend<In, false, false>;
  });
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectRopeAppend);

TaskFn select_rope_append(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectRopeAppend)(spec); }

uint32_t rope_append_tasks(const void* params, uint64_t spec) {
  const auto& p = *static_cast<const abi::RopeAppendParams*>(params);
  const auto dtype = static_cast<DType>(spec_from_key<abi::RopeAppendSpec>(spec).dtype);
  const RopeAppendWork cut(p, size_bytes(dtype));
  return cut.q_tasks + cut.tile_tasks;
}

}  // namespace gyre::cpu
#endif
