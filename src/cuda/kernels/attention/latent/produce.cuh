#pragma once
// Latent attention: what the producer warpgroup does. It brings the queries of a work item, then
// stage after stage the keys, as 16-bit floats: decoded values over the key's unit, which is 1
// unless they leave f16's range.
#include "cuda/kernels/attention/latent/stage_keys.cuh"

namespace gyre::cuda {

template <class T>
class LatentProducer : StageKeys<T> {
  using Base = StageKeys<T>;
  using typename Base::LaneTile;
  using Base::args_, Base::p_, Base::state_, Base::walk_, Base::count_;
  using Base::sync, Base::thread;

 public:
  LatentProducer(const abi::AttentionParams& p, const Args& args, const LatentScratch& scratch)
      : Base(p, args), scratch_(scratch) {}

  // A work item; `item` counts those of the block.
  void run(const LatentWork& work, uint32_t item) {
    this->start(work);
    const uint32_t stages = walk_.template stages<T::kKeys>();
    prefetch();
    wait_for_phase(&state_.q_empty, item % 2 ^ 1);
    if (thread() == 0) state_.bad = 0;
    sync();
    copy_queries(work);
    LaneTile now = this->find_stage_tile(0), next = this->find_stage_tile(1);
    typename Base::Scales scales = this->load_scales(now);
#pragma unroll 1
    for (uint32_t stage = 0; stage < stages; ++stage, ++count_.n) {
      const LaneTile after = this->find_stage_tile(stage + 2);
      const typename Base::Scales next_scales = this->load_scales(next);
      bring(stage, now, scales);
      PhaseBarrier* const full = &state_.full[count_.slot()];
      if (hides(work, stage)) {
        copy_wait<0>();
        this->mend();
      }
      if constexpr (T::kCopied) arrive_when_copied(full);
      fence_operands();
      arrive(full);
      now = next, next = after, scales = next_scales;
    }
  }

 private:
  // All of the work item's keys on their way to L2.
  void prefetch() {
    for (uint32_t i = thread(); i < walk_.tiles; i += kLatentGroup) {
      const LaneTile t = this->find_tile(i);
      // Not beyond the last slots of a cache, or over other bytes between the rows.
      if (!t.present || (p_.table.page_tokens == 0 && (t.tile + 1) * abi::kKvTile > p_.capacity))
        continue;
      const auto fetch = [&](uint64_t codes, uint64_t stride, uint32_t bytes) {
        if (stride == bytes) prefetch_l2(codes + t.offset(stride), bytes);
      };
      fetch(args_.at[arg_k_codes], p_.k.codes_tile_stride, Base::kRowBytes * 8);
      fetch(args_.at[arg_v_codes], p_.v.codes_tile_stride, Base::kRotaryTileBytes);
    }
  }

  void copy_queries(const LatentWork& work) {
    constexpr uint32_t kChunks = T::kKDim / 8;
    const uint64_t from = args_.at[arg_partial] + scratch_.q +
                          (uint64_t{work.first_token} * p_.heads + work.first_row) * T::kKDim * 2;
    unsigned char* const to = dynamic_shared() + T::kLayout.q;
    for (uint32_t i = thread(); i < kLatentRows * kChunks; i += kLatentGroup) {
      const uint32_t row = i / kChunks, chunk = i % kChunks;
      const bool present = row < work.rows();
      copy_async<16>(shared_address(to + operand_byte(T::kLayout.q_panel, row, chunk)),
                     pointer<const void>(present ? from + uint64_t{i} * 16 : from), present);
    }
  }

  void bring(uint32_t stage, const LaneTile& tile, const typename Base::Scales& scales) {
    typename Base::Loaded first;
    this->load_first(tile, first);
    wait_for_phase(&state_.empty[count_.slot()], count_.phase() ^ 1);
    this->describe_keys(stage, tile, scales, false);
    sync();
    bring_keys<false>(tile, first);
    if constexpr (Base::kMayLeave) {
      sync();
      if (state_.leaves[count_.slot()] != 0) bring_again(stage, tile, scales);
    }
  }
  template <bool kScaled>
  void bring_keys(const LaneTile& tile, typename Base::Loaded& first) {
    this->template copy_keys<kScaled>(tile);
    copy_commit();
    this->unpack_keys(tile, first);
    if constexpr (!T::kCopied) copy_wait<0>();
    if constexpr (Base::kConverts || kScaled) {
      sync();
      this->template convert_keys<kScaled>();
    }
  }
  // Values that leave f16's range: units from all of a key's values. Rare.
  void bring_again(uint32_t stage, const LaneTile& tile, const typename Base::Scales& scales) {
    typename Base::Loaded first;
    this->load_first(tile, first);
    this->describe_keys(stage, tile, scales, true);
    sync();
    bring_keys<true>(tile, first);
    sync();
    if (thread() == 0) state_.leaves[count_.slot()] = 0;
    sync();
  }

  // Whether some rows do not see some keys of the stage.
  bool hides(const LatentWork& work, uint32_t stage) const {
    const auto heads = static_cast<uint32_t>(p_.heads);
    const uint32_t oldest = work.first_row / heads,
                   newest = (work.first_row + work.rows() - 1) / heads;
    if (oldest == newest) return false;
    const abi::RowMask<int64_t> mask = latent_mask(p_, work);
    const int64_t from = abi::row_bounds<int64_t>(mask, newest, work.begin, work.end).begin;
    const int64_t to = abi::row_bounds<int64_t>(mask, oldest, work.begin, work.end).end;
    const uint32_t begin = stage * T::kKeys;
    if (!walk_.whole(begin)) return true;
    const int64_t key = walk_.first_key + static_cast<int64_t>(walk_.key_at(begin));
    return key < from || key + T::kKeys > to;
  }

  const LatentScratch& scratch_;
};

}  // namespace gyre::cuda
