#pragma once
// The pages that a step takes: counted first, then taken, and given back if the step is cancelled.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "gyre/kv_batch.h"
#include "serving/pool_state.h"

namespace gyre {

// A page that the step writes to and others keep: its bytes go to a page of the sequence's own.
struct PageCopy {
  size_t group = 0;
  PageId from = kNoPage;
  PageId to = kNoPage;
};

class StepPages {
 public:
  struct Member {
    std::shared_ptr<KvSequenceState> sequence;
    uint64_t start = 0;  // its length before the step
    uint64_t tokens = 0;
    bool is_prefill = false;
    // Divided once, used by every group: where `start` lies, and where pages of all keys end.
    uint64_t page = 0, place = 0, end_page = 0;
    UnwrittenTokens before{};
  };

  StepPages(std::shared_ptr<KvPoolState> pool, uint64_t max_sequences, uint64_t max_tokens,
            uint64_t max_kv_length);

  // Refuses a pool that has too few pages. Changes nothing.
  void check(const char* op, std::span<const Member> members);
  // Takes what check() has counted for the same list.
  void take(std::span<const Member> members);
  void recorded() { dropped_.clear(); }  // its commands are in the list
  void undo(std::span<const Member> members);
  void commit();  // the step is there to stay
  // What a sequence had in a copied page is not there before the copy has run.
  void note_copies() const;

  std::span<const PageCopy> copies() const { return copies_; }

 private:
  // Pages of others stay in their hands until the step is complete.
  struct Held {
    KvSequenceState* sequence = nullptr;
    uint64_t page = 0;  // of the sequence
  };

  // A member whose pages in a group change. Most of a step's do not.
  struct Change {
    const Member* member = nullptr;
    size_t group = 0;
    uint64_t drop = 0;   // from the front
    uint64_t first = 0;  // before it
    uint64_t begin = 0;
    bool copies = false;  // the page that it goes on in
  };
  // A page of several holders that a member drops, or writes to.
  struct Shared {
    PageId page = kNoPage;
    bool writes = false;
    uint64_t start = 0;  // of the member
    size_t change = 0;
  };
  // A page that its writer need not copy if the index lets go of it.
  struct Indexed {
    PageId page = kNoPage;
    size_t group = 0;
    size_t change = 0;
  };
  struct Count {
    uint64_t needed = 0, given = 0;
  };

  Count count(size_t index, std::span<const Member> members);
  void count_shared(size_t index, Count& count);
  void check_room(const char* op, size_t index, size_t indexed, const Count& count,
                  std::span<const Member> members);
  void check_each(const char* op, size_t index, std::span<const Member> members) const;
  void take(const Change& change);
  void drop(const Change& change);
  void take_back_dropped();

  std::shared_ptr<KvPoolState> pool_;
  uint64_t max_pages_;
  std::vector<Change> changes_;   // that check() has found
  std::vector<Shared> shared_;    // of the group that is counted
  std::vector<Indexed> indexed_;  // that take() takes from the index
  std::vector<PageId> dropped_;   // of the changes, one after the other
  std::vector<PageCopy> copies_;
  std::vector<Held> held_;  // beside copies_
};

}  // namespace gyre
