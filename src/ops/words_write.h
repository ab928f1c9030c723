#pragma once
// Small changes to a tensor, recorded with their values: several steps may be in flight, and none
// waits for the host. Holds for one moment, so graphs refuse it.

#include <cstdint>
#include <span>

#include "gyre/encoder.h"
#include "gyre/tensor.h"

namespace gyre {

struct WordRun {
  uint64_t at = 0;  // in words of 32 bits, as `words` and the tensor count them
  uint64_t count = 0;
};

// Writes words[at, at + count) of each run to the same place of `to`, contiguous and of 32-bit
// words or bytes in fours. As many commands as it takes, or none.
void words_write(Encoder& encoder, std::span<const int32_t> words, std::span<const WordRun> runs,
                 const Tensor& to);

}  // namespace gyre
