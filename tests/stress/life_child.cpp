// The process that lives: eight threads, each with a cache and a sequence of a pool that four
// share.
#include <memory>
#include <random>

#include "in_threads.h"
#include "resident_bytes.h"
#include "stress/life_talks.h"

namespace gyre::test {
namespace {

struct Folder {
  std::string path;
  std::string cache(size_t thread) const { return path + "/cache" + std::to_string(thread); }
  std::string sequence(size_t thread) const { return path + "/sequence" + std::to_string(thread); }
  std::string prefixes(size_t pool) const { return path + "/prefixes" + std::to_string(pool); }
};

class ThreadLife {
 public:
  ThreadLife(LifeShared& shared, const Folder& folder, const Device& device, LifePool& pool,
             size_t thread, uint64_t seed)
      : shared_(shared),
        folder_(folder),
        pool_(pool),
        thread_(thread),
        random_(seed * kLifeThreads + thread),
        cache_(device),
        fresh_cache_(device),
        sequence_(pool),
        alone_(device),
        fresh_sequence_(alone_) {}

  // What the life before saved is there: the old file or, where it was killed in a save, the new.
  void recover() {
    recover_file(shared_.files[thread_][0], folder_.cache(thread_), cache_, fresh_cache_);
    const std::lock_guard lock(pool_.mutex);
    recover_file(shared_.files[thread_][1], folder_.sequence(thread_), sequence_, fresh_sequence_);
    if (thread_ >= kLifePools || access(folder_.prefixes(thread_).c_str(), F_OK) != 0) return;
    try {
      pool_.pool.load_prefixes(folder_.prefixes(thread_));
    } catch (const Error& error) {
      demand(error.code() == ErrorCode::out_of_memory, error.what());  // others took the pages
    }
  }

  void run() {
    while (shared_.stop.load() == 0) {
      if (random_() % 2 == 0) {
        step_cache();
      } else {
        const std::lock_guard lock(pool_.mutex);
        step_sequence();
      }
    }
    save(shared_.files[thread_][0], folder_.cache(thread_), cache_);
    const std::lock_guard lock(pool_.mutex);
    save(shared_.files[thread_][1], folder_.sequence(thread_), sequence_);
    if (thread_ < kLifePools) pool_.pool.save_prefixes(folder_.prefixes(thread_));
  }

 private:
  void count(LifeOperation operation) { ++shared_.operations[operation]; }

  // Few different beginnings, so that prefixes are shared.
  LifeTokens next_tokens(const LifeTokens& had, uint64_t count) {
    LifeTokens made;
    const auto kind = static_cast<int32_t>(random_() % 4);
    for (uint64_t i = 0; i < count; ++i)
      made.push_back(kind * 1000 + static_cast<int32_t>(had.size() + i));
    return made;
  }

  template <class Talk>
  void compare(Talk& talk, Talk& fresh, const char* what) {
    fresh.clear();
    fresh.append(talk.tokens());
    const auto token = static_cast<int32_t>(random_() % 5000);
    demand(talk.answer(token) == fresh.answer(token), std::string(what) +
                                                          " answers otherwise than its tokens, " +
                                                          std::to_string(talk.tokens().size()));
    ++shared_.compared;
  }

  template <class Talk>
  bool answers_as(Talk& talk, Talk& fresh, const LifeTokens& tokens) {
    fresh.clear();
    fresh.append(tokens);
    return talk.answer(77) == fresh.answer(77);
  }

  template <class Talk>
  void recover_file(LifeFile& file, const std::string& path, Talk& talk, Talk& fresh) {
    const std::optional<LifeTokens> old_tokens = file.old_tokens();
    if (access(path.c_str(), F_OK) != 0) {
      demand(!old_tokens, path + " is gone");
      file.settle_old();
      return;
    }
    ++shared_.recovered;
    if (file.saving()) {
      ++shared_.unfinished;
      talk.load(path, *file.new_tokens());
      if (answers_as(talk, fresh, *file.new_tokens())) return file.end_save();
    }
    demand(old_tokens.has_value(), path + " is there and was never saved");
    talk.load(path, *old_tokens);
    demand(answers_as(talk, fresh, *old_tokens), path + " holds something else than was saved");
    file.settle_old();
  }

  template <class Talk>
  void save(LifeFile& file, const std::string& path, const Talk& talk) {
    file.begin_save(talk.tokens());
    talk.save(path);
    file.end_save();
    count(life_save);
  }

  template <class Talk>
  void append(Talk& talk) {
    const uint64_t tokens = random_() % 3 == 0 ? 1 + random_() % 16 : 1;
    if (talk.tokens().size() + tokens > kLifeMaxTokens) talk.clear();
    talk.append(next_tokens(talk.tokens(), tokens));
    count(life_append);
  }

  // True: one of the operations that caches and sequences share.
  template <class Talk>
  bool step(uint64_t pick, LifeFile& file, const std::string& path, Talk& talk, Talk& fresh) {
    if (pick < 45) {
      append(talk);
    } else if (pick < 55) {
      talk.rollback(random_() % (std::min<size_t>(talk.tokens().size(), 6) + 1));
      count(life_truncate);
    } else if (pick < 65) {
      talk.fork();
      count(life_fork);
    } else if (pick < 75) {
      save(file, path, talk);
    } else if (pick < 80) {
      if (const std::optional<LifeTokens> tokens = file.old_tokens()) talk.load(path, *tokens);
      count(life_load);
    } else if (pick < 83) {
      compare(talk, fresh, path.c_str());
    } else {
      return false;
    }
    if (random_() % 64 == 0) shared_.resident_kib = resident_bytes() / 1024;
    return true;
  }

  void step_cache() {
    step(random_() % 83, shared_.files[thread_][0], folder_.cache(thread_), cache_, fresh_cache_);
  }

  void step_sequence() {
    const uint64_t pick = random_() % 100;
    try {
      if (step(pick, shared_.files[thread_][1], folder_.sequence(thread_), sequence_,
               fresh_sequence_))
        return;
      if (pick < 89) {
        sequence_.publish();
        count(life_publish);
      } else if (pick < 94) {
        sequence_.match(next_tokens({}, 8 + random_() % 60));
        count(life_match);
      } else if (pick < 99) {
        sequence_.travel();
        count(life_travel);
      } else if (thread_ < kLifePools) {
        pool_.pool.save_prefixes(folder_.prefixes(thread_));
        count(life_prefixes);
      }
    } catch (const Error& error) {
      demand(error.code() == ErrorCode::out_of_memory, error.what());  // the pool is full
      sequence_ = SequenceTalk(pool_);
    }
  }

  LifeShared& shared_;
  const Folder& folder_;
  LifePool& pool_;
  size_t thread_;
  std::mt19937_64 random_;
  CacheTalk cache_, fresh_cache_;
  SequenceTalk sequence_;
  LifePool alone_;
  SequenceTalk fresh_sequence_;
};

}  // namespace

int live(LifeShared& shared, const std::string& path, uint64_t seed) try {
  const Folder folder{path};
  const Device device = Device::open("cpu", {.threads = 2, .spin_us = 0});
  std::vector<std::unique_ptr<LifePool>> pools;
  for (size_t i = 0; i < kLifePools; ++i) pools.push_back(std::make_unique<LifePool>(device));
  std::atomic<bool> failed = false;
  in_threads(kLifeThreads, [&](size_t i) {
    try {
      LifePool& pool = *pools[i % kLifePools];
      std::unique_lock lock(pool.mutex);  // its sequences come and go one after the other
      const auto life = std::make_unique<ThreadLife>(shared, folder, device, pool, i, seed);
      lock.unlock();
      life->recover();
      life->run();
      lock.lock();
    } catch (const std::exception& error) {
      shared.fail("thread " + std::to_string(i) + ": " + error.what());
      failed = true;
      shared.stop = 1;
    }
  });
  return failed ? 1 : 0;
} catch (const std::exception& error) {
  shared.fail(error.what());
  return 1;
}

}  // namespace gyre::test
