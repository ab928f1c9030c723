// words_write: see abi/words_write.h. A thread a word.
#include "abi/words_write.h"
#include "metal/kernels/kernel.h"

kernel void words_write(constant gyre::abi::WordsWriteParams& p [[buffer(0)]],
                        device uchar* to [[buffer(1)]], GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const uint i = group.x * threads.x + index;
  if (i >= p.words) return;
  pointer<uint>(to)[gyre::abi::words_write_place(p, i)] =
      p.buffer[gyre::abi::kMaxWordsWrite - 1 - i];
}
