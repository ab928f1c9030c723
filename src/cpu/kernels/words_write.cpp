// words_write on the CPU: a few KiB at most, one task.
#include "abi/words_write.h"

#include "cpu/kernels.h"

namespace gyre::cpu {
namespace {

void run_words_write(const void* params, const uint64_t* args, uint32_t /*task*/,
                     uint32_t /*tasks*/) noexcept {
  const auto& p = *static_cast<const abi::WordsWriteParams*>(params);
  auto* const to = pointer<uint32_t>(args[0]);
  for (uint32_t run = 0; run < p.runs; ++run) {
    const uint32_t begin = p.buffer[2 * run + 1];
    const uint32_t end = run + 1 < p.runs ? p.buffer[2 * run + 3] : p.words;
    uint32_t* const at = to + p.buffer[2 * run];
    for (uint32_t i = begin; i < end; ++i) at[i - begin] = p.buffer[abi::kWordsWriteMost - 1 - i];
  }
}

}  // namespace

TaskFn select_words_write(uint64_t /*spec*/) { return run_words_write; }
uint32_t words_write_tasks(const void* /*params*/, uint64_t /*spec*/) { return 1; }

}  // namespace gyre::cpu
