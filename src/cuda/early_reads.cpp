#include "cuda/early_reads.h"

#include "runtime/command_list.h"

namespace gyre::cuda {
namespace {

// Clears the bits of arguments that overlap `bytes` bytes at `address`.
void clear_overlaps(const CommandList& list, const Command& reader, uint64_t address,
                    uint64_t bytes, uint32_t& bits) {
  if (bytes == 0) return;
  const uint64_t* const at = list.args_of(reader);
  const uint64_t* const size = list.arg_bytes_of(reader);
  for (uint32_t i = 0; i < reader.pipeline->kernel->arg_count; ++i) {
    if (at[i] < address + bytes && address < at[i] + size[i]) bits &= ~(1u << i);
  }
}

}  // namespace

EarlyReads early_reads(const CommandList& list, const PdlStart& start) {
  if (start.beside_others) return {.unwritten = 0, .old = 0};  // others may write anything
  EarlyReads early;
  const Command& reader = list.commands[start.command];
  for (size_t c = start.first_running; c < start.command; ++c) {
    const Command& writer = list.commands[c];
    const KernelInfo& kernel = *writer.pipeline->kernel;
    for (uint32_t i = 0; i < kernel.arg_count; ++i) {
      if (kernel.args[i].access == Access::read) continue;
      const uint64_t address = list.args_of(writer)[i], bytes = list.arg_bytes_of(writer)[i];
      clear_overlaps(list, reader, address, bytes, early.unwritten);
      if (!kernel.args[i].appended) clear_overlaps(list, reader, address, bytes, early.old);
    }
  }
  return early;
}

}  // namespace gyre::cuda
