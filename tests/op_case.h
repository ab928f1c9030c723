#pragma once
// How an op is tested: its file lists cases and refused calls as data, the runner does the rest.
// A new op is a file <op>_op.cpp, or files that op_test.cpp lists in kOps.

#include <cstring>
#include <initializer_list>
#include <ostream>

#include "gyre_test.h"
#include "recorded_commands.h"
#include "str_cat.h"
#include "tensor_bytes.h"

namespace gyre::test {

// What arithmetic must come near to; with bound 0 the bits of Block::after decide.
struct Near {
  double value = 0, bound = 0;
  bool counts = true;  // in Block::nmse
};

// A stretch of memory: what it holds before the call and must hold after it. Inputs are blocks too,
// and must not change.
struct Block {
  DType dtype = DType::f32;
  Bytes before, after;
  double bound = 0;             // largest |got - after| of a value; 0: bit for bit
  std::vector<Near> near = {};  // one per element, in place of `bound`; or none
  double nmse = 0;              // largest NMSE of all `near` values together; 0: not asked
  bool aligned = false;         // begins at a multiple of 16 bytes; else off every vector boundary
};

// An input: the call must leave it as it is.
inline Block plain_block(DType dtype, Bytes bytes) {
  Block block;
  block.dtype = dtype;
  block.before = block.after = std::move(bytes);
  return block;
}
template <class Value>
Block plain_block(DType dtype, const std::vector<Value>& values) {
  Bytes bytes(values.size() * sizeof(Value));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return plain_block(dtype, std::move(bytes));
}

struct OpRun {
  std::vector<Block> blocks;
  // Records the call. Gets each block as a flat tensor [elements] and makes its own views.
  std::function<void(Encoder&, std::span<const Tensor>)> record;
  std::optional<uint32_t> commands = 1;  // how many the call records; none: the device decides
  // Where bounds depend on the arithmetic: fills them in, told how the device describes the kernels
  // of its commands, and returns what that arithmetic is called in the table of bounds.
  std::function<std::string(std::vector<Block>&, const std::string& description)> expect = {};
  bool once = false;  // holds for one moment: a graph must refuse it
};

struct OpCase {
  std::string name;
  std::function<bool(const Device&)> supported;
  std::function<OpRun()> make;  // called when the case runs, so a list of thousands costs little
  std::string only_with = {};   // a kernel: devices without it leave the case out, by name
  // As make(), with blocks of the right sizes and nothing in them: what it records is the same.
  std::function<OpRun()> outline = {};
};

// Draws the same numbers for a case whenever it is made.
inline std::mt19937 random_of(const std::string& name) {
  std::seed_seq seed(name.begin(), name.end());
  return std::mt19937(seed);
}

// For ops that have no supports() of their own.
inline bool has_kernel(const Device& device, std::string_view name) {
  const std::vector<KernelDescription> all = device.kernels();
  return std::any_of(all.begin(), all.end(),
                     [&](const auto& row) { return row.name == name && row.variants != 0; });
}
inline OpCase kernel_case(const std::string& kernel, const std::string& what,
                          std::function<OpRun()> make) {
  return {.name = kernel + " " + what,
          .supported = [kernel](const Device& device) { return has_kernel(device, kernel); },
          .make = std::move(make)};
}

// A case of each row of numbers, by the make_case() of their type.
template <class Numbers>
std::vector<OpCase> make_cases(std::initializer_list<std::vector<Numbers>> lists) {
  std::vector<OpCase> cases;
  for (const auto& list : lists) {
    for (const Numbers& numbers : list) cases.push_back(make_case(numbers));
  }
  return cases;
}

// Tensors with known contents, so that a refused call can be seen to have written nothing.
class FilledTensors {
 public:
  explicit FilledTensors(Device device) : device_(std::move(device)) {}

  const Device& device() const { return device_; }
  Tensor make(DType dtype, const Dims& shape);
  testing::AssertionResult unchanged() const;

 private:
  Device device_;
  std::vector<Tensor> tensors_;
};

// A call that must throw. The message must hold every part: the op, the rule, the value that broke
// it.
struct Refusal {
  std::string name;
  std::vector<std::string> message;
  std::function<void(Encoder&, FilledTensors&)> call;
  ErrorCode code = ErrorCode::invalid_argument;
};

struct OpCases {
  std::string op;
  std::vector<OpCase> (*cases)();
  std::vector<Refusal> (*refusals)();
};

inline std::ostream& operator<<(std::ostream& out, const OpCases& cases) { return out << cases.op; }

std::vector<OpCases> all_ops();

// What a case showed about the device.
struct CaseReport {
  std::string arithmetic;  // what OpRun::expect returned
  double nmse = 0;         // the largest of a block that has a bound for it
  double nmse_bound = 0;
  std::vector<std::string> classes;  // variant_classes() of what ran
  uint64_t bytes = 0;                // of all blocks
};

// Eager and as a graph replayed twice, on memory of the device and on wrapped memory, each block
// between guards; replays must give the eager run's bits.
testing::AssertionResult check_case(const Device& device, const OpCase& op_case,
                                    CaseReport* report = nullptr);

// What the case records, without its data.
std::vector<RecordedCommand> outline_commands(const Device& device, const OpCase& op_case);
// An emulated GPU has the kernels that were compiled for the host. The first that the case needs
// and that is not among them; empty: none.
std::string missing_kernel(const Device& device, const OpCase& op_case);

// The throw, and that neither encoder nor memory changed.
testing::AssertionResult check_refusal(const Device& device, const Refusal& refusal);

std::vector<OpCase> kv_copy_cases();
std::vector<Refusal> kv_copy_refusals();
std::vector<OpCase> kv_cache_cases();  // what only a KvCache records
std::vector<OpCase> rope_cases();
std::vector<Refusal> rope_refusals();
std::vector<OpCase> norm_rope_cases();
std::vector<Refusal> norm_rope_refusals();
std::vector<OpCase> hadamard_cases();
std::vector<Refusal> hadamard_refusals();
std::vector<OpCase> kv_quantize_cases();
std::vector<Refusal> kv_quantize_refusals();
std::vector<OpCase> kv_calibrated_cases();
std::vector<Refusal> kv_calibrated_refusals();
std::vector<OpCase> kv_transform_cases();
std::vector<Refusal> kv_transform_refusals();
std::vector<OpCase> kv_dequantize_cases();
std::vector<Refusal> kv_dequantize_refusals();
std::vector<OpCase> kv_write_cases();
std::vector<Refusal> kv_write_refusals();
std::vector<OpCase> rope_append_cases();
std::vector<Refusal> rope_append_refusals();
std::vector<OpCase> kv_page_copy_cases();
std::vector<Refusal> kv_page_copy_refusals();
std::vector<OpCase> attention_cases();
std::vector<Refusal> attention_refusals();
std::vector<OpCase> paged_attention_cases();
std::vector<Refusal> paged_attention_refusals();
std::vector<OpCase> attention_partial_cases();
std::vector<Refusal> attention_partial_refusals();
std::vector<OpCase> attention_merge_cases();
std::vector<Refusal> attention_merge_refusals();

}  // namespace gyre::test
