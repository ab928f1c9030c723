// A stress life: a child process with eight threads works on caches and pools at random, is killed
// at random moments and started again; what it saved is loaded and compared with what this parent
// knows.
// usage: life_test [--kills N] [--operations N] [--seconds N] [--seed N]
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cinttypes>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <random>
#include <set>

#include "stress/life_state.h"

namespace {

using namespace gyre::test;

struct Options {
  uint64_t kills = 20, operations = 4000, seconds = 0, seed = 1;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    uint64_t* const value = name == "--kills"        ? &options.kills
                            : name == "--operations" ? &options.operations
                            : name == "--seconds"    ? &options.seconds
                            : name == "--seed"       ? &options.seed
                                                     : nullptr;
    if (value == nullptr || ++i == argc) {
      std::fprintf(stderr, "usage: %s [--kills N] [--operations N] [--seconds N] [--seed N]\n",
                   argv[0]);
      std::exit(2);
    }
    *value = std::strtoull(argv[i], nullptr, 10);
  }
  return options;
}

LifeShared& share() {
  void* const memory =
      mmap(nullptr, sizeof(LifeShared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  demand(memory != MAP_FAILED, "no memory to share");
  return *new (memory) LifeShared;
}

pid_t start(LifeShared& shared, const std::string& folder, uint64_t seed) {
  std::fflush(nullptr);
  const pid_t child = fork();
  demand(child >= 0, "fork failed");
  if (child == 0) _exit(live(shared, folder, seed));
  return child;
}

bool ended(pid_t child, int& status, int flags) { return waitpid(child, &status, flags) == child; }

// Until the child has done so many operations more.
void wait_for(LifeShared& shared, pid_t child, uint64_t operations) {
  const uint64_t goal = shared.all_operations() + operations;
  int status = 0;
  for (int i = 0; shared.all_operations() < goal; ++i) {
    demand(!ended(child, status, WNOHANG), "the child ended by itself, status " +
                                               std::to_string(status) + ": " +
                                               shared.failure.data());
    demand(i < 60'000, "the child hangs");
    usleep(1000);
  }
}

void kill_child(pid_t child, std::mt19937_64& random) {
  usleep(static_cast<useconds_t>(random() % 2000));
  kill(child, SIGKILL);
  int status = 0;
  demand(ended(child, status, 0) && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL,
         "the child ended before it was killed, status " + std::to_string(status));
}

// Files of every thread and pool, and nothing that a killed save left.
void check_folder(const std::string& folder) {
  std::set<std::string> wanted, found;
  for (size_t i = 0; i < kLifeThreads; ++i) {
    wanted.insert("cache" + std::to_string(i));
    wanted.insert("sequence" + std::to_string(i));
  }
  for (size_t i = 0; i < kLifePools; ++i) wanted.insert("prefixes" + std::to_string(i));
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    found.insert(entry.path().filename().string());
  demand(found == wanted, "the folder holds " + std::to_string(found.size()) +
                              " files, wanted are " + std::to_string(wanted.size()));
}

void run(const Options& options, LifeShared& shared, const std::string& folder) {
  std::mt19937_64 random(options.seed);
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  uint64_t kills = 0;
  const uint64_t limit = 2 * options.operations / options.kills + 1;
  while (options.seconds != 0
             ? seconds() < static_cast<double>(options.seconds)
             : kills < options.kills || shared.all_operations() < options.operations) {
    const pid_t child = start(shared, folder, random());
    wait_for(shared, child, random() % limit);
    kill_child(child, random);
    ++kills;
  }
  // One that is not killed: its memory stays as it is, and it leaves its files alone.
  const pid_t last = start(shared, folder, random());
  wait_for(shared, last, 500);
  const uint64_t warm = shared.resident_kib.load();
  wait_for(shared, last, options.operations / 20 + 500);
  const uint64_t now = shared.resident_kib.load();
  shared.stop = 1;
  int status = 0;
  demand(ended(last, status, 0) && WIFEXITED(status) && WEXITSTATUS(status) == 0,
         std::string("the last child failed: ") + shared.failure.data());
  check_folder(folder);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr uint64_t kMaxGrowth = 256 * 1024;  // a sanitizer keeps what was freed
#else
  constexpr uint64_t kMaxGrowth = 16 * 1024;
#endif
  demand(now < warm + kMaxGrowth, "resident memory grew by " + std::to_string(now - warm) + " KiB");
  std::printf("life: %" PRIu64 " operations of %zu threads, %" PRIu64 " kills; %" PRIu64
              " files loaded after them, %" PRIu64 " of saves that were killed; %" PRIu64
              " answers compared; seed %" PRIu64 ", %.0f s, resident memory %+" PRId64 " KiB\n",
              shared.all_operations(), kLifeThreads, kills, shared.recovered.load(),
              shared.unfinished.load(), shared.compared.load(), options.seed, seconds(),
              static_cast<int64_t>(now) - static_cast<int64_t>(warm));
  for (size_t i = 0; i < life_operations; ++i)
    std::printf("%10" PRIu64 " %s\n", shared.operations[i].load(), kLifeOperations[i]);
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  std::string folder =
      (access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp") + std::string("/gyre_life_XXXXXX");
  int status = 0;
  try {
    demand(mkdtemp(folder.data()) != nullptr, "no folder");
    run(options, share(), folder);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "life: %s; --seed %" PRIu64 "\n", error.what(), options.seed);
    status = 1;
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return status;
}
