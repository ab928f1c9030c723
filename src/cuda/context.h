#pragma once

#include <cstdint>
#include <string>

#include "cuda/driver.h"
#include "cuda/kernel.h"
#include "runtime/process.h"

namespace gyre::cuda {

bool ends_all_work(CuResult result);  // after it the context is of no more use

int attribute(const Driver& driver, CuDevice device, CuDeviceAttribute which);  // 0: unknown
CudaLimits limits_of(const Driver& driver, CuDevice device);

// The GPU's primary context, which all users of the GPU in this process share.
class Context {
 public:
  explicit Context(int ordinal);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();

  const Driver& api() const { return api_; }
  const CudaLimits& limits() const { return limits_; }
  int ordinal() const { return ordinal_; }
  std::string name() const;  // "cuda:0"
  // Whether a kernel can start before the one ahead has ended (programmatic dependent launch), in
  // graphs too. All kernels of the tables can: they call pdl_wait.
  bool has_pdl() const;

  // In a child of fork() the driver answers no call, and its objects are the parent's.
  bool is_inherited() const { return process_ != process_generation(); }
  void require_same_process() const;

  // Throws what a call returned. Use Stream::check where work may have failed.
  void check(CuResult result, const char* call) const;

 private:
  friend class Current;

  const Driver& api_;
  int ordinal_;
  CuDevice device_ = 0;
  CuContext context_ = nullptr;
  CudaLimits limits_;
  const uint64_t process_ = process_generation();
};

// Makes the context the calling thread's own while it lives.
class Current {
 public:
  explicit Current(const Context& context) : api_(context.api()) {
    api_.context_push(context.context_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current() {
    CuContext previous = nullptr;
    api_.context_pop(&previous);
  }

 private:
  const Driver& api_;
};

}  // namespace gyre::cuda
