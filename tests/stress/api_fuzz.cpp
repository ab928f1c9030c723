// Random calls of everything that is public, for libFuzzer and for api_fuzz_main.cpp.
#include <cstdio>
#include <cstdlib>

#include "stress/fuzz_world.h"

namespace gyre::test {
namespace {

// The parts of the interface in turns, however many calls each has.
using FuzzPart = std::span<const FuzzCall> (*)();
constexpr FuzzPart kParts[] = {fuzz_op_calls,      fuzz_attention_calls, fuzz_rope_calls,
                               fuzz_runtime_calls, fuzz_tensor_calls,    fuzz_cache_calls,
                               fuzz_serving_calls, fuzz_c_calls};

}  // namespace

void fuzz_one(std::span<const uint8_t> bytes) {
  FuzzWorld world(bytes);
  while (!world.in.empty()) {
    const std::span<const FuzzCall> calls = kParts[world.in.below(std::size(kParts))]();
    world.in.begin_call();
    try {
      calls[world.in.below(calls.size())](world, world.in);
    } catch (const Error&) {
      // What an odd call needs was refused itself: no such tensor, no such memory.
    }
  }
  world.in.begin_call();
  world.submit();
}

}  // namespace gyre::test

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer calls it so
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    gyre::test::fuzz_one({data, size});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "api_fuzz: %s\n", error.what());
    std::abort();
  }
  return 0;
}

// Sizes that no machine has are refused, as they are without the sanitizer.
// NOLINTNEXTLINE(readability-identifier-naming,bugprone-reserved-identifier): the sanitizer calls
// it so
extern "C" const char* __asan_default_options() {
  return "allocator_may_return_null=1:max_allocation_size_mb=1024";
}
