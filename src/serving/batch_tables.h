#pragma once
// What kernels are told of a step, in device memory: one block of words for all of it. The host
// keeps a copy and sends what differs.

#include <cstdint>
#include <span>
#include <vector>

#include "gyre/encoder.h"
#include "gyre/tensor.h"
#include "ops/words_write.h"
#include "serving/pool_state.h"
#include "serving/step_pages.h"

namespace gyre {

struct BatchBounds {
  uint64_t sequences = 0;
  uint64_t tokens = 0;
  uint64_t length = 0;  // of a sequence
};

class BatchTables {
 public:
  // Tables of one group of layers.
  struct Group {
    Tensor table;               // i32 [sequences, width]
    Tensor slots;               // i32 [tokens], -1: none
    Tensor tail_begin;          // i32 [sequences], of a tail
    Tensor copy_from, copy_to;  // i32 [sequences]
  };

  BatchTables(const KvPoolState& pool, const BatchBounds& bounds);

  const Tensor& cu_seqlens_q() const { return cu_seqlens_q_; }  // i32 [sequences + 1]
  const Tensor& kv_lengths() const { return kv_lengths_; }      // i32 [sequences]
  const Tensor& positions() const { return positions_; }        // i32 [tokens]
  const Tensor& is_prefill() const { return is_prefill_; }      // u8 [sequences]
  const Group& group(size_t index) const { return groups_[index]; }

  // Puts a step into the host's copy and records what sends the difference.
  void send(Encoder& encoder, std::span<const StepPages::Member> members,
            std::span<const PageCopy> copies);
  void forget();  // what was recorded may never run: the next step sends everything

 private:
  // Words [at, at + size) of the block.
  struct Area {
    uint64_t at = 0, size = 0;
  };
  // What a row of a group's table holds.
  struct Row {
    uint64_t sequence = ~uint64_t{0};
    uint64_t epoch = 0;
    uint64_t end = 0;
  };
  struct GroupAreas {
    Area table, slots, tail_begin, from, to;
    uint64_t width = 0;
    std::vector<Row> rows;
  };
  class Writer;

  Area reserve(uint64_t count);
  Tensor view(const Area& area) const { return block_.slice(0, area.at, area.size); }
  void put_sequences(std::span<const StepPages::Member> members);
  void put_prompts(std::span<const StepPages::Member> members);
  void put_group(size_t index, std::span<const StepPages::Member> members);
  void put_row(GroupAreas& areas, size_t row, const KvSequenceState& sequence, size_t group);
  void put_copies(std::span<const PageCopy> copies);

  uint64_t page_tokens_;
  std::vector<GroupKeys> keys_;
  BatchBounds bounds_;
  std::vector<int32_t> words_;  // the block, as the device has it when all is done
  std::vector<int32_t> prompt_words_;
  std::vector<WordRun> runs_, prompt_runs_;
  Area cu_seqlens_q_area_, kv_lengths_area_, positions_area_;
  std::vector<GroupAreas> areas_;
  uint64_t used_sequences_ = 0, used_tokens_ = 0;  // of the last step sent
  Tensor block_, cu_seqlens_q_, kv_lengths_, positions_, is_prefill_, prompt_block_;
  std::vector<Group> groups_;
};

}  // namespace gyre
