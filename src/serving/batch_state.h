#pragma once

#include <memory>
#include <vector>

#include "gyre/kv_batch.h"
#include "ops/cache_ops.h"
#include "serving/batch_tables.h"
#include "serving/step_pages.h"
#include "serving/step_state.h"

namespace gyre {

struct PagedCall;  // ops/paged_attention.h

class KvBatch::State {
 public:
  State(std::shared_ptr<KvPool::State> owner, const KvBatchOptions& wanted);
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() { cancel(); }

  void begin(Encoder& encoder, std::span<const KvStep> steps);
  void finish();  // the step is complete: its sequences are free for other calls
  void cancel();
  // Rows that a tensor of the step may have.
  void check_rows(const char* op, const char* what, const Tensor& rows) const;
  const KvPool::State::Layer& layer(uint64_t index) const { return pool->layers[index]; }
  void attend(Encoder& encoder, uint64_t index, const AttendInputs& in, const AttendOptions& with);

  std::shared_ptr<KvPool::State> pool;
  KvBatchOptions options;
  StepState step;
  StepPages pages;
  BatchTables tables;
  std::vector<StepPages::Member> members, next;  // of an open step; of one that is checked
  uint64_t tokens = 0;
  AttendScratch scratch;

 private:
  void check_steps(std::span<const KvStep> steps);
  void record_copies(Encoder& encoder) const;
  PagedCall call_of(const AttendInputs& in, const AttendOptions& with, const KvLayer& layer) const;
  PagedCall over(PagedCall call, const KvPool::State::Store& store, abi::KvSegment segment) const;
};

}  // namespace gyre
