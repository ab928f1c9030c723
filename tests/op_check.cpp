
#include "cuda/fake_controls.h"
#include "expect_error.h"
#include "gyre_test.h"
#include "op_case.h"
#include "reference.h"
#include "subnormals.h"
#include "variant_classes.h"

namespace gyre::test {
namespace {

using testing::AssertionFailure;
using testing::AssertionResult;
using testing::AssertionSuccess;

// Odd, so that blocks start off every vector boundary; or at every one, whatever the dtype.
constexpr uint64_t kGuardElements = 67, kAlignedGuardElements = 64;

uint64_t guard_of(const Block& block) {
  return block.aligned ? kAlignedGuardElements : kGuardElements;
}

enum class MemoryKind : uint8_t { device, external };

// `flushes`: the device takes f32 subnormals for 0, of whichever sign.
bool within_bound(const Block& block, const Bytes& got, const Bytes& expected, uint64_t element,
                  bool flushes) {
  const double g = reference::load_value(block.dtype, got.data(), element);
  double e = reference::load_value(block.dtype, expected.data(), element), bound = block.bound;
  if (!block.near.empty()) {
    e = block.near[element - guard_of(block)].value;
    bound = block.near[element - guard_of(block)].bound;
  }
  if (bound == 0) return false;
  if (flushes && g == 0 && std::abs(e) < 0x1p-126) return true;
  return std::abs(g - e) <= bound || (std::isnan(g) && std::isnan(e));
}

// Over the elements that have a bound.
double nmse_of(const Block& block, const Bytes& got) {
  double error = 0, energy = 0;
  for (uint64_t i = 0; i < block.near.size(); ++i) {
    const Near& near = block.near[i];
    if (near.bound == 0 || !near.counts || std::isnan(near.value)) continue;
    const double g = reference::load_value(block.dtype, got.data(), i + guard_of(block));
    error += (g - near.value) * (g - near.value);
    energy += near.value * near.value;
  }
  return error == 0 ? 0 : error / energy;
}

// The blocks of one run, each between guards in a buffer of its own.
class Arena {
 public:
  Arena(const Device& device, const std::vector<Block>& blocks, MemoryKind kind)
      : blocks_(blocks), flushes_(!keeps_subnormals(device)) {
    for (const Block& block : blocks) {
      const uint64_t unit = size_bytes(block.dtype), elements = block.before.size() / unit;
      const Dims shape{elements + 2 * guard_of(block)};
      if (kind == MemoryKind::external) {
        auto owner = std::make_shared<Bytes>(shape[0] * unit);
        buffers_.push_back(device.wrap(owner->data(), block.dtype, shape, {}, owner));
      } else {
        buffers_.push_back(device.tensor(block.dtype, shape));
      }
      tensors_.push_back(buffers_.back().slice(0, guard_of(block), elements));
    }
    reset();
  }

  std::span<const Tensor> tensors() const { return tensors_; }

  void reset() const {
    for (size_t i = 0; i < blocks_.size(); ++i)
      write_bytes(buffers_[i], guarded(i, blocks_[i].before));
  }

  std::vector<Bytes> read() const {
    std::vector<Bytes> all;
    for (const Tensor& buffer : buffers_) all.push_back(read_bytes(buffer));
    return all;
  }

  AssertionResult check(CaseReport& report) const {
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const Bytes got = read_bytes(buffers_[i]);
      if (const AssertionResult result = check_block(i, got); !result) return result;
      if (blocks_[i].nmse == 0) continue;
      const double nmse = nmse_of(blocks_[i], got);
      if (!(nmse <= blocks_[i].nmse)) {
        return AssertionFailure() << "block " << i << ": NMSE " << nmse << ", at most "
                                  << blocks_[i].nmse;
      }
      if (nmse > report.nmse) report.nmse = nmse, report.nmse_bound = blocks_[i].nmse;
    }
    return AssertionSuccess();
  }

 private:
  Bytes guarded(size_t block, const Bytes& contents) const {
    const uint64_t guard_bytes = guard_of(blocks_[block]) * size_bytes(blocks_[block].dtype);
    const Bytes guard = pattern_bytes(guard_bytes, static_cast<uint32_t>(block));
    Bytes all = guard;
    all.insert(all.end(), contents.begin(), contents.end());
    all.insert(all.end(), guard.begin(), guard.end());
    return all;
  }

  AssertionResult check_block(size_t i, const Bytes& got) const {
    const Block& block = blocks_[i];
    const Bytes expected = guarded(i, block.after);
    if (got == expected) return AssertionSuccess();
    const uint64_t count = expected.size() / size_bytes(block.dtype), guards = guard_of(block);
    for (uint64_t e = 0; e < count; ++e) {
      const uint32_t got_bits = reference::load_bits(block.dtype, got.data(), e);
      const uint32_t expected_bits = reference::load_bits(block.dtype, expected.data(), e);
      if (got_bits == expected_bits) continue;
      const bool guard = e < guards || e >= count - guards;
      if (!guard && within_bound(block, got, expected, e, flushes_)) continue;
      return AssertionFailure() << (guard ? "guard of block " : "block ") << i << " element "
                                << static_cast<int64_t>(e - guards) << ": got 0x" << std::hex
                                << got_bits << ", expected 0x" << expected_bits;
    }
    return AssertionSuccess();
  }

  const std::vector<Block>& blocks_;
  bool flushes_;
  std::vector<Tensor> buffers_, tensors_;
};

AssertionResult record(Encoder& encoder, const OpRun& run, const Arena& arena) {
  run.record(encoder, arena.tensors());
  if (encoder.size() == run.commands.value_or(encoder.size())) return AssertionSuccess();
  return AssertionFailure() << "recorded " << encoder.size() << " commands, expected "
                            << *run.commands;
}

AssertionResult check_eager(const Device& device, OpRun& run, const Arena& arena,
                            CaseReport& report) {
  Encoder encoder(device);
  if (const AssertionResult result = record(encoder, run, arena); !result) return result;
  const std::vector<RecordedCommand> commands = recorded_commands(encoder);
  if (run.expect && !commands.empty()) {
    std::string kernels;
    for (const RecordedCommand& command : commands)
      kernels += impl_of(device)->describe(*command.kernel, command.spec) + " ";
    report.arithmetic = run.expect(run.blocks, kernels);
  }
  for (const Block& block : run.blocks) report.bytes += block.before.size();
  for (const RecordedCommand& command : commands) {
    for (std::string& text : variant_classes(command)) report.classes.push_back(std::move(text));
  }
  encoder.submit().wait();
  if (encoder.size() != 0) return AssertionFailure() << "submit left commands behind";
  return arena.check(report);
}

AssertionResult check_replays(const Device& device, const OpRun& run, const Arena& arena,
                              const std::vector<Bytes>& eager) {
  Encoder encoder(device);
  if (const AssertionResult result = record(encoder, run, arena); !result) return result;
  if (run.once)
    return throws_error(ErrorCode::invalid_argument, {"submit it before each replay"},
                        [&] { encoder.instantiate(); });
  const Graph graph = encoder.instantiate();
  for (int replay = 0; replay < 2; ++replay) {
    arena.reset();
    graph.replay().wait();
    if (arena.read() != eager)
      return AssertionFailure() << "replay " << replay << " is not the eager run";
  }
  return AssertionSuccess();
}

}  // namespace

std::vector<RecordedCommand> outline_commands(const Device& device, const OpCase& op_case) {
  const OpRun run = op_case.outline ? op_case.outline() : op_case.make();
  std::vector<Tensor> tensors;
  for (const Block& block : run.blocks) {
    const uint64_t elements = block.before.size() / size_bytes(block.dtype);
    // Off a multiple of 16 bytes, as the guards are.
    const uint64_t guard = block.aligned ? 0 : 3;
    tensors.push_back(device.tensor(block.dtype, {elements + guard}).slice(0, guard, elements));
  }
  Encoder encoder(device);
  run.record(encoder, tensors);
  return recorded_commands(encoder);
}

std::string missing_kernel(const Device& device, const OpCase& op_case) {
  if (fake().has_kernel == nullptr || !device.info().name.starts_with("cuda")) return {};
  for (const RecordedCommand& command : outline_commands(device, op_case)) {
    std::string name = impl_of(device)->describe(*command.kernel, command.spec);
    if (!fake().has_kernel(name.c_str())) return name;
  }
  return {};
}

Tensor FilledTensors::make(DType dtype, const Dims& shape) {
  tensors_.push_back(device_.tensor(dtype, shape));
  const auto seed = static_cast<uint32_t>(tensors_.size());
  write_bytes(tensors_.back(), pattern_bytes(tensors_.back().bytes(), seed));
  return tensors_.back();
}

AssertionResult FilledTensors::unchanged() const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto seed = static_cast<uint32_t>(i + 1);
    if (read_bytes(tensors_[i]) != pattern_bytes(tensors_[i].bytes(), seed))
      return AssertionFailure() << "tensor " << i << " was written";
  }
  return AssertionSuccess();
}

AssertionResult check_case(const Device& device, const OpCase& op_case, CaseReport* report) {
  OpRun run = op_case.make();
  CaseReport unread;
  // Only the CPU takes memory that the test owns.
  const MemoryKind eager_kind =
      device.info().name == "cpu" ? MemoryKind::external : MemoryKind::device;
  const Arena eager(device, run.blocks, eager_kind);
  AssertionResult result = check_eager(device, run, eager, report != nullptr ? *report : unread);
  if (result) {
    const Arena replayed(device, run.blocks, MemoryKind::device);
    result = check_replays(device, run, replayed, eager.read());
  }
  if (result) return result;
  return AssertionFailure() << op_case.name << ": " << result.message();
}

AssertionResult check_refusal(const Device& device, const Refusal& refusal) {
  FilledTensors tensors(device);
  Encoder encoder(device);
  const Tensor from = device.tensor(DType::f32, {1, 1, 1});
  const Tensor to = device.tensor(DType::f32, {1, 1, 1});
  kv_copy(encoder, {.k = from, .k_cache = to});
  AssertionResult result =
      throws_error(refusal.code, refusal.message, [&] { refusal.call(encoder, tensors); });
  if (result && (encoder.size() != 1 || encoder.barriers() != 0))
    result = AssertionFailure() << "the encoder changed: " << encoder.size() << " commands";
  if (result) {
    encoder.submit().wait();
    result = tensors.unchanged();
  }
  if (result) return result;
  return AssertionFailure() << refusal.name << ": " << result.message();
}

}  // namespace gyre::test
