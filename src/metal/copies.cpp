// Grids of the kernels that move bytes.
#include <algorithm>

#include "metal/kernels.h"

namespace gyre::metal {
namespace {

constexpr uint32_t kThreads = 256;
// Groups go on through their rows: more than a large GPU runs at once gains nothing.
constexpr uint64_t kMaxGroups = 4096;

uint32_t loop_groups(uint64_t items, uint64_t each) {
  return static_cast<uint32_t>(std::clamp<uint64_t>((items + each - 1) / each, 1, kMaxGroups));
}

}  // namespace

Launch launch_kv_copy(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::KvCopyParams*>(params);
  if (p.tokens == 0 || p.heads == 0) return {{0, 0, 0}, kThreads, 0};
  uint64_t row = p.stream[0].row_elements;
  if (p.streams == 2) row = std::max(row, p.stream[1].row_elements);
  const uint64_t rows = std::max<uint64_t>(1, kThreads / std::max<uint64_t>(1, row));
  return {{loop_groups(p.tokens, rows), static_cast<uint32_t>(std::min(p.heads, kMaxGroups)),
           static_cast<uint32_t>(p.streams)},
          kThreads,
          0};
}

Launch launch_kv_extend(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::KvExtendParams*>(params);
  const uint64_t count = std::max<uint64_t>((p.positions + kThreads - 1) / kThreads, 1);
  return {{static_cast<uint32_t>(count), 1, 1}, kThreads, 0};
}

Launch launch_bytes_copy(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::BytesCopyParams*>(params);
  return {{loop_groups(p.bytes, 16 * kThreads), static_cast<uint32_t>(p.rows), 1}, kThreads, 0};
}

Launch launch_words_write(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::WordsWriteParams*>(params);
  return {{loop_groups(p.words, kThreads), 1, 1}, kThreads, 0};
}

Launch launch_kv_page_copy(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::KvPageCopyParams*>(params);
  return {{loop_groups(p.page_bytes, 64 * kThreads),
           static_cast<uint32_t>(std::min(p.count, kMaxGroups)), 1},
          kThreads,
          0};
}

}  // namespace gyre::metal
