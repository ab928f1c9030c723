#pragma once
// Which kernel attends, and in how many pieces: by the shape and the device's own numbers alone, so
// that results do not depend on what else happens.
#include <optional>

#include "abi/attention.h"
#include "gyre/attention.h"
#include "runtime/recorder.h"

namespace gyre {

using DecodeSpec = std::optional<abi::AttentionDecodeSpec>;

// A command, and how many splits of the keys it has.
struct Way {
  DecodeSpec decode;                        // none: the kernel for any shape
  uint32_t partial = abi::kAttentionWhole;  // or another of those
  uint64_t splits = 1;
};

constexpr uint64_t ceil_div(uint64_t a, uint64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// Of the kernel for any shape. Enough pieces for all compute units, none so small that merging
// shows.
uint64_t choose_splits(const DeviceInfo& device, const AttentionPartialInputs& in, uint64_t keys);

// Few rows over many keys, on a device with a kernel for that. Where values may be NaN, rows must
// see the same keys: one that is hidden from some rows would show in them.
DecodeSpec decode_for(const Recording& recording, const AttentionPartialInputs& in);

// One block for each multiprocessor; where heads alone are more than half of that, the number of
// splits that leaves the fewest idle in the last round, if that is a tenth better.
uint64_t decode_splits(const DeviceInfo& device, const AttentionPartialInputs& in,
                       const abi::AttentionDecodeSpec& decode, uint64_t keys);

// One command that gives the output.
Way decode_way(const Recording& recording, const AttentionPartialInputs& in,
               const abi::AttentionDecodeSpec& decode, uint64_t keys);

}  // namespace gyre
