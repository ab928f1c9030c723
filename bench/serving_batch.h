#pragma once
// A batch of sequences in pages, filled with noise, and a decode step over it.

#include <memory>

#include "gyre/attention.h"
#include "gyre/encoder.h"
#include "gyre/write.h"
#include "serving_runs.h"

namespace gyre::bench {

struct ServingBatch {
  ServingShape shape;
  PagedAttentionInputs inputs;
  PagedAttentionOptions options;
  KvWriteInputs newest;  // where the newest tokens of every sequence lie
  std::shared_ptr<Tensor> scratch = std::make_shared<Tensor>();  // kept from step to step
  uint64_t bytes = 0;  // that a step reads: K and V of every key of every sequence

  void record(Encoder& encoder) const;
  // Writes the newest tokens again, with the last step's outputs: it waits for them, as a layer
  // does for the one before.
  void record_write(Encoder& encoder) const;
};

ServingBatch make_serving_batch(const Device& device, const ServingShape& shape,
                                const FormatPair& formats);

}  // namespace gyre::bench
