#pragma once
// Caches and sequences whose keys, values and queries follow from their tokens alone: the same
// tokens must give the same bits, whatever they went through.

#include <mutex>

#include "gyre/gyre.h"
#include "stress/life_state.h"

namespace gyre::test {

using LifeBits = std::vector<uint32_t>;

class CacheTalk {
 public:
  explicit CacheTalk(const Device& device);

  void append(std::span<const int32_t> tokens);
  void rollback(uint64_t count);  // refused by a window: nothing changes
  void fork();                    // goes on in a copy
  void clear();
  void load(const std::string& path, LifeTokens tokens);
  void save(const std::string& path) const { cache_.save(path); }
  // What the layers answer to this token, which is then taken back.
  LifeBits answer(int32_t token);
  const LifeTokens& tokens() const { return tokens_; }

 private:
  Encoder encoder_;
  KvCache cache_;
  LifeTokens tokens_;
};

// One thread at a time.
struct LifePool {
  explicit LifePool(const Device& device);

  std::mutex mutex{};
  KvPool pool;
  KvBatch batch;
  Encoder encoder;
};

class SequenceTalk {
 public:
  explicit SequenceTalk(LifePool& pool) : pool_(&pool), sequence_(pool.pool.sequence()) {}

  void append(std::span<const int32_t> tokens);
  void rollback(uint64_t count);
  void fork() { sequence_ = sequence_.fork(); }
  void clear();
  void save(const std::string& path) const { pool_->pool.save(sequence_, path); }
  void load(const std::string& path, LifeTokens tokens);
  void publish() const { pool_->pool.publish(sequence_, tokens_); }
  void match(std::span<const int32_t> tokens);
  void travel();  // out and in again, page by page
  LifeBits answer(int32_t token);
  const LifeTokens& tokens() const { return tokens_; }

 private:
  LifePool* pool_;
  KvSequence sequence_;
  LifeTokens tokens_;
};

}  // namespace gyre::test
