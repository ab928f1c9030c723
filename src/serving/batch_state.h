#pragma once

#include <memory>
#include <vector>

#include "gyre/kv_batch.h"
#include "ops/cache_ops.h"
#include "runtime/recorder.h"
#include "serving/batch_tables.h"
#include "serving/step_pages.h"
#include "steps/log.h"

namespace gyre {

struct PagedCall;  // ops/paged_attention.h

class KvBatch::State {
 public:
  State(std::shared_ptr<KvPoolState> owner, const KvBatchOptions& wanted);
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();

  void begin_step(Encoder& encoder, std::span<const KvStep> steps);
  void finish();  // the step is complete: its sequences are free for other calls
  void cancel();
  const void* list_of(const char* op, const Encoder& encoder) const;  // refuses a second encoder
  // Leaves a note beside what was just recorded, and tells the log.
  void note(const Encoder& encoder, const char* op, const CommandNote& made) const;
  // Rows that a tensor of the step may have.
  void check_rows(const char* op, const char* what, const Tensor& rows) const;
  // Calls write(where, first) for every kind of pages that a layer has.
  template <class Write>
  void append(const char* op, Encoder& encoder, uint64_t index, const Tensor& k,
              const Write& write) {
    const StepsUse use(*pool->steps, op);
    log->check_append(op, index);
    require_own_kv(op, pool->resolved, index);
    list_of(op, encoder);
    check_rows(op, "k", k);
    const KvPoolState::Layer& l = pool->layers[index];
    RecordingGroup recorded(encoder);
    const auto to = [&](const KvPoolState::Store& store, bool first) {
      write(KvSlots{store.pages, tables.group(store.group).slots.slice(0, 0, k.shape(0)),
                    l.calibration.k, l.calibration.v},
            first);
    };
    to(*l.body, true);
    if (l.tail) to(*l.tail, false);
    if (l.sink_tokens) to(*l.sink_tokens, false);
    note(encoder, op, log->append_note(index, k.shape(0)));
    recorded.commit();
    if (log->complete()) finish();
  }
  void attend(Encoder& encoder, uint64_t index, const AttendInputs& in, const AttendOptions& with);
  void attend(Encoder& encoder, uint64_t index, const AttendInputs& in, const AttendOptions& with,
              AttendScratch& memory);

  std::shared_ptr<KvPoolState> pool;
  KvBatchOptions options;
  std::shared_ptr<StepLog> log;
  StepPages pages;
  BatchTables tables;
  std::vector<StepPages::Member> members, next;  // of an open step; of one that is checked
  uint64_t tokens = 0;
  AttendScratch scratch;
  std::vector<ListedSchedule> schedules;  // that the step's layers share

 private:
  void check_steps(std::span<const KvStep> steps);
  void record_copies(Encoder& encoder) const;
  void note_begin(Encoder& encoder);
  void take_back();  // what the step has changed on the host
  PagedCall call_of(const AttendInputs& in, const AttendOptions& with, const KvLayer& layer) const;
  PagedCall over(PagedCall call, const KvPoolState::Store& store, abi::KvSegment segment) const;
};

}  // namespace gyre
