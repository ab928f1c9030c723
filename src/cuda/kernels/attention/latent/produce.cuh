#pragma once
// Latent attention: what the producer warpgroup does. It brings the keys of a work item, stage
// after stage, as 16-bit floats: decoded values over the key's unit, which is 1 unless they leave
// f16's range.
#include "cuda/kernels/attention/latent/stage_keys.cuh"

namespace gyre::cuda {

template <class T>
class LatentProducer : StageKeys<T> {
  using Base = StageKeys<T>;
  using Base::args_, Base::p_, Base::state_, Base::walk_, Base::count_;
  using Base::sync, Base::thread;
  using typename Base::LaneTile;
  using typename Base::Scales;

 public:
  LatentProducer(const abi::AttentionParams& p, const Args& args) : Base(p, args) {}

  // A work item; `item` counts those of the block.
  void run(const LatentWork& work, uint32_t item) {
    this->start(work, item);
    const uint32_t stages = walk_.template stages<T::kKeys>();
    wait_for_phase(&state_.done[item % 2], item / 2 % 2 ^ 1);
    if (thread() == 0) state_.invalid[item % 2] = 0;
    sync();
    LaneTile now = this->find_stage_tile(0), next = this->find_stage_tile(1);
    Scales scales = this->load_scales(now);
#pragma unroll 1
    for (uint32_t stage = 0; stage < stages; ++stage, ++count_.n) {
      const LaneTile after = this->find_stage_tile(stage + 2);
      const Scales next_scales = this->load_scales(next);
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
  void bring(uint32_t stage, const LaneTile& tile, const Scales& scales) {
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
  void bring_again(uint32_t stage, const LaneTile& tile, const Scales& scales) {
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
};

}  // namespace gyre::cuda
