// Kernels of the CPU that move bytes or write a few words: kv_extend, words_write, bytes_copy and
// kv_page_copy.
#include <algorithm>
#include <cstring>

#include "cpu/kernels.h"

namespace gyre::cpu {
namespace {

constexpr uint64_t kBytesPerTask = 1 << 20;

void extend(const void* params, const uint64_t* args, uint32_t /*task*/,
            uint32_t /*tasks*/) noexcept {
  const auto& p = *static_cast<const abi::KvExtendParams*>(params);
  *pointer<abi::KvState>(args[0]) = p.state;
  auto* const positions = pointer<int32_t>(args[1]);
  for (uint64_t i = 0; i < p.positions; ++i) positions[i] = static_cast<int32_t>(p.state.start + i);
}

// A few KiB at most, one task.
void write_words(const void* params, const uint64_t* args, uint32_t /*task*/,
                 uint32_t /*tasks*/) noexcept {
  const auto& p = *static_cast<const abi::WordsWriteParams*>(params);
  auto* const to = pointer<uint32_t>(args[0]);
  for (uint32_t run = 0; run < p.runs; ++run) {
    const uint32_t begin = p.buffer[2 * run + 1];
    const uint32_t end = run + 1 < p.runs ? p.buffer[2 * run + 3] : p.words;
    uint32_t* const at = to + p.buffer[2 * run];
    for (uint32_t i = begin; i < end; ++i) at[i - begin] = p.buffer[abi::kMaxWordsWrite - 1 - i];
  }
}

// Calls copy(row, first, count) for each row of `bytes` bytes that the task has a part of.
template <class Copy>
void copy_rows(uint64_t rows, uint64_t bytes, uint32_t task, uint32_t tasks, const Copy& copy) {
  const Share share = share_of(rows * bytes, task, tasks);
  for (uint64_t at = share.begin; at < share.end;) {
    const uint64_t row = at / bytes, first = at % bytes;
    const uint64_t count = std::min(bytes - first, share.end - at);
    copy(row, first, count);
    at += count;
  }
}

void copy_bytes(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::BytesCopyParams*>(params);
  copy_rows(p.rows, p.bytes, task, tasks, [&](uint64_t row, uint64_t first, uint64_t count) {
    std::memcpy(pointer<std::byte>(args[1]) + row * p.to_stride + first,
                pointer<const std::byte>(args[0]) + row * p.from_stride + first, count);
  });
}

void copy_pages(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const abi::KvPageCopyParams*>(params);
  auto* const pages = pointer<std::byte>(args[0]);
  const auto is_page = [&](int32_t page) {
    return page >= 0 && static_cast<uint64_t>(page) < p.pages;
  };
  copy_rows(p.count, p.page_bytes, task, tasks, [&](uint64_t pair, uint64_t first, uint64_t count) {
    const int32_t from = pointer<const int32_t>(args[1])[pair];
    const int32_t to = pointer<const int32_t>(args[2])[pair];
    if (!is_page(from) || !is_page(to) || from == to) return;
    std::memcpy(pages + static_cast<uint64_t>(to) * p.page_stride + first,
                pages + static_cast<uint64_t>(from) * p.page_stride + first, count);
  });
}

}  // namespace

TaskFn select_kv_extend(uint64_t /*spec*/) { return extend; }
TaskFn select_words_write(uint64_t /*spec*/) { return write_words; }
uint32_t one_task(const void* /*params*/, uint64_t /*spec*/) { return 1; }

TaskFn select_bytes_copy(uint64_t /*spec*/) { return copy_bytes; }
uint32_t bytes_copy_tasks(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::BytesCopyParams*>(params);
  const uint64_t bytes = p.rows * p.bytes;
  return task_count(bytes / kBytesPerTask, bytes);
}

TaskFn select_kv_page_copy(uint64_t /*spec*/) { return copy_pages; }
uint32_t kv_page_copy_tasks(const void* params, uint64_t /*spec*/) {
  const auto& p = *static_cast<const abi::KvPageCopyParams*>(params);
  const uint64_t bytes = p.count * p.page_bytes;
  return task_count(bytes / kBytesPerTask, bytes);
}

}  // namespace gyre::cpu
