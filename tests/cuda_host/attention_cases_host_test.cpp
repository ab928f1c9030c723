// The cases of few rows and of merging, which op_test runs on a GPU, over the CUDA kernels' text on
// the host: memory between guards, partial states, eager and replayed.
#include "attention/attention_op_case.h"
#include "attention_host_device.h"
#include "op_case.h"
#include "variant_classes.h"

namespace gyre::test {
namespace {

// An H200's plans, whatever the number of threads.
bool plan_of_h200(const void* problem, const DeviceInfo&, void* plan) {
  *static_cast<abi::AttentionPlan*>(plan) = cuda::plan_attention(
      *static_cast<const abi::AttentionProblem*>(problem), kLarge, has_decode, has_many_rows);
  return true;
}

Device h200() {
  static const std::vector<cpu::CpuKernel> kTable = [] {
    std::vector<cpu::CpuKernel> table = make_table();
    for (cpu::CpuKernel& row : table) {
      if (row.plan != nullptr) row.plan = plan_of_h200;
    }
    return table;
  }();
  return device_of(cpu::make_device({.threads = 1}, kTable));
}

// Blocks of the case's decode kernel; 0: it takes another kernel, or one that was not compiled
// here.
uint64_t decode_blocks(const Device& device, const OpCase& op_case) {
  const OpRun run = op_case.outline();
  std::vector<Tensor> tensors;
  for (const Block& block : run.blocks)
    tensors.push_back(device.tensor(block.dtype, {block.before.size() / size_bytes(block.dtype)}));
  Encoder encoder(device);
  try {
    run.record(encoder, tensors);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
    return 0;
  }
  const RecordedCommand first = recorded_commands(encoder).at(0);
  abi::AttentionParams params{};
  std::memcpy(&params, first.params.data(), sizeof(params));
  return first.kernel == &kAttentionDecode.info ? params.splits * params.kv_heads : 0;
}

// Runs every third of the cases with many blocks, which take long.
void check_cases(const std::vector<OpCase>& cases, size_t fewest) {
  constexpr uint64_t kManyBlocks = 8;
  const Device device = h200();
  size_t ran = 0, large = 0;
  std::map<std::string, double> nmse;
  for (const OpCase& op_case : cases) {
    const uint64_t blocks = decode_blocks(device, op_case);
    if (blocks == 0 || (blocks > kManyBlocks && large++ % 3 != 0)) continue;
    CaseReport report;
    EXPECT_TRUE(check_case(device, op_case, &report));
    nmse[report.arithmetic] = std::max(nmse[report.arithmetic], report.nmse);
    ++ran;
  }
  std::cout << ran << " cases\n";
  for (const auto& [name, most] : nmse) std::cout << "NMSE of " << name << ": " << most << '\n';
  EXPECT_GE(ran, fewest);
}

TEST(CudaHostAttention, CasesOfFewRows) { check_cases(attention_decode_cases(), 60); }
TEST(CudaHostAttention, CasesOfFewRowsPartial) {
  check_cases(attention_decode_partial_cases(), 10);
}

TEST(CudaHostAttention, CasesOfMerging) {
  const Device device = h200();
  for (const OpCase& op_case : attention_merge_cases()) EXPECT_TRUE(check_case(device, op_case));
}

}  // namespace
}  // namespace gyre::test
