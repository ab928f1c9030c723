// kv_extend, kv_append and bytes_copy on the CPU. kv_append's work tiles are the tiles of the body
// that keys enter, for every head of K and V, and then pieces of the rows for sink tokens and tail.
// The cache's state says which keys those are.
#include "abi/kv_append.h"

#include <algorithm>
#include <cstring>

#include "abi/bytes_copy.h"
#include "abi/kv_codec.h"
#include "abi/kv_extend.h"
#include "cpu/kernels.h"
#include "cpu/kernels/select.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/kv_append.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/kv_append-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

template <class Source, uint32_t kCalibrated>
void AppendTile(const Append& a, uint64_t stream, uint64_t head, uint64_t index, const KvHead& dims,
                KvScratch& scratch) {
  const uint64_t tile = a.run.tile(index);
  const TileTokens tokens = a.tokens_of(tile);
  KvTileJob job = a.job_of(stream, head, tile);
  job.head = &dims;
  job.mask = tokens.mask;
  const std::byte* const source = a.places(stream, head).source;
  for (uint32_t slot = 0; slot < abi::kKvTile; ++slot)
    job.source[slot] = source + tokens.token[slot] * a.p.stream[stream].source_token_stride;
  WriteTile<Source, kCalibrated>(a.p.stream[stream].body, job, scratch);
}

// Rows of sink tokens and tail, in f16: about the work of a tile of the body.
constexpr uint64_t kNearTokens = 64;
template <class Source, uint32_t kCalibrated>
void AppendNear(const Append& a, uint64_t stream, uint64_t head, uint64_t piece) {
  const abi::KvAppendStream& s = a.p.stream[stream];
  const std::byte* const source = a.places(stream, head).source;
  const uint64_t begin = piece * kNearTokens;
  for (uint64_t t = begin; t < std::min(begin + kNearTokens, a.keys.end - a.keys.begin); ++t) {
    Half* const to = a.near_row(stream, head, t);
    if (to == nullptr) return;
    const std::byte* const row = source + t * s.source_token_stride;
    if ((kCalibrated >> stream & 1) != 0) {  // begins with the row in f16
      CopyRow(reinterpret_cast<const Half*>(row), to, s.body.head_dim);
    } else {
      CopyRow(reinterpret_cast<const Source*>(row), to, s.body.head_dim);
    }
  }
}

template <class Source, uint32_t kCalibrated>
void KvAppend(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::KvAppendParams*>(params);
  const Append a(p, args);
  const KvHead dims[2] = {MakeHead(p.stream[0].body), MakeHead(p.stream[1].body)};
  KvScratch scratch;
  scratch.facts.Clear(std::max(dims[0].scales.count, dims[1].scales.count));
  const uint64_t tiles = a.run.tiles, body_tiles = 2 * p.heads * tiles;
  const uint64_t pieces =
      a.has_near() ? (a.keys.end - a.keys.begin + kNearTokens - 1) / kNearTokens : 0;
  const Share share = share_of(body_tiles + 2 * p.heads * pieces, task, tasks);
  for (uint64_t at = share.begin; at < share.end; ++at) {
    const uint64_t index = at < body_tiles ? at : at - body_tiles;
    const uint64_t head = index % p.heads;
    if (at < body_tiles) {
      const uint64_t stream = index / p.heads / tiles;
      AppendTile<Source, kCalibrated>(a, stream, head, index / p.heads % tiles, dims[stream],
                                      scratch);
    } else {
      AppendNear<Source, kCalibrated>(a, index / p.heads / pieces, head, index / p.heads % pieces);
    }
  }
}

TaskFn SelectKvAppend(uint64_t key) {
  const auto spec = spec_from_key<abi::KvAppendSpec>(key);
  return select_source(spec.source_dtype, spec.calibrated,
                       [](auto source, auto calibrated) -> TaskFn {
                         return KvAppend<decltype(source), decltype(calibrated)::value>;
                       });
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectKvAppend);

namespace {

void extend(const void* params, const uint64_t* args, uint32_t /*task*/,
            uint32_t /*tasks*/) noexcept {
  const auto& p = *static_cast<const abi::KvExtendParams*>(params);
  *pointer<abi::KvState>(args[0]) = p.state;
  auto* const positions = pointer<int32_t>(args[1]);
  for (uint64_t i = 0; i < p.positions; ++i) positions[i] = static_cast<int32_t>(p.state.start + i);
}

void copy_share(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::BytesCopyParams*>(params);
  const Share share = share_of(p.rows * p.bytes, task, tasks);
  for (uint64_t at = share.begin; at < share.end;) {
    const uint64_t row = at / p.bytes, first = at % p.bytes;
    const uint64_t count = std::min(p.bytes - first, share.end - at);
    std::memcpy(pointer<std::byte>(args[1]) + row * p.to_stride + first,
                pointer<const std::byte>(args[0]) + row * p.from_stride + first, count);
    at += count;
  }
}

}  // namespace

TaskFn select_kv_extend(uint64_t /*spec*/) { return extend; }
uint32_t kv_extend_tasks(const void* /*params*/, uint64_t /*spec*/) { return 1; }

TaskFn select_kv_append(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectKvAppend)(spec); }

uint32_t kv_append_tasks(const void* params, uint64_t /*spec*/) {
  constexpr uint64_t kCoordinatesPerTask = 8 << 10;  // some microseconds
  const auto& p = *static_cast<const abi::KvAppendParams*>(params);
  const uint64_t rows = 2 * p.heads * p.tokens;
  return task_count(rows * p.stream[0].body.head_dim / kCoordinatesPerTask, rows);
}

TaskFn select_bytes_copy(uint64_t /*spec*/) { return copy_share; }
uint32_t bytes_copy_tasks(const void* params, uint64_t /*spec*/) {
  constexpr uint64_t kBytesPerTask = 1 << 20;
  const auto& p = *static_cast<const abi::BytesCopyParams*>(params);
  const uint64_t bytes = p.rows * p.bytes;
  return task_count(bytes / kBytesPerTask, bytes);
}

}  // namespace gyre::cpu
#endif
