// The writers on the CPU: kv_quantize, kv_append, kv_write and rope_append. Work items are tiles of
// 8 slots for a group of heads of K and V: write-inl.h finds the tokens of a tile, kv_tile-inl.h
// stores them. rope_append's first tasks rotate q, as rope does; the others rotate K's rows into
// scratch memory first, in the dtype that rope would leave them in. So every byte of q, k and v is
// read once.
#include "abi/write.h"

#include <algorithm>
#include <bit>

#include "abi/rope_append.h"
#include "cpu/kernels.h"
#include "cpu/kernels/select.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/write.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/rope_code-inl.h"
#include "cpu/kernels/write-inl.h"

#ifndef GYRE_CPU_WRITE_CUT  // once for all instruction sets
#define GYRE_CPU_WRITE_CUT
namespace gyre::cpu {

constexpr uint64_t kRowBytes = 64 << 10;  // of scratch memory for rotated rows: stays in L2

// How a call is cut, by params alone.
struct WriteCut {
  uint64_t group;  // heads of a tile that are done together
  uint64_t groups;
  uint32_t tasks;

  // Many tokens: all heads of a token, which usually lie together in memory, are read at once.
  explicit WriteCut(const abi::WriteParams& p) {
    constexpr uint64_t kManyTokens = 256;
    Cut(p, p.heads, p.tokens >= kManyTokens ? p.heads : 0);
  }

 protected:
  static constexpr uint64_t kStoredPerTask = 8 << 10;  // coordinates: some microseconds

  static uint64_t RowDims(const abi::WriteParams& p) {  // 0 for a stream that is not there
    return uint64_t{p.stream[0].cache.head_dim} + p.stream[1].cache.head_dim;
  }
  // wanted: heads of a group; 0: as many as a task takes.
  void Cut(const abi::WriteParams& p, uint64_t max_group, uint64_t wanted) {
    const uint64_t in_tile = std::min<uint64_t>(p.tokens, abi::kKvTile);
    if (wanted == 0) wanted = kStoredPerTask / std::max<uint64_t>(1, in_tile * RowDims(p));
    group = std::max<uint64_t>(1, std::min({wanted, max_group, p.heads}));
    groups = (p.heads + group - 1) / group;
    tasks = task_count(p.tokens * p.heads * RowDims(p) / kStoredPerTask, p.tokens * groups);
  }
};

struct RopeAppendCut : WriteCut {
  uint32_t q_tasks;  // one task in all does both

  RopeAppendCut(const abi::RopeAppendParams& p, uint64_t element_bytes) : WriteCut(p.write) {
    constexpr uint64_t kRotatedPerTask = 16 << 10, kManyTokens = 64;
    const uint64_t tokens = p.rope.tokens, k_dim = p.rope.head_dim;
    // Each group makes its angles again: only few tokens are cut that way.
    Cut(p.write, kRowBytes / (abi::kKvTile * k_dim * element_bytes),
        tokens >= kManyTokens ? p.write.heads : 0);
    const uint64_t q = p.rope.streams != 0 ? p.rope.stream[0].heads * k_dim : 0;
    q_tasks = task_count(tokens * q / kRotatedPerTask, q != 0 ? tokens : 0);
    if (tokens * (q + p.write.heads * RowDims(p.write)) <= kRotatedPerTask) q_tasks = 0, tasks = 1;
  }
};

}  // namespace gyre::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

struct HeadGroup {
  uint64_t begin, end;
};

constexpr uint32_t kWhere = 7;  // from there on arguments are those of a write

// Rotates k as rope would, as its only stream.
class KeyRotation {
 public:
  KeyRotation(const abi::RopeParams& params, const uint64_t* args, const RopeCode& code)
      : p_(params), code_(code), row_bytes_(params.head_dim * size_bytes(code.out)) {
    p_.streams = 1;
    p_.stream[0] = params.stream[1];
    std::copy_n(args, kRope.info.arg_count, args_);
    args_[kStreamArgs[0][0]] = args[kWhere + 1];
    args_[kStreamArgs[0][2]] = args[kWhere - 1];
    args_[kStreamArgs[0][3]] = 0;
    MakeTables(p_, args_, code.norm, tables_);
  }

  // A group of heads of the tokens that enter a tile.
  void Rotate(const TileTokens& tokens, const HeadGroup& heads) {
    const abi::RopeStream& s = p_.stream[0];
    for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
      if ((tokens.mask >> slot & 1) == 0) continue;
      const uint64_t token = tokens.token[slot];
      MakeTokenAngles(p_, args_, tables_, token, code_.adjacent, angles_);
      RotateHeads(
          p_, FactorsOf(p_, tables_, 0, code_, angles_),
          {.x = args_[kStreamArgs[0][0]] + token * s.x_token_stride + heads.begin * s.x_head_stride,
           .x_step = s.x_head_stride,
           .out = reinterpret_cast<uintptr_t>(Row(slot, heads.begin, heads)),
           .out_step = row_bytes_},
          heads.end - heads.begin, code_);
    }
  }
  std::byte* Row(uint32_t slot, uint64_t head, const HeadGroup& heads) {
    return rows_ + (slot * (heads.end - heads.begin) + head - heads.begin) * row_bytes_;
  }

 private:
  abi::RopeParams p_;
  const RopeCode& code_;
  uint64_t row_bytes_;
  uint64_t args_[kRope.info.arg_count];
  RopeTables tables_;
  RopeAngles angles_;
  alignas(64) std::byte rows_[kRowBytes];  // the tile's: [slot][head of the group][head_dim]
};

// What rows a write takes.
struct WriteSource {
  DType dtype;
  uint32_t calibrated;    // streams whose source is calibrated rows, 1 K, 2 V
  KeyRotation* rotation;  // null: rows of K are stored as they are
};

// One write. args: "where", then source, codes, scales and 16-bit rows of K, and those of V.
class Writer {
 public:
  Writer(const abi::WriteParams& p, const uint64_t* args, const WriteSource& source,
         const WriteCut& cut)
      : p_(p),
        args_(args),
        source_(source),
        cut_(cut),
        targets_(p, args[0]),
        dims_{MakeHead(p.stream[0].cache), MakeHead(p.stream[1].cache)} {
    scratch_.facts.Clear(std::max(dims_[0].scales.count, dims_[1].scales.count));
  }

  // A run of slots is walked for K, then for V: that many fewer rows of the cache are written at a
  // time. A list is looked through once for both. Most tokens of a list are not the first of their
  // tile: stepping over one has to cost next to nothing.
  HWY_NOINLINE void Write(uint32_t task, uint32_t tasks) {
    const uint64_t tiles = targets_.count();
    const uint64_t together = p_.where == abi::kWriteSlots ? p_.streams : 1;
    const Share share = share_of(p_.streams / together * tiles * cut_.groups, task, tasks);
    if (share.begin == share.end) return;
    uint64_t group = share.begin % cut_.groups, tile = share.begin / cut_.groups % tiles;
    uint64_t stream = p_.first_stream + share.begin / cut_.groups / tiles;
    FoundTile found;
    for (uint64_t item = share.begin; item < share.end; group = 0) {
      const uint64_t end = std::min(share.end, item + cut_.groups - group);
      targets_.Find(tile, found);
      if (found.tokens.mask != 0) {
        for (; item < end; ++item, ++group) WriteGroup(found, stream, together, group);
      }
      item = end;
      if (++tile < tiles) continue;
      tile = 0;
      ++stream;
    }
  }

 private:
  void WriteGroup(const FoundTile& found, uint64_t first_stream, uint64_t streams, uint64_t group) {
    const uint64_t first = group * cut_.group;
    const HeadGroup heads{first, std::min(first + cut_.group, p_.heads)};
    if (source_.rotation != nullptr && first_stream == 0)
      source_.rotation->Rotate(found.tokens, heads);
    for (uint64_t stream = first_stream; stream < first_stream + streams; ++stream) {
      for (uint64_t head = heads.begin; head < heads.end; ++head)
        WriteHead(found, stream, head, heads);
    }
  }

  void WriteHead(const FoundTile& found, uint64_t stream, uint64_t head, const HeadGroup& heads) {
    const abi::WriteStream& s = p_.stream[stream];
    const uint64_t* const at = args_ + 1 + 4 * stream;
    KvTileJob job;
    job.head = &dims_[stream];
    job.dtype = source_.dtype;
    job.is_calibrated = (source_.calibrated >> stream & 1) != 0;
    job.mask = found.tokens.mask;
    job.codes = pointer<uint8_t>(at[1] + found.page) + head * s.cache.codes_head_stride +
                found.tile * s.cache.codes_tile_stride;
    job.scales = pointer<uint8_t>(at[2] + found.page) + head * s.cache.scales_head_stride +
                 found.tile * s.cache.scales_tile_stride;
    const auto* const source = pointer<const std::byte>(at[0]) + head * s.source_head_stride;
    // Rows that are read soon: the next head, or behind the last one the next tile of a run.
    const bool is_last = head + 1 == p_.heads;
    const uint64_t next_token = is_last ? abi::kKvTile : 0;
    job.next = is_last ? abi::kKvTile * s.source_token_stride - head * s.source_head_stride
                       : s.source_head_stride;
    const bool is_rotated = source_.rotation != nullptr && stream == 0;
    uint32_t next_mask = is_rotated ? 0 : job.mask;
    for (uint32_t left = job.mask; left != 0; left &= left - 1) {
      const auto slot = static_cast<uint32_t>(std::countr_zero(left));
      const uint64_t token = found.tokens.token[slot];
      job.source[slot] = is_rotated ? source_.rotation->Row(slot, head, heads)
                                    : source + token * s.source_token_stride;
      if (token + next_token >= p_.tokens) next_mask &= ~(1u << slot);
      if (Half* const f16 = targets_.F16Row(at[3], stream, head, token); f16 != nullptr)
        CopyF16(job, slot, s.cache.head_dim, f16);
    }
    job.next_mask = next_mask;
    if (found.is_body) WriteTile(s.cache, job, scratch_);
  }

  // A calibrated row begins with the row in f16.
  static void CopyF16(const KvTileJob& job, uint32_t slot, uint32_t head_dim, Half* f16) {
    const DType dtype = job.is_calibrated ? DType::f16 : job.dtype;
    select_float(static_cast<uint32_t>(dtype), [&](auto source) HWY_ATTR {
      CopyRow(reinterpret_cast<const decltype(source)*>(job.source[slot]), f16, head_dim);
    });
  }

  const abi::WriteParams& p_;
  const uint64_t* args_;
  const WriteSource source_;
  const WriteCut& cut_;
  const WriteTargets targets_;
  KvHead dims_[2];
  KvScratch scratch_;
};

void WriteTask(const void* params, const uint64_t* args, const WriteSource& source, uint32_t task,
               uint32_t tasks) {
  const auto& p = *static_cast<const abi::WriteParams*>(params);
  const WriteCut cut(p);
  Writer(p, args, source, cut).Write(task, tasks);
}

template <class Source, uint32_t kCalibrated>
void Write(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  WriteTask(params, args, {DTypeOf<Source>::value, kCalibrated, nullptr}, task, tasks);
}

void RopeAppendTask(const abi::RopeAppendParams& p, const uint64_t* args, const RopeCode& code,
                    uint32_t task, uint32_t tasks) {
  const RopeAppendCut cut(p, size_bytes(code.out));
  if (p.rope.streams != 0 && (task < cut.q_tasks || tasks == 1)) {
    uint64_t q_args[kRope.info.arg_count] = {};
    std::copy_n(args, kStreamArgs[0][2] + 1, q_args);
    const Share all{0, p.rope.tokens};
    RotateTokens(p.rope, q_args, tasks == 1 ? all : share_of(p.rope.tokens, task, cut.q_tasks),
                 code);
  }
  if (task < cut.q_tasks) return;
  KeyRotation rotation(p.rope, args, code);
  Writer(p.write, args + kWhere, {code.out, 0, &rotation}, cut)
      .Write(task - cut.q_tasks, cut.tasks);
}

template <class T, bool kAdjacent, bool kNorm>
void RopeAppend(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  RopeAppendTask(*static_cast<const abi::RopeAppendParams*>(params), args,
                 SelectRopeCode(DTypeOf<T>::value, kAdjacent, kNorm), task, tasks);
}

TaskFn SelectWrite(uint64_t key) {
  const auto spec = spec_from_key<abi::WriteSpec>(key);
  return select_source(spec.source_dtype, spec.calibrated,
                       [](auto source, auto calibrated) -> TaskFn {
                         return Write<decltype(source), decltype(calibrated)::value>;
                       });
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

HWY_EXPORT(SelectWrite);
HWY_EXPORT(SelectRopeAppend);

TaskFn select_write(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectWrite)(spec); }

uint32_t write_tasks(const void* params, uint64_t /*spec*/) {
  return WriteCut(*static_cast<const abi::WriteParams*>(params)).tasks;
}

TaskFn select_rope_append(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectRopeAppend)(spec); }

uint32_t rope_append_tasks(const void* params, uint64_t spec) {
  const auto& p = *static_cast<const abi::RopeAppendParams*>(params);
  const auto dtype = static_cast<DType>(spec_from_key<abi::RopeAppendSpec>(spec).dtype);
  const RopeAppendCut cut(p, size_bytes(dtype));
  return cut.q_tasks + cut.tasks;
}

}  // namespace gyre::cpu
#endif
