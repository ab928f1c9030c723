#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "metal/buffers.h"
#include "metal/prepared_list.h"
#include "runtime/device_impl.h"
#include "runtime/process.h"

namespace gyre::metal {

class Submission;

// A device's one queue: lists run one after the other, each as one command buffer. Submitted work
// holds its storages until it is done, so memory that comes back is used by nobody. Thread-safe.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  // `uses` gives commands their shape in messages.
  Stream(std::shared_ptr<Buffers> buffers, bool check_each_launch, std::span<const KernelUse> uses);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();

  Buffers& buffers() const { return *buffers_; }

  std::shared_ptr<FenceState> submit(const CommandList& list);
  // `holder` holds the prepared list and what it points into until the replay is done.
  std::shared_ptr<FenceState> replay(const PreparedList& prepared, const CommandList& list,
                                     std::shared_ptr<const void> holder);
  // One command after the other, timed; returns when they are done.
  void run_timed(const PreparedList& prepared, const CommandList& list, TraceLog& trace);

  void wait();             // for everything that was submitted; throws what went wrong
  void settle() noexcept;  // the same, keeping it for who asks next
  void retire();           // lets go of what is done

 private:
  friend class Submission;
  using Submissions = std::list<std::shared_ptr<Submission>>;

  void require_same_process() const;
  void require_alive() const;
  // The list's submission enters the queue; null where nothing is left to do.
  std::shared_ptr<FenceState> enter(const PreparedList& prepared, const CommandList& list,
                                    Submissions made);
  Commands* commit(std::span<const PreparedList::Step> steps) const;  // one command buffer
  // One command buffer for each command, waited for.
  void run_one_by_one(const PreparedList& prepared, const CommandList& list,
                      const std::function<void(uint32_t command, uint64_t gpu_ns)>& ran);
  void wait_for(const Submission& submission);
  std::string text_of(const CommandList& list, const Command& command) const;  // "rope (...)"
  std::string where(const CommandList& list) const;
  // With mutex_ held: the fences of what is in flight and every later call throw it.
  void lose(const std::string& error, const std::string& where);

  const std::shared_ptr<Buffers> buffers_;
  const Driver& api_;
  const bool check_each_launch_;
  const std::span<const KernelUse> uses_;
  const uint64_t process_ = process_generation();
  Queue* queue_ = nullptr;

  std::mutex order_;          // one list at a time enters the queue
  mutable std::mutex mutex_;  // guards what follows; never held while user code may run
  Submissions in_flight_;
  std::string lost_;  // empty: alive
};

}  // namespace gyre::metal
