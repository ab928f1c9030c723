#pragma once

#include "metal/driver.h"
#include "metal/kernel.h"
#include "metal/library.h"
#include "runtime/lazy_pipeline.h"

namespace gyre::metal {

// A kernel's entry function with its Spec as function constants.
class MetalPipeline final : public LazyPipeline {
 public:
  MetalPipeline(const Driver& api, LibraryCache& libraries, const KernelInfo& info,
                const MetalKernel& row, uint64_t key)
      : LazyPipeline(info, key), api_(api), libraries_(libraries), row_(row) {}
  ~MetalPipeline() override;

  const MetalKernel& row() const { return row_; }
  PipelineState* state() const { return state_; }        // after finish()
  uint32_t max_threads() const { return max_threads_; }  // after finish()

 private:
  void load() const override;

  const Driver& api_;
  LibraryCache& libraries_;
  const MetalKernel& row_;
  const uint64_t process_ = process_generation();

  mutable std::shared_ptr<LibraryText> text_;
  mutable PipelineState* state_ = nullptr;
  mutable uint32_t max_threads_ = 0;
};

}  // namespace gyre::metal
