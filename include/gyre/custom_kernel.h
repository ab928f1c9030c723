#pragma once
// Kernels of your own beside Gyre's: recorded by the same encoder, ordered by the memory they
// touch, replayed in the same graphs, shown in the same traces. docs/custom_kernels.md.

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "gyre/encoder.h"
#include "gyre/export.h"
#include "gyre/tensor.h"

namespace gyre {

enum class Access : uint8_t { read, write, read_write };

struct CustomArg {
  std::string name;  // in errors
  Access access = Access::read;
};

// Code for the CPU: one of `tasks` tasks, which run in any order and at the same time. `params` is
// what was recorded, args[i] the address of argument i's first element, 0 if it is absent.
using CustomTask = void (*)(const void* params, const uint64_t* args, uint32_t task,
                            uint32_t tasks) noexcept;

// Code for CUDA, compiled on first use and kept on disk as Gyre's own. `source` is CUDA C++ with
//   __global__ void NAME(const Params params, const Args args)
// where Params has the layout of what is recorded, and Args is `struct { uint64_t at[16]; }`, the
// addresses. `name` is its name, with template arguments if it has any.
struct CustomCuda {
  std::string source, name;
};

// Code for Metal, compiled on first use. `source` is MSL with
//   kernel void NAME(constant Params& params [[buffer(0)]], device T* x [[buffer(1)]], ...)
// argument i of the kernel is buffer(1 + i). `constant uint& arguments [[buffer(17)]]` has bit i
// where argument i is there, [[threadgroup(0)]] the launch's shared_bytes. `name` is its name.
struct CustomMetal {
  std::string source, name;
};

struct CustomCode {
  std::string name;             // in traces and errors
  std::vector<CustomArg> args;  // 1 to 16
  uint64_t params_bytes = 0;    // 1 to 1024
  CustomTask cpu = nullptr;     // null: not on the CPU
  CustomCuda cuda = {};         // empty: not on CUDA
  CustomMetal metal = {};       // empty: not on Metal
};

// How much of it runs. A zero: nothing to do.
struct CustomLaunch {
  uint32_t tasks = 1;            // CPU
  uint32_t grid[3] = {1, 1, 1};  // CUDA: blocks; Metal: threadgroups,
  uint32_t block = 128;          // threads of each,
  uint32_t shared_bytes = 0;     // and their dynamic shared or threadgroup memory
};

struct KernelCode;

// A handle: copies are the same kernel. Its code stays while a handle, a list or a graph needs it.
class GYRE_API CustomKernel {
 public:
  explicit CustomKernel(CustomCode code);

  const std::string& name() const;

  // Arguments in the order of CustomCode::args; an undefined tensor is absent. Kernels get
  // addresses alone: strides, if they matter, are your Params'. Memory is ordered by the bytes that
  // a tensor spans.
  template <class Params>
  void operator()(Encoder& encoder, const Params& params, std::initializer_list<Tensor> args,
                  const CustomLaunch& launch) const {
    static_assert(std::is_trivially_copyable_v<Params> && alignof(Params) <= 8);
    record(encoder, {reinterpret_cast<const std::byte*>(&params), sizeof(params)},
           {args.begin(), args.size()}, launch);
  }
  void record(Encoder& encoder, std::span<const std::byte> params, std::span<const Tensor> args,
              const CustomLaunch& launch) const;

 private:
  friend GYRE_API bool supports(const Device& device, const CustomKernel& kernel);
  const KernelCode& code() const;

  std::shared_ptr<const KernelCode> code_;
};

// Whether the kernel has code for this device.
GYRE_API bool supports(const Device& device, const CustomKernel& kernel);

}  // namespace gyre
