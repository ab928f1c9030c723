// The API fuzzer without libFuzzer: random bytes from a seed, until so many calls are made or so
// many seconds have passed. Prints the seed and the call that failed; the same seed with --from
// makes the same calls again.
// usage: api_fuzz_test [--calls N] [--seconds N] [--seed N] [--from INPUT] [--memory-gib N]
// [--list]
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>

#include "stress/fuzz_world.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace {

using namespace gyre::test;

struct Options {
  uint64_t calls = 200'000, seconds = 0, seed = 1, from = 0, memory_gib = 3;
  bool list = false;
};

volatile uint64_t current_seed, current_input;

// Only what a signal handler may do.
void on_crash(int signal) {
  char text[256];
  const int length = std::snprintf(
      text, sizeof(text), "api_fuzz: signal %d in %s; --seed %" PRIu64 " --from %" PRIu64 "\n",
      signal, fuzz_stats().current, current_seed, current_input);
  if (length > 0 && write(STDERR_FILENO, text, static_cast<size_t>(length)) < 0) _exit(3);
  ::signal(signal, SIG_DFL);
  raise(signal);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--list") {
      options.list = true;
      continue;
    }
    uint64_t* const value = name == "--calls"        ? &options.calls
                            : name == "--seconds"    ? &options.seconds
                            : name == "--seed"       ? &options.seed
                            : name == "--from"       ? &options.from
                            : name == "--memory-gib" ? &options.memory_gib
                                                     : nullptr;
    if (value == nullptr || ++i == argc) {
      std::fprintf(stderr,
                   "usage: %s [--calls N] [--seconds N] [--seed N] [--from INPUT] [--memory-gib N] "
                   "[--list]\n",
                   argv[0]);
      std::exit(2);
    }
    *value = std::strtoull(argv[i], nullptr, 10);
  }
  return options;
}

// Memory in use once nothing is kept for reuse: allocated, and resident (which includes what the
// allocator cannot give back).
struct Memory {
  int64_t allocated_kib = 0, resident_kib = 0;
};
Memory memory_now() {
  Memory now;
  trim_fuzz_devices();
#if defined(__GLIBC__)
  malloc_trim(0);
  const struct mallinfo2 facts = mallinfo2();
  now.allocated_kib = static_cast<int64_t>((facts.uordblks + facts.hblkhd) / 1024);
#endif
  std::ifstream in("/proc/self/statm");
  int64_t all = 0, resident = 0;
  in >> all >> resident;
  now.resident_kib = resident * sysconf(_SC_PAGESIZE) / 1024;
  return now;
}

// What may be left, however many calls there were: scratch memory for the largest list so far.
constexpr int64_t kMaxGrowthKib = 16 * 1024;

FuzzCount total() {
  FuzzCount sum;
  for (const auto& [name, count] : fuzz_stats().calls) {
    sum.accepted += count.accepted;
    sum.refused += count.refused;
  }
  return sum;
}

// Memory that odd sizes ask for is refused, not taken. Sanitizers reserve more addresses than that
// and have limits of their own (api_fuzz.cpp).
void limit_memory(uint64_t gib) {
  if (gib == 0 || kSanitized) return;
  const rlimit limit{gib << 30, gib << 30};
  setrlimit(RLIMIT_AS, &limit);
}

void run_input(uint64_t seed, uint64_t input) {
  constexpr size_t kBytes = 4096;
  std::mt19937_64 random(seed * 0x9E3779B97F4A7C15u + input);
  std::vector<uint8_t> bytes(kBytes);
  for (size_t i = 0; i < kBytes; i += 8) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, 8);
  }
  fuzz_one(bytes);
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  limit_memory(options.memory_gib);
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) ::signal(signal, on_crash);
  current_seed = options.seed;
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  uint64_t input = options.from, calls = 0;
  Memory warm;
  while (calls < options.calls || options.seconds != 0) {
    current_input = input;
    try {
      run_input(options.seed, input);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "api_fuzz: %s; --seed %" PRIu64 " --from %" PRIu64 "\n", error.what(),
                   options.seed, input);
      return 1;
    }
    ++input;
    const FuzzCount sum = total();
    calls = sum.accepted + sum.refused;
    if (input - options.from == 1 || input - options.from == 200) warm = memory_now();
    if (options.seconds != 0 && seconds() >= static_cast<double>(options.seconds)) break;
  }
  const FuzzCount sum = total();
  const Memory now = memory_now();
  if (options.list) {
    for (const auto& [name, count] : fuzz_stats().calls)
      std::printf("%10" PRIu64 " accepted %10" PRIu64 " refused  %s\n", count.accepted,
                  count.refused, name.c_str());
  }
  std::printf("api_fuzz: %" PRIu64 " calls of %zu kinds (%" PRIu64 " accepted, %" PRIu64
              " refused), %" PRIu64 " results checked, seed %" PRIu64 ", %" PRIu64
              " inputs, %.0f s, allocated memory %+" PRId64 " KiB, resident %+" PRId64 " KiB\n",
              calls, fuzz_stats().calls.size(), sum.accepted, sum.refused, fuzz_stats().compared,
              options.seed, input - options.from, seconds(), now.allocated_kib - warm.allocated_kib,
              now.resident_kib - warm.resident_kib);
  if (now.allocated_kib - warm.allocated_kib > kMaxGrowthKib) {
    std::fprintf(stderr, "api_fuzz: more memory is allocated than at the start\n");
    return 1;
  }
  return 0;
}
