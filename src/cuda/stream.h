#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/context.h"
#include "cuda/early_reads.h"
#include "cuda/kernel.h"
#include "runtime/command_list.h"
#include "runtime/device_impl.h"

namespace gyre::cuda {

// One command as the driver takes it. Points into itself and into the list.
struct Prepared {
  CuFunction function = nullptr;
  Launch shape;
  EarlyArgs args{};
  void* params[3] = {};  // kernels take the first two, or all; see EarlyArgs

  // Refuses a launch that the kernel cannot have.
  Prepared(const CommandList& list, const Command& command, const CudaLimits& limits,
           const EarlyReads& early);
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;
  bool empty() const { return shape.empty(); }
};

class Submission;

// A device's one stream: everything the device does goes through it and runs in order. That is what
// makes freed memory safe to hand out again at once: the new owner's first touch, the zeroing,
// comes after all work of the old one, host copies included. Memory that leaves the device
// (cuMemFree, a wrapped owner) waits for the work instead, except on a caller's own stream, whose
// order the owner may keep (OwnerRelease). Thread-safe.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  // `uses` gives commands their shape in messages.
  Stream(std::shared_ptr<const Context> context, bool check_each_launch,
         std::span<const KernelUse> uses);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();

  const Context& context() const { return *context_; }
  bool checks_each_launch() const { return check_each_launch_; }
  std::string command_text(const CommandList& list, const Command& command) const;  // "rope (...)"

  std::shared_ptr<FenceState> submit(const CommandList& list);
  // Onto a stream of the caller's, after everything that has entered this one and before what
  // enters it next. While that stream is captured, the launches alone: see Encoder::submit_on.
  std::shared_ptr<FenceState> submit_on(CuStream other, const CommandList& list);
  // `holder` holds the graph and its list until the replay is done.
  std::shared_ptr<FenceState> replay(CuGraphExec graph, const CommandList& list,
                                     std::shared_ptr<const void> holder);
  // One command after the other, timed; returns when they are done.
  void run_timed(const CommandList& list, TraceLog& trace);

  // Return when the copy is done.
  void read(CuAddress from, void* host, uint64_t bytes);
  void write(CuAddress to, const void* host, uint64_t bytes);

  CuAddress take(uint64_t bytes);  // zero-filled; 0: there is none
  void zero(CuAddress address, uint64_t bytes);
  void give(CuAddress address) noexcept;
  void wait();            // for everything that has entered
  void drain() noexcept;  // waits for everything and forgets it
  uint64_t handle() const { return reinterpret_cast<uintptr_t>(stream_); }

 private:
  friend class Submission;

  // Pinned memory for host copies: the host works on one half while the GPU works on the other.
  struct Staging {
    static constexpr uint64_t kHalfBytes = 4 << 20;  // above that, PCIe is as fast as it gets

    std::mutex mutex;
    std::byte* half[2] = {};
    CuEvent done[2] = {};
  };

  // Between these a list enters the stream: it may be what fails. Refuses a device that is lost.
  class Entering {
   public:
    Entering(Stream& stream, const CommandList& list);
    Entering(const Entering&) = delete;
    Entering& operator=(const Entering&) = delete;
    ~Entering();

   private:
    Stream& stream_;
  };

  // An error that ends all work is kept with the commands that may have caused it, and thrown by
  // every later call.
  void check(CuResult result, const char* call);
  // By that command; null: by one of those that are running.
  [[noreturn]] void lose(CuResult result, const CommandList* list = nullptr,
                         const Command* command = nullptr);
  Error loss(CuResult result, const CommandList* list, const Command* command) const noexcept;
  void require_alive() const;
  std::string running() const;  // names what is in flight

  // The nodes that a captured stream's next launch follows.
  struct CaptureTail {
    uint64_t capture = 0;
    CuGraphNode kernel = nullptr;  // the only one, and all of it; null: there are others
    bool is_open = false;          // some may still run when the launch begins
  };
  CaptureTail captured_tail(CuStream stream) const;
  CuResult launch(CuStream to, Prepared& run, bool overlaps) const;
  void fail_launch(CuResult result, const CommandList& list, const Command& command);
  // All or none: a list that cannot be launched to its end, and of which a part has run, takes the
  // device with it. `launched` follows each command and does not throw.
  void launch_all(CuStream to, const CommandList& list,
                  const std::function<void()>& launched = nullptr);
  void capture_all(CuStream to, const CommandList& list);
  // What `then` does next follows what `first` has. `event` can be recorded again at once.
  CuResult order(CuStream first, CuStream then, CuEvent event) const;
  // What a call after the last launch returned. The list is submitted: what the driver has no
  // memory to order or to mark is waited for.
  void settle(CuResult result, CuStream stream);
  using Submissions = std::list<std::shared_ptr<Submission>>;
  // The list's submission, made before it enters; what track() does with it needs no memory.
  // On the caller's stream it does not hold memory whose owner frees in that stream's order.
  Submissions make_submission(const CommandList& list, std::shared_ptr<const void> holder,
                              bool on_callers_stream = false);
  std::shared_ptr<FenceState> track(Submissions& made);  // null: it is done
  void retire();                                         // lets go of what is done
  CuEvent take_event();
  void give_event(CuEvent event) noexcept;
  void prepare_staging();

  std::shared_ptr<const Context> context_;
  const Driver& api_;
  const bool check_each_launch_;
  const std::span<const KernelUse> uses_;
  CuStream stream_ = nullptr;
  Staging staging_;

  // The end of the last list that was captured, for the next one in the same graph.
  struct CapturedEnd {
    CaptureTail tail;
    RunningWrites running;
  };

  std::mutex order_;          // one list at a time enters the stream
  CapturedEnd captured_;      // guarded by order_
  mutable std::mutex mutex_;  // guards what follows; never held while user code may run
  Submissions in_flight_;
  const CommandList* entering_ = nullptr;
  std::vector<CuEvent> free_events_;  // with room for all that were made
  size_t events_ = 0;                 // that were made
  std::optional<Error> lost_;         // none: alive
};

}  // namespace gyre::cuda
