#pragma once
// words_write: 32-bit words that the command itself carries go to runs of a tensor. What a step
// changes travels this way: nothing is staged that a later step could overwrite.
#include "abi/types.h"

namespace gyre::abi {

struct WordsWriteSpec {
  uint8_t unused[8];
};

// With the arguments' addresses less than the 4 KiB that a CUDA kernel takes by value.
GYRE_CONSTANT uint32_t kMaxWordsWrite = 980;

// Pairs {first word in the tensor, first word of data} of the runs lie in front, data from the back
// on: word i of the data is buffer[kMaxWordsWrite - 1 - i].
struct WordsWriteParams {
  uint32_t runs;
  uint32_t words;
  uint32_t buffer[kMaxWordsWrite];
};

// Where word i of the data goes; its run is the last that begins at i or before.
constexpr uint32_t words_write_place(const GYRE_PARAMS WordsWriteParams& p, uint32_t i) {
  uint32_t low = 0, high = p.runs;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (p.buffer[2 * middle + 1] <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const GYRE_PARAMS uint32_t* const run = p.buffer + 2 * uint64_t{low};
  return run[0] + (i - run[1]);
}

}  // namespace gyre::abi
