#include "gyre/encoder.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {

const Pipeline& Recorder::find_pipeline(const KernelInfo& kernel, uint64_t spec) {
  const Pipeline*& entry = cache_[hash(spec ^ reinterpret_cast<uintptr_t>(&kernel)) >> 58];
  static_assert(kCachedPipelines == 64);
  if (entry != nullptr && entry->kernel == &kernel && entry->spec == spec) return *entry;
  std::shared_ptr<const Pipeline> pipeline = device_->pipeline(kernel, spec);
  if (pipeline == nullptr) {
    fail(ErrorCode::unsupported, kernel.name, ": device ", device_->info().name,
         " has no kernel for spec 0x", std::hex, spec);
  }
  const Pipeline& found = *pipeline;
  if (kernel.code != nullptr) list_.pipelines.push_back(std::move(pipeline));
  entry = &found;
  return found;
}

// Before the list lets go of pipelines: those of custom kernels are cached while it holds them.
void Recorder::forget_custom() noexcept {
  if (list_.pipelines.empty()) return;
  for (const Pipeline*& entry : cache_) {
    if (entry != nullptr && entry->kernel->code != nullptr) entry = nullptr;
  }
}

Recorder::Mark Recorder::mark() const {
  return {list_.commands.size(),  list_.params.size(), list_.args.size(), list_.storages.size(),
          list_.pipelines.size(), notes_.size(),       hazards_.mark()};
}

// Shrinks only: takes no memory.
void Recorder::roll_back(const Mark& mark) noexcept {
  list_.commands.erase(list_.commands.begin() + static_cast<ptrdiff_t>(mark.commands),
                       list_.commands.end());
  list_.params.resize(mark.params);
  list_.args.resize(mark.args);
  list_.arg_bytes.resize(mark.args);
  list_.storages.resize(mark.storages);
  forget_custom();
  list_.pipelines.resize(mark.pipelines);
  notes_.shrink(mark.notes);
  retained_.fill(nullptr);
  hazards_.rollback(mark.hazards);
}

Recording::Recording(const Encoder& encoder, const char* op)
    : recorder_(recorder_of(encoder)), op_(op) {
  recorder_.device_->require_same_process(op);
  require(!recorder_.busy_.exchange(true, std::memory_order_acquire), op,
          ": the encoder is in use by another thread; give each thread its own encoder");
  mark_ = recorder_.mark();
}

Recording::~Recording() {
  if (!committed_) recorder_.roll_back(mark_);
  recorder_.busy_.store(false, std::memory_order_release);
}

void Recording::append(const KernelInfo& kernel, uint64_t spec, const void* params,
                       std::span<const Tensor* const> args) {
  require(args.size() == kernel.arg_count, op_, ": kernel ", kernel.name, " takes ",
          kernel.arg_count, " arguments, got ", args.size());
  CommandList& list = recorder_.list_;
  const Pipeline& pipeline = recorder_.find_pipeline(kernel, spec);
  std::array<RangeAccess, kMaxArgs> accesses;
  const size_t first_arg = list.args.size();
  list.args.resize(first_arg + args.size());
  list.arg_bytes.resize(first_arg + args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    const ArgInfo& arg = kernel.args[i];
    accesses[i] = {{}, arg.access};
    if (args[i] == nullptr || !args[i]->defined()) continue;
    const Tensor& tensor = *args[i];
    const std::shared_ptr<Storage>& storage = storage_of(tensor);
    require(storage->device_id() == recorder_.device_->id(), op_, ": ", arg.name,
            " lives on another device than the encoder");
    require(arg.access == Access::read || !storage->read_only(), op_, ": ", arg.name,
            " is written, but its memory was wrapped read-only");
    const uint64_t address = storage->address() + tensor.byte_offset();
    accesses[i].range = {address, address + tensor.span_bytes()};
    list.args[first_arg + i] = address;
    list.arg_bytes[first_arg + i] = tensor.span_bytes();
    recorder_.retain(storage);
  }
  const size_t words = (kernel.params_bytes + 7) / 8;
  const size_t params_offset = list.params.size();
  list.params.resize(params_offset + words);
  std::memcpy(&list.params[params_offset], params, kernel.params_bytes);
  const bool barrier = recorder_.hazards_.add({accesses.data(), args.size()});
  list.commands.push_back(
      {&pipeline, static_cast<uint32_t>(params_offset), static_cast<uint32_t>(first_arg), barrier});
}

void Recording::reset(ListOutcome outcome) {
  recorder_.notes_.notify(outcome, &recorder_);
  recorder_.notes_.clear();
  recorder_.forget_custom();
  recorder_.list_.clear();
  recorder_.hazards_.clear();
  recorder_.retained_.fill(nullptr);
  committed_ = true;
}

Encoder::Encoder(Device device) try : device_(std::move(device)) {
  require(impl_of(device_) != nullptr, "encoder: the device handle is empty");
  recorder_ = std::make_unique<Recorder>(impl_of(device_));
} catch (const std::bad_alloc&) {
  out_of_memory("encoder");
}
Encoder::Encoder(Encoder&&) noexcept = default;
Encoder& Encoder::operator=(Encoder&&) noexcept = default;
Encoder::~Encoder() = default;

Recorder& Encoder::recorder() const {
  require(recorder_ != nullptr, "encoder: used after it was moved from");
  return *recorder_;
}

uint32_t Encoder::size() const {
  Recording recording(*this, "encoder.size");
  return static_cast<uint32_t>(recording.list().commands.size());
}

uint32_t Encoder::barriers() const {
  Recording recording(*this, "encoder.barriers");
  const auto& commands = recording.list().commands;
  return static_cast<uint32_t>(
      std::count_if(commands.begin(), commands.end(), [](const Command& c) { return c.barrier; }));
}

void Encoder::clear() {
  Recording recording(*this, "encoder.clear");
  recording.reset(ListOutcome::dropped);
}

Fence Encoder::submit() try {
  Recording recording(*this, "encoder.submit");
  recorder_->notes_.check("encoder.submit");
  recording.list().finish_pipelines();
  Fence fence(recorder_->device_->submit(recording.list()));
  recording.reset(ListOutcome::submitted);
  return fence;
} catch (const std::bad_alloc&) {
  out_of_memory("encoder.submit");
}

Fence Encoder::submit_on(uint64_t stream) try {
  Recording recording(*this, "encoder.submit_on");
  recorder_->notes_.check("encoder.submit_on");
  recording.list().finish_pipelines();
  Fence fence(recorder_->device_->submit_on(stream, recording.list()));
  recording.reset(ListOutcome::submitted);
  return fence;
} catch (const std::bad_alloc&) {
  out_of_memory("encoder.submit_on");
}

Graph Encoder::instantiate() try {
  Recording recording(*this, "encoder.instantiate");
  for (const Command& command : recording.list().commands) {
    require(!command.pipeline->kernel->once, "encoder.instantiate: a call that begins, rolls back ",
            "or clears a step is recorded (kernel ", command.pipeline->kernel->name,
            "), and a graph would repeat that one step; submit it before each replay");
  }
  recording.list().finish_pipelines();
  Graph graph(device_, recorder_->device_->instantiate(recording.list()));
  recorder_->notes_.notify(ListOutcome::kept, recorder_.get());
  graph.impl_->notes = std::move(recorder_->notes_);
  recorder_->notes_.clear();
  recording.reset(ListOutcome::kept);
  return graph;
} catch (const std::bad_alloc&) {
  out_of_memory("encoder.instantiate");
}

}  // namespace gyre
