#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>

#include "cuda/compiler.h"
#include "cuda/context.h"
#include "gyre/error.h"
#include "runtime/command_list.h"

namespace gyre::cuda {

// A kernel on its way from source to the GPU. Whoever asks first builds it, a thread of the
// device's or one that waits for it; others wait. That it does not compile is remembered. Other
// failures may pass (memory was short): who asks again builds again.
class CudaPipeline final : public Pipeline {
 public:
  CudaPipeline(std::shared_ptr<const Context> context, KernelCompiler& compiler,
               const KernelInfo& kernel, const CudaKernel& row, uint64_t key);
  ~CudaPipeline() override;

  const CudaKernel& row() const { return row_; }
  CuFunction function() const { return function_; }  // after finish()
  bool from_cache() const { return from_cache_; }    // after finish()

  void build() const noexcept;  // unless somebody does or did

 private:
  enum class State : uint8_t { idle, building, done };

  void wait() const override;
  void build(std::unique_lock<std::mutex>& lock) const;
  void load() const;

  const std::shared_ptr<const Context> context_;
  KernelCompiler& compiler_;
  const CudaKernel& row_;

  // Pipelines are handed out as const: building one is not a change to see.
  mutable std::mutex mutex_;
  mutable std::condition_variable done_;
  mutable State state_ = State::idle;
  mutable std::optional<Error> error_;
  mutable bool from_cache_ = false;
  mutable CuModule module_ = nullptr;
  mutable CuFunction function_ = nullptr;
};

CompileJob compile_job(const KernelInfo& kernel, const CudaKernel& row, uint64_t spec,
                       const CudaLimits& limits);

}  // namespace gyre::cuda
