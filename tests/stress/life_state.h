#pragma once
// What the parent of a stress life keeps outside the process that is killed: which tokens each file
// must hold, how far the child came, and what it found wrong.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace gyre::test {

constexpr size_t kLifeThreads = 8, kLifePools = 2;
constexpr uint64_t kLifeMaxTokens = 96;

// A rule was broken.
struct LifeFailure : std::logic_error {
  using std::logic_error::logic_error;
};
inline void demand(bool holds, const std::string& rule) {
  if (!holds) throw LifeFailure(rule);
}

enum LifeOperation : size_t {
  life_append,
  life_truncate,
  life_fork,
  life_save,
  life_load,
  life_publish,
  life_match,
  life_travel,
  life_prefixes,
  life_operations,
};
constexpr std::array<const char*, life_operations> kLifeOperations = {
    "append", "truncate",          "fork",    "save", "load", "publish",
    "match",  "export and import", "prefixes"};

using LifeTokens = std::vector<int32_t>;

// The tokens of a file: those of the last save that returned, or of the one that was killed.
class LifeFile {
 public:
  void begin_save(std::span<const int32_t> tokens) {
    const uint32_t word = word_.load();
    Content& next = contents_[1 - (word & 1)];
    next.exists = 1;
    next.length = static_cast<uint32_t>(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) next.tokens[i] = tokens[i];
    word_.store(word | 2u);
  }
  void end_save() { word_.store(1 - (word_.load() & 1)); }  // one store: killed before or after it
  bool saving() const { return (word_.load() & 2) != 0; }

  // None: there is no such file.
  std::optional<LifeTokens> old_tokens() const { return tokens(word_.load() & 1); }
  std::optional<LifeTokens> new_tokens() const { return tokens(1 - (word_.load() & 1)); }
  void settle_old() { word_.store(word_.load() & 1); }

 private:
  struct Content {
    uint32_t exists = 0, length = 0;
    std::array<int32_t, kLifeMaxTokens> tokens{};
  };

  std::optional<LifeTokens> tokens(size_t which) const {
    const Content& content = contents_[which];
    if (content.exists == 0) return std::nullopt;
    return LifeTokens(content.tokens.begin(), content.tokens.begin() + content.length);
  }

  std::array<Content, 2> contents_{};
  std::atomic<uint32_t> word_{
      0};  // bit 0: which content is the old one; bit 1: a save is under way
};

// In memory that parent and child share.
struct LifeShared {
  std::array<std::array<LifeFile, 2>, kLifeThreads> files{};  // of a cache, of a sequence
  std::array<std::atomic<uint64_t>, life_operations> operations{};
  std::atomic<uint64_t> compared{0};    // answers against those of a fresh cache
  std::atomic<uint64_t> recovered{0};   // files that were loaded after a kill
  std::atomic<uint64_t> unfinished{0};  // of them, saves that were killed
  std::atomic<uint64_t> resident_kib{0};
  std::atomic<uint32_t> stop{0};
  std::array<char, 512> failure{};

  uint64_t all_operations() const {
    uint64_t sum = 0;
    for (const auto& count : operations) sum += count.load();
    return sum;
  }
  void fail(const std::string& why) {
    std::snprintf(failure.data(), failure.size(), "%s", why.c_str());
  }
};

// Opens a device, loads what the life before saved, compares it, and goes on at random until it is
// killed or told to stop. Returns the exit status.
int live(LifeShared& shared, const std::string& folder, uint64_t seed);

}  // namespace gyre::test
