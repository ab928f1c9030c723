#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>

#include "gyre/encoder.h"
#include "gyre/export.h"
#include "gyre/kv_cache.h"
#include "gyre/kv_pool.h"
#include "gyre/rope_append.h"
#include "gyre/tensor.h"

namespace gyre {

// Upper bounds of a step; what is recorded once serves every step within them.
struct KvBatchOptions {
  uint64_t max_sequences = 64;
  uint64_t max_tokens = 512;      // of all sequences together
  uint64_t max_query_length = 0;  // tokens of one sequence; 0: max_tokens
  uint64_t max_kv_length = 0;     // of one sequence, the step included; 0: all that the pool holds
};

// What one sequence does in a step.
struct KvStep {
  KvSequence& sequence;
  uint64_t tokens = 1;
  // Computed as prompts are, however few tokens: then the bits do not depend on how the prompt is
  // cut into steps. Mark every step of a prompt.
  bool is_prefill = false;
};

// What one forward pass works on: tokens of several sequences, in rows one after the other. Tables,
// lengths and positions are in device memory, so append() and attend() recorded once as a graph can
// be replayed for every step:
//
//   batch.begin_step(encoder, {{a, 1}, {b, 5}});                 // pages, positions, slots
//   batch.rope_append(encoder, layer, {.q = q, .q_out = q, .k = k, .v = v});   // or append()
//   batch.attend(encoder, layer, {.q = q, .out = out});
//
// Every layer with a cache of its own must get the step by append() before the next begins. A
// refused call changes nothing.
// A second encoder is refused while another has unsubmitted calls on the pool, of any batch.
class GYRE_API KvBatch {
 public:
  explicit KvBatch(const KvPool& pool, const KvBatchOptions& options = {});
  KvBatch(KvBatch&&) noexcept;
  KvBatch& operator=(KvBatch&&) noexcept;
  ~KvBatch();  // cancels a step that is not complete

  const KvBatchOptions& options() const;

  // The next tokens of these sequences begin, in this order. Takes the pages they need, all or
  // none: a full pool refuses with how many are missing. Copies shared pages that will be written.
  // Recorded into `encoder`, but not into a graph; submit it before anything of the step.
  void begin_step(Encoder& encoder, std::span<const KvStep> steps);
  void begin_step(Encoder& encoder, std::initializer_list<KvStep> steps);
  uint64_t tokens() const;  // rows of the step

  // Positions of the step's tokens: i32 [rows], in device memory, for rope. 0: tokens(), and
  // max_tokens in a recording.
  Tensor positions(uint64_t rows = 0) const;
  // k and v: [rows, kv_heads, head_dim] as the pool's layers() has them, at least the step's
  // tokens; rows beyond them are skipped.
  void append(Encoder& encoder, uint64_t layer, const Tensor& k, const Tensor& v);
  // rope (or norm_rope) of q and k, then append: see rope_append(). One command for each kind of
  // pages that the layer has. Positions are those of the step, unless they are given.
  void rope_append(Encoder& encoder, uint64_t layer, const RopeAppendInputs& inputs,
                   const RopeAppendOptions& options = {});
  // q and out: [rows, heads, head_dim], at least the step's tokens; rows beyond them hold
  // anything. Masks and options as in attention() with pages; no tree.
  void attend(Encoder& encoder, uint64_t layer, const AttendInputs& inputs,
              const AttendOptions& with = {}) const;

  // For graphs. Between record() and end_step(), append() and attend() record a step without one
  // being begun. Later steps are begin_step(), the graph's replay, end_step().
  void record();
  // The step, or the recording, is complete: every layer has its tokens.
  void end_step(KvStepEnd how = KvStepEnd::checked);
  // Takes back the step that was begun: its sequences have the tokens they had before. Drop what
  // was recorded of it, or let it run. Keys that left a window for the step stay gone, so fewer
  // tokens can be rolled back afterwards.
  void rollback();

 private:
  class GYRE_LOCAL State;
  State& state() const;

  std::unique_ptr<State> state_;
};

}  // namespace gyre
