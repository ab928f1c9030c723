#include "cuda/early_reads.h"

namespace gyre::cuda {

EarlyReads RunningWrites::early_reads(const CommandList& list, const Command& reader) const {
  if (!is_known_) return {.unwritten = 0, .old = 0};
  EarlyReads early;
  const uint64_t* const at = list.args_of(reader);
  const uint64_t* const size = list.arg_bytes_of(reader);
  for (const Write& write : writes_) {
    for (uint32_t i = 0; i < reader.pipeline->kernel->arg_count; ++i) {
      if (at[i] >= write.address + write.bytes || write.address >= at[i] + size[i]) continue;
      early.unwritten &= ~(1u << i);
      if (!write.appended) early.old &= ~(1u << i);
    }
  }
  return early;
}

RunningWrites RunningWrites::after(const CommandList& list, const Command& command,
                                   bool launches_first) const {
  RunningWrites next;
  if (launches_first) next = *this;
  const KernelInfo& kernel = *command.pipeline->kernel;
  for (uint32_t i = 0; i < kernel.arg_count; ++i) {
    const uint64_t address = list.args_of(command)[i], bytes = list.arg_bytes_of(command)[i];
    if (kernel.args[i].access == Access::read || bytes == 0) continue;
    // Tokens that an older command appends are old ones behind this one's.
    for (Write& older : next.writes_) {
      if (address < older.address + older.bytes && older.address < address + bytes)
        older.appended = false;
    }
    next.writes_.push_back({address, bytes, kernel.args[i].appended});
  }
  return next;
}

}  // namespace gyre::cuda
