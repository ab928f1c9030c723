// The fuzz target without libFuzzer, for every build: a fixed set of mutations of a good snapshot.
// With a path, writes that snapshot there, as a seed for the fuzzer.
#include <cstdio>
#include <fstream>
#include <random>

#include "cache/snapshot_seed.h"

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer calls it so
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<std::byte>;

void run(const Bytes& bytes) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
}

// The numbers that overflow, and small ones.
uint64_t number(std::mt19937_64& random) {
  const uint64_t shift = random() % 64;
  switch (random() % 4) {
    case 0:
      return uint64_t{1} << shift;
    case 1:
      return (uint64_t{1} << shift) - 1;
    case 2:
      return random() % 32;
    default:
      return ~(random() % 32);
  }
}

void mutate(Bytes& bytes, std::mt19937_64& random) {
  const size_t at = random() % bytes.size();
  switch (random() % 4) {
    case 0:
      bytes[at] = static_cast<std::byte>(random());
      break;
    case 1:
      bytes.resize(random() % 8 == 0 ? at : bytes.size() + random() % 3);
      break;
    default: {
      const uint64_t value = number(random);
      const size_t field = at % 512 / 4 * 4;  // mostly the header
      if (field + sizeof(value) <= bytes.size())
        std::memcpy(bytes.data() + field, &value, random() % 2 == 0 ? 4 : 8);
    }
  }
}

int write_seed(const char* path, const Bytes& seed) {
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(seed.data()), static_cast<std::streamsize>(seed.size()));
  return out.flush() ? 0 : 1;
}

void run_mutations(const Bytes& seed) {
  const gyre::BytesSource source("seed", seed);
  gyre::verify_snapshot(source, gyre::read_snapshot_header(source));  // throws unless it is good
  std::mt19937_64 random(1);
  constexpr int kRuns = 50'000;
  for (int i = 0; i < kRuns; ++i) {
    Bytes bytes = seed;
    for (uint64_t count = 1 + random() % 3; count != 0 && !bytes.empty(); --count)
      mutate(bytes, random);
    run(bytes);
  }
  std::printf("%d mutations of a snapshot of %zu bytes\n", kRuns, seed.size());
}

}  // namespace

int main(int argc, char** argv) {
  const Bytes seed = gyre::test::seed_snapshot();
  if (argc > 1) return write_seed(argv[1], seed);
  run_mutations(seed);
  run_mutations(gyre::test::seed_snapshot(gyre::kKvSnapshotVersion));
  return 0;
}
