#pragma once
// Attention over ggml's bytes by any number of threads that call in together.

#include <atomic>
#include <cstdint>

#include "plan.h"
#include "problem.h"

namespace gyre::ggml {

// What the threads of one call share. Fresh for every call.
struct Call {
  Call(const Problem& of_problem, const Plan& of_plan, float* memory)
      : problem(of_problem), plan(of_plan), partials(memory) {}

  const Problem& problem;
  const Plan& plan;
  float* const partials;  // plan.partial_floats()
  std::atomic<uint64_t> next_item{0}, next_row{0};
  std::atomic<uint32_t> arrived{0};
};

// Each of `threads` threads calls this once; when all have returned, the output is written.
// `scratch` is the thread's own: plan.scratch_floats(), 64-byte aligned; a thread without (null)
// leaves the work to others.
void run(Call& call, uint32_t threads, float* scratch);

// The instructions that are used here: Highway's name of them.
const char* instruction_set();

}  // namespace gyre::ggml
