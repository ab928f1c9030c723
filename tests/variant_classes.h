#pragma once
// The kinds of kernel variants that are counted: op_test fails on a device that lists a class which
// no case launched. tests/README.md has the table.

#include "gyre_test.h"
#include "recorded_commands.h"

namespace gyre::test {

// What becomes of the splits of attention's keys.
enum class Reduction : uint8_t {
  none,       // there is one split: the kernel writes the output
  states,     // the kernel leaves partial states, for attention_merge or the caller
  in_kernel,  // the last blocks to end reduce what all left in global memory
  cluster,    // the blocks of a cluster reduce through each other's shared memory
};

// The classes of a kernel's variant, each as "kernel field=value ...". A class names the fields
// that kernels have loops of their own for, so that one variant is in several.
std::vector<std::string> variant_classes(const KernelInfo& kernel, uint64_t spec,
                                         Reduction reduction = Reduction::none);
std::vector<std::string> variant_classes(const RecordedCommand& command);

// The classes of every variant that the device has and an op can ask for. For attention_decode,
// those that the device's planner chooses for some problem.
std::set<std::string> listed_classes(const Device& device);

// That the two are the same: nothing is left out, nothing runs that is not listed.
testing::AssertionResult each_is_launched(const std::set<std::string>& listed,
                                          const std::set<std::string>& launched);

}  // namespace gyre::test
