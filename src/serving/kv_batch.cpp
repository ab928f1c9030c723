#include "gyre/kv_batch.h"

#include <algorithm>
#include <utility>

#include "runtime/device_impl.h"
#include "runtime/recorder.h"
#include "runtime/require.h"
#include "serving/batch_state.h"

namespace gyre {
namespace {

constexpr const char* kBegin = "kv_batch.begin_step";
constexpr StepLog::Rules kRules{"kv_batch", "begin_step()",
                                "replay a recording of them and end_step(), or take the step back "
                                "with the batch's rollback()",
                                false};

KvBatchOptions checked(const KvPoolState& pool, KvBatchOptions options) {
  const uint64_t all = pool.options.pages * pool.options.page_tokens;
  constexpr uint64_t kMaxSequences = 1 << 16, kMaxTokens = 1 << 24;
  require(options.max_sequences != 0 && options.max_sequences <= kMaxSequences,
          "kv_batch: max_sequences must be from 1 to 2^16, got ", options.max_sequences);
  require(options.max_tokens != 0 && options.max_tokens <= kMaxTokens,
          "kv_batch: max_tokens must be from 1 to 2^24, got ", options.max_tokens);
  if (options.max_query_length == 0) options.max_query_length = options.max_tokens;
  require(options.max_query_length <= options.max_tokens,
          "kv_batch: max_query_length must be at most ", "max_tokens ", options.max_tokens,
          ", got ", options.max_query_length);
  if (options.max_kv_length == 0) options.max_kv_length = all;
  require(options.max_kv_length <= all, "kv_batch: the pool holds ", all,
          " tokens, max_kv_length is ", options.max_kv_length);
  return options;
}

// Pages of a window fall off between steps: a step loses no key.
std::vector<uint64_t> ring_slots(const KvPoolState& pool) {
  std::vector<uint64_t> slots;
  for (const KvLayer& layer : pool.resolved)
    slots.push_back(shares_kv(layer) ? StepLog::kSharesKv : 0);
  return slots;
}

}  // namespace

KvBatch::State::State(std::shared_ptr<KvPoolState> owner, const KvBatchOptions& wanted)
    : pool(std::move(owner)),
      options(checked(*pool, wanted)),
      log(std::make_shared<StepLog>(kRules, pool->steps, ring_slots(*pool))),
      pages(pool, options.max_sequences, options.max_tokens, options.max_kv_length),
      tables(*pool, {options.max_sequences, options.max_tokens, options.max_kv_length}) {
  members.reserve(options.max_sequences);
  next.reserve(options.max_sequences);
}

KvBatch::State::~State() {
  const StepsUse use(*pool->steps);
  cancel();
}

const void* KvBatch::State::list_of(const char* op, const Encoder& encoder) const {
  require(impl_of(encoder.device()) == impl_of(pool->device), op,
          ": the encoder records for another device than the pool's");
  const void* const list = &recorder_of(encoder);
  pool->steps->require_encoder(op, list);
  return list;
}

void KvBatch::State::check_steps(std::span<const KvStep> steps) {
  require(!steps.empty() && steps.size() <= options.max_sequences, kBegin, ": from 1 to ",
          options.max_sequences, " sequences, got ", steps.size());
  const uint64_t mark = ++pool->marks;
  uint64_t sum = 0;
  for (const KvStep& wanted : steps) {
    KvSequenceState& sequence = wanted.sequence.state(kBegin);
    require(sequence.pool == pool, kBegin, ": a sequence belongs to another pool");
    require(wanted.tokens != 0 && wanted.tokens <= options.max_query_length, kBegin,
            ": from 1 to max_query_length ", options.max_query_length,
            " tokens of a sequence, got ", wanted.tokens);
    require(sequence.length <= options.max_kv_length &&
                wanted.tokens <= options.max_kv_length - sequence.length,
            kBegin, ": a sequence of ", sequence.length, " tokens and ", wanted.tokens,
            " more can never fit into this batch: its max_kv_length is ", options.max_kv_length);
    if (sequence.step != nullptr)
      sequence.step->require_complete(kBegin, "a sequence is in another batch's step: ");
    sequence.require_written(kBegin);
    require(sequence.listed != mark, kBegin, ": a sequence is there twice");
    sequence.listed = mark;
    sequence.check_shorter(kBegin, sequence.length);
    sum += wanted.tokens;
  }
  require(sum <= options.max_tokens, kBegin, ": at most max_tokens ", options.max_tokens,
          " tokens in a step, got ", sum);
}

void KvBatch::State::begin_step(Encoder& encoder, std::span<const KvStep> steps) try {
  const StepsUse use(*pool->steps, kBegin);
  list_of(kBegin, encoder);
  require(!log->recording(), kBegin, ": a recording is open, end_step() it");
  log->require_complete(kBegin);
  check_steps(steps);
  next.clear();
  const uint64_t page_tokens = pool->options.page_tokens;
  for (const KvStep& s : steps) {
    const uint64_t start = s.sequence.state_->length, page = start / page_tokens;
    const uint64_t place = start - page * page_tokens;
    next.push_back({s.sequence.state_, start, s.tokens, s.is_prefill, page, place,
                    page + (place + s.tokens + page_tokens - 1) / page_tokens,
                    s.sequence.state_->unwritten});
  }
  try {
    pages.check(kBegin, next);
  } catch (...) {
    next.clear();
    throw;
  }
  members.swap(next);
  if (log->take_dropped_begin()) tables.forget();
  RecordingGroup recorded(encoder);
  try {
    pages.take(members);
    tables.send(encoder, members, pages.copies());
    record_copies(encoder);
    note_begin(encoder);
  } catch (...) {
    log->cancel();
    take_back();
    throw;
  }
  recorded.commit();
  pages.recorded();
  // The step's lengths are others: so is its schedule.
  for (ListedSchedule& schedule : schedules) schedule.command = ListedSchedule::kNone;
} catch (const std::bad_alloc&) {
  out_of_memory("kv_batch.begin_step");
}

void KvBatch::State::record_copies(Encoder& encoder) const {
  if (pages.copies().empty()) return;
  for (size_t i = 0; i < pool->groups.size(); ++i) {
    const auto count = static_cast<uint64_t>(std::ranges::count_if(
        pages.copies(), [&](const PageCopy& copy) { return copy.group == i; }));
    if (count == 0) continue;
    const BatchTables::Group& group = tables.group(i);
    const Tensor from = group.copy_from.slice(0, 0, count), to = group.copy_to.slice(0, 0, count);
    pool->for_stores(i, [&](const KvPoolState::Store& store, uint64_t) {
      kv_page_copy(encoder, {store.pages, from, to});
    });
  }
}

void KvBatch::State::note_begin(Encoder& encoder) {
  tokens = 0;
  for (const StepPages::Member& member : members) tokens += member.tokens;
  const CommandNote begin = log->begin_note({.tokens = tokens});
  for (const StepPages::Member& member : members) {
    member.sequence->unwritten.begin(*pool->steps, StepLog::step_of(begin), member.start);
    member.sequence->step = log.get();
  }
  pages.note_copies();
  note(encoder, kBegin, begin);
}

void KvBatch::State::note(const Encoder& encoder, const char* op, const CommandNote& made) const {
  Recording recording(encoder, op);
  recording.note({log, made});
  recording.commit();
  log->recorded(made, &recorder_of(encoder));
}

void KvBatch::State::finish() {
  pages.commit();
  for (const StepPages::Member& member : members) member.sequence->step = nullptr;
  members.clear();
}

void KvBatch::State::take_back() {
  pages.undo(members);
  tables.forget();
  tokens = 0;
  finish();
}

void KvBatch::State::cancel() {
  const bool lacks_layers = log->open() && !log->complete();
  log->cancel();
  if (lacks_layers) take_back();
}

void KvBatch::State::check_rows(const char* op, const char* what, const Tensor& rows) const {
  require(rows.defined(), op, ": ", what, " is undefined");
  require(rows.rank() == 3, op, ": ", what, " must have rank 3, got ", rows.shape());
  // A recording is for steps of any number of tokens.
  const uint64_t fewest = log->recording() ? 1 : tokens;
  require(rows.shape(0) >= fewest && rows.shape(0) <= options.max_tokens, op, ": ", what,
          " must have ", fewest, " (", log->recording() ? "in a recording" : "the step's tokens",
          ") to ", options.max_tokens, " (max_tokens) rows, got ", rows.shape());
}

KvBatch::KvBatch(const KvPool& pool, const KvBatchOptions& options) try
    : state_(std::make_unique<State>((pool.state(), pool.state_), options)) {
} catch (const std::bad_alloc&) {
  out_of_memory("kv_batch");
}
KvBatch::KvBatch(KvBatch&&) noexcept = default;
KvBatch& KvBatch::operator=(KvBatch&&) noexcept = default;
KvBatch::~KvBatch() = default;

KvBatch::State& KvBatch::state() const {
  require(state_ != nullptr, "kv_batch: used after it was moved from");
  return *state_;
}

const KvBatchOptions& KvBatch::options() const { return state().options; }
uint64_t KvBatch::tokens() const { return state().tokens; }

void KvBatch::begin_step(Encoder& encoder, std::span<const KvStep> steps) {
  state().begin_step(encoder, steps);
}

void KvBatch::begin_step(Encoder& encoder, std::initializer_list<KvStep> steps) {
  state().begin_step(encoder, {steps.begin(), steps.size()});
}

Tensor KvBatch::positions(uint64_t rows) const {
  const State& s = state();
  if (rows == 0) rows = s.log->recording() ? s.options.max_tokens : s.tokens;
  require(rows != 0, "kv_batch.positions: begin_step() comes first, or record() for a graph");
  require(rows <= s.options.max_tokens, "kv_batch.positions: at most max_tokens ",
          s.options.max_tokens, ", got ", rows);
  return s.tables.positions().slice(0, 0, rows);
}

void KvBatch::record() {
  State& s = state();
  const StepsUse use(*s.pool->steps, "kv_batch.record");
  s.log->record("kv_batch.record");
  s.tokens = 0;
}

void KvBatch::end_step(KvStepEnd how) {
  constexpr const char* kOp = "kv_batch.end_step";
  State& s = state();
  const StepsUse use(*s.pool->steps, kOp);
  if (how == KvStepEnd::captured) {
    require(s.log->open() && !s.log->complete(), kOp,
            ": no step waits for a captured graph; begin_step() comes first");
    s.log->mark_captured(kOp);
  }
  s.log->end(kOp);
  s.finish();
  s.tokens = 0;
}

void KvBatch::rollback() {
  const StepLog& log = *state().log;
  const StepsUse use(*state().pool->steps, "kv_batch.rollback");
  require(log.recording() || (log.open() && !log.complete()), "kv_batch.rollback: ",
          log.open() ? "the step is complete; rollback() its sequences" : "no step was begun");
  state().cancel();
}

}  // namespace gyre
