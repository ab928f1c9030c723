#pragma once
// For the lists of instances (kernels/*.cpp): include it before a kernel's text.

#include <type_traits>
#include <utility>

#include "cuda/kernels/kernel_args.cuh"
#include "cuda_host/host_kernels.h"
// Last: it brings CUDA's words.
#include "cuda_host/cuda_host.h"

namespace gyre::cuda_host {

template <auto kKernel>
struct Runner;
template <class... Params, void (*kKernel)(Params...)>
struct Runner<kKernel> {
  static_assert(sizeof...(Params) <= 3);

  static void run(const HostShape& shape, uint32_t cluster, const void* const* params,
                  const std::function<void()>& ahead) {
    command_ahead = ahead;
    run_with(shape, cluster, params, std::index_sequence_for<Params...>());
  }
  template <size_t... kIndices>
  static void run_with(const HostShape& shape, uint32_t cluster, const void* const* params,
                       std::index_sequence<kIndices...> /*all*/) {
    const uint32_t* const grid = shape.grid;
    launch_clusters(dim3(grid[0], grid[1], grid[2]), cluster, shape.threads, shape.shared_bytes,
                    kKernel, *static_cast<const std::remove_cvref_t<Params>*>(params[kIndices])...);
  }
  static constexpr HostKernel named(std::string_view name) {
    return {name,
            sizeof...(Params),
            {sizeof(std::remove_cvref_t<Params>)...},
            (std::is_base_of_v<cuda::EarlyBits, std::remove_cvref_t<Params>> || ...),
            run};
  }
};

}  // namespace gyre::cuda_host

// An instance, by the words of its name expression.
#define GYRE_HOST(...) \
  gyre::cuda_host::Runner<gyre::cuda::__VA_ARGS__>::named("gyre::cuda::" #__VA_ARGS__)
// The instances of a file.
#define GYRE_HOST_KERNELS(...)                              \
  namespace gyre::cuda_host {                               \
  namespace {                                               \
  constexpr HostKernel kKernels[] = {__VA_ARGS__};          \
  [[maybe_unused]] const HostKernels kRegistered{kKernels}; \
  }                                                         \
  }

// f of each type of floats, as name expressions spell them; f_to(of, type).
#define GYRE_EACH_FLOAT(f) f(float) f(gyre::cuda::Half) f(gyre::cuda::BFloat16)
#define GYRE_EACH_FLOAT_TO(f, of) f(of, float) f(of, gyre::cuda::Half) f(of, gyre::cuda::BFloat16)
