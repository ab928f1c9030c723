// Prompts over f16 and bf16 on machines that multiply whole tiles (isa/prompt_kernels.h): blocks of
// up to 256 keys, at multiples of that, wherever their pages lie.

#if defined(GYRE_CPU_ATTENTION_PROMPT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_PROMPT_INL_H
#undef GYRE_CPU_ATTENTION_PROMPT_INL_H
#else
#define GYRE_CPU_ATTENTION_PROMPT_INL_H
#endif

#include <algorithm>

#include "cpu/attention/problem-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

class Prompt {
 public:
  static bool takes(const abi::AttentionParams& p) {
    const auto sixteen_bits = [](uint32_t format) {
      const auto stored = static_cast<KvFormat>(format);
      return stored == KvFormat::f16 || stored == KvFormat::bf16;
    };
    return attention_kernels().prompt != nullptr && p.latent == 0 && sixteen_bits(p.k.format) &&
           sixteen_bits(p.v.format);
  }

  explicit Prompt(WorkTile& work)
      : work_(work),
        kernels_(*attention_kernels().prompt),
        lanes_(std::min(prompt_lanes(work.k_dim()), prompt_lanes(work.v_dim()))) {
    auto* const keys = reinterpret_cast<uint8_t*>(work.scratch->kv);
    k_ = {keys, work.k.layout->format, work.k_dim(), lanes_};
    v_ = {work.scratch->values, work.v.layout->format, work.v_dim(), lanes_};
    q_stride_ = attention_kernels().split_queries(work.scratch->q, work.rows, work.k_dim(),
                                                  work.k.layout->format);
  }

  bool run() {
    std::fill_n(work_.scratch->acc, size_t{work_.rows} * work_.v_dim(), 0.0f);
    const AttentionKernels& set = attention_kernels();
    BlockWalk walk(*work_.params, work_.table, work_.bounds[0].begin,
                   work_.bounds[work_.rows - 1].end);
    KeyBlock page{};
    bool found = walk.next(page);
    Block blocks[2];
    for (uint32_t i = 0; i < 2; ++i) gather(walk, page, found, blocks[i]);
    for (uint32_t i = 0; blocks[i].k.end != 0; i = 1 - i) {
      if (task_ended()) return false;
      if (set.enter != nullptr) set.enter();
      take(blocks[i], blocks[1 - i]);
      if (set.leave != nullptr) set.leave();
      gather(walk, page, found, blocks[i]);
    }
    return true;
  }

  void read_row(uint32_t row, float* values) const {
    std::copy_n(work_.scratch->acc + size_t{row} * work_.v_dim(), work_.v_dim(), values);
  }

 private:
  struct Block {
    PromptBlock k, v;
    int64_t key = 0;  // of lane 0
  };

  // The next block: from `page` on what follows without a gap and belongs to the same keys.
  void gather(BlockWalk& walk, KeyBlock& page, bool& found, Block& block) const {
    block = Block();
    const int64_t first = page.key;
    const auto lane_of = [&] {
      constexpr uint32_t kTiles = kPromptKeys - abi::kKvTile;
      return static_cast<uint32_t>(page.key) & kTiles & (lanes_ - 1);
    };
    const auto same = [&](int64_t a, int64_t b) { return a >= b && a - b < lanes_; };
    block.key = first - lane_of();
    while (found && same(page.key, block.key) && page.key - lane_of() == block.key) {
      const uint32_t lane = lane_of();
      for (uint32_t i = page.begin; i < page.end; ++i) {
        const TilePlace tile{page.at.page, page.at.tile + i / abi::kKvTile};
        const uint64_t slot = i % abi::kKvTile;
        block.k.rows[lane + i] = work_.k.tile(tile) + slot * work_.k.slot_stride();
        block.v.rows[lane + i] = work_.v.tile(tile) + slot * work_.v.slot_stride();
      }
      if (block.k.end == 0) block.k.begin = block.v.begin = lane + page.begin;
      block.k.end = block.v.end = lane + page.end;
      found = walk.next(page);
    }
  }

  void take(const Block& block, const Block& next) {
    bool packed = false;
    for (uint32_t first = 0; first < work_.rows; first += kPromptRows) {
      PromptRows job = rows_of(block, first);
      if (job.begin >= job.end) continue;
      if (!packed) {
        kernels_.pack_keys(block.k, k_);
        kernels_.pack_values(block.v, v_);
        packed = true;
      }
      job.keys = prefetch(next.k, work_.k_dim(), first);
      job.values = prefetch(next.v, work_.v_dim(), first);
      kernels_.score(k_, work_.scratch->q + size_t{first} * q_stride_, job);
      alignas(64) float rescale[kPromptRows];
      make_weights(block, first, job, rescale);
      kernels_.accumulate(v_, block.v, job, rescale,
                          work_.scratch->acc + size_t{first} * work_.v_dim());
    }
  }

  // Lanes that some of the rows sees, in steps of 32. Bounds grow with the row.
  PromptRows rows_of(const Block& block, uint32_t first) const {
    constexpr int64_t kStep = 32;
    const uint32_t rows = std::min(work_.rows - first, kPromptRows);
    const int64_t begin = std::max<int64_t>(work_.bounds[first].begin - block.key, block.k.begin);
    const int64_t end =
        std::min<int64_t>(work_.bounds[first + rows - 1].end - block.key, block.k.end);
    PromptRows job;
    job.rows = rows;
    job.logits = work_.scratch->logits;
    if (begin >= end) return job;
    job.begin = static_cast<uint32_t>(begin / kStep * kStep);
    job.end = static_cast<uint32_t>((end + kStep - 1) / kStep * kStep);
    return job;
  }

  // These rows' part of the next block.
  PromptPrefetch prefetch(const PromptBlock& next, uint32_t head_dim, uint32_t first) const {
    const uint32_t count = next.end - next.begin, last = std::min(first + kPromptRows, work_.rows);
    return {&next, next.begin + count * first / work_.rows, next.begin + count * last / work_.rows,
            2 * head_dim};
  }

  // Scores become base-2 logits, then weights; `rescale` is for what was summed before.
  void make_weights(const Block& block, uint32_t first, const PromptRows& job, float* rescale) {
    const bool branches = work_.tree_mask != nullptr &&
                          block.key + block.k.end > abi::row_position<int64_t>(work_.mask, 0);
    const float of_scores = work_.params->scale * kLog2E;
    const bool plain = work_.plain() && of_scores > 0;
    alignas(64) float factor[kPromptRows], max[kPromptRows], reference[kPromptRows],
        sums[kPromptRows];
    for (uint32_t r = 0; r < job.rows; ++r) {
      float* const logits = job.logits + size_t{r} * kPromptStride;
      if (!plain)
        work_.make_logits(first + r, block.key + job.begin, job.end - job.begin, 1.0f,
                          logits + job.begin);
      factor[r] = plain ? of_scores : 1.0f;
      hide(block, first + r, job, branches, logits);
    }
    kernels_.find_max(job, max);
    for (uint32_t r = 0; r < job.rows; ++r) {
      SoftmaxState& state = work_.state[first + r];
      rescale[r] = state.raise(max[r] * factor[r]);
      reference[r] = state.reference();
    }
    kernels_.exponentiate(job, factor, reference, sums);
    for (uint32_t r = 0; r < job.rows; ++r) work_.state[first + r].sum += sums[r];
  }

  // -infinity where the row sees no key; its weight will be 0.
  void hide(const Block& block, uint32_t row, const PromptRows& job, bool branches,
            float* logits) const {
    const int64_t begin = std::max<int64_t>(work_.bounds[row].begin - block.key, block.k.begin);
    const int64_t end = std::min<int64_t>(work_.bounds[row].end - block.key, block.k.end);
    const auto clamp = [&](int64_t lane) {
      return logits + std::clamp<int64_t>(lane, job.begin, job.end);
    };
    std::fill(logits + job.begin, clamp(begin), kMinusInfinity);
    std::fill(clamp(std::max(begin, end)), logits + job.end, kMinusInfinity);
    if (!branches) return;
    for (int64_t lane = begin; lane < end; ++lane) {
      if (abi::tree_hides(work_.tree_mask + work_.own_token(row) * work_.params->tree_stride,
                          work_.mask, block.key + lane))
        logits[lane] = kMinusInfinity;
    }
  }

  WorkTile& work_;
  const PromptKernels& kernels_;
  const uint32_t lanes_;
  PromptOperand k_, v_;
  uint32_t q_stride_ = 0;  // floats from row to row of the queries
};

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
