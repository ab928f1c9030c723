#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "gyre/encoder.h"
#include "runtime/command_list.h"
#include "runtime/command_notes.h"
#include "runtime/device_impl.h"
#include "runtime/hazard.h"

namespace gyre {

// What an Encoder holds: the list, the hazards, and a small cache in front of the device's
// pipelines.
class Recorder {
 public:
  explicit Recorder(std::shared_ptr<DeviceImpl> device) : device_(std::move(device)) {}
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder() { notes_.notify(ListOutcome::dropped, this); }

 private:
  friend class Recording;
  friend class RecordingGroup;
  friend class Encoder;

  // How much is recorded.
  struct Mark {
    size_t commands = 0, params = 0, args = 0, storages = 0, pipelines = 0, notes = 0;
    HazardTracker::Mark hazards{};
  };
  Mark mark() const;
  void roll_back(const Mark& mark) noexcept;

  static constexpr uint32_t kCachedPipelines = 64;  // direct-mapped; a miss asks the device

  static constexpr uint32_t kRecentStorages =
      256;  // direct-mapped; a miss holds one reference more

  const Pipeline& find_pipeline(const KernelInfo& kernel, uint64_t spec);
  void forget_custom() noexcept;
  void retain(const std::shared_ptr<Storage>& storage) {
    static_assert(kRecentStorages == 256);
    const Storage*& recent = retained_[hash(reinterpret_cast<uintptr_t>(storage.get())) >> 56];
    if (recent == storage.get()) return;
    list_.storages.push_back(storage);
    recent = storage.get();
  }
  static uint64_t hash(uint64_t value) { return value * 0x9E3779B97F4A7C15u; }  // good upper bits

  std::shared_ptr<DeviceImpl> device_;
  CommandList list_;
  CommandNotes notes_;
  HazardTracker hazards_;
  std::array<const Pipeline*, kCachedPipelines> cache_{};
  std::array<const Storage*, kRecentStorages> retained_{};  // some of what list_.storages holds
  std::atomic<bool> busy_{false};
};

// One op's time inside an encoder. Refuses a second thread; whatever was dispatched is taken back
// unless commit() is reached, so an op that throws half-way leaves the encoder as it was.
class Recording {
 public:
  Recording(const Encoder& encoder, const char* op);
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  ~Recording();

  // A null tensor is an absent argument.
  template <class Spec, class Params, class Problem>
  void dispatch(const Kernel<Spec, Params, Problem>& kernel, const Spec& spec, const Params& params,
                std::initializer_list<const Tensor*> args) {
    append(kernel.info, spec_key(spec), &params, {args.begin(), args.size()});
  }
  void dispatch(const KernelInfo& kernel, uint64_t spec, const void* params,
                std::span<const Tensor* const> args) {
    append(kernel, spec, params, args);
  }
  // The device's plan in place of the op's default, if it has one.
  template <class Spec, class Params, class Problem>
  void plan(const Kernel<Spec, Params, Problem>& kernel, const Problem& problem,
            typename Problem::Plan& plan) const {
    recorder_.device_->plan(kernel.info, &problem, &plan);
  }
  bool has(const KernelInfo& kernel, uint64_t spec) const {
    return recorder_.device_->has(kernel, spec);
  }
  // Observers know the list as its Recorder.
  void note(const NewNote& note) { recorder_.notes_.add(note); }
  void commit() { committed_ = true; }

  CommandList& list() { return recorder_.list_; }
  const DeviceInfo& device() const { return recorder_.device_->info(); }
  void reset(ListOutcome outcome);  // tells observers and empties the encoder

 private:
  void append(const KernelInfo& kernel, uint64_t spec, const void* params,
              std::span<const Tensor* const> args);

  Recorder& recorder_;
  const char* op_;
  bool committed_ = false;
  Recorder::Mark mark_;
};

// Several recordings that count as one: unless commit() is reached, all of them are taken back.
class RecordingGroup {
 public:
  explicit RecordingGroup(const Encoder& encoder)
      : recorder_(recorder_of(encoder)), mark_(recorder_.mark()) {}
  RecordingGroup(const RecordingGroup&) = delete;
  RecordingGroup& operator=(const RecordingGroup&) = delete;
  ~RecordingGroup() {
    if (!committed_) recorder_.roll_back(mark_);
  }
  void commit() { committed_ = true; }

 private:
  Recorder& recorder_;
  Recorder::Mark mark_;
  bool committed_ = false;
};

}  // namespace gyre
