#pragma once
// A kernel's MSL text as a host kernel: a source that CMake writes for each text includes it, then
// this, then names it with GYRE_METAL_KERNEL.

#include <tuple>
#include <utility>

namespace gyre::metal_host {

template <class T>
struct SourceOf;
template <class Params, class... Rest>
struct SourceOf<void (*)(Params&, Rest...)> {
  static constexpr size_t kOthers = 8;  // GYRE_GRID_ARGUMENTS
  static constexpr size_t kArgs = sizeof...(Rest) - kOthers;
  using Pointers = std::tuple<Rest...>;

  template <size_t... kIndex>
  static void call(void (*entry)(Params&, Rest...), const HostDispatch& d,
                   std::index_sequence<kIndex...> /*args*/) {
    fibers::block->running->pdl_waited = true;  // nothing is launched ahead of its time
    const uint index = fibers::thread_index.x;
    const auto vector = [](const fibers::Index& i) { return ::metal::uint3{i.x, i.y, i.z}; };
    // The text may not change them.
    auto& params = *static_cast<Params*>(const_cast<void*>(d.params));
    uint arguments = d.arguments;
    entry(params, static_cast<std::tuple_element_t<kIndex, Pointers>>(d.args[kIndex])..., arguments,
          fibers::dynamic_shared(), vector(fibers::block_index), vector(fibers::grid_size),
          vector(fibers::block_size), index, index % fibers::kWarp, index / fibers::kWarp);
  }
};

template <class Params, class... Rest>
void run_text(void (*entry)(Params&, Rest...), const HostDispatch& d) {
  using Source = SourceOf<void (*)(Params&, Rest...)>;
  fibers::launch({d.grid[0], d.grid[1], d.grid[2]}, d.threads, d.threadgroup_bytes,
                 [&] { Source::call(entry, d, std::make_index_sequence<Source::kArgs>()); });
}

}  // namespace gyre::metal_host

#define GYRE_METAL_KERNEL(entry)                                            \
  static void run_##entry(const gyre::metal_host::HostDispatch& dispatch) { \
    spec_low = dispatch.spec_low;                                           \
    spec_high = dispatch.spec_high;                                         \
    gyre::metal_host::run_text(&entry, dispatch);                           \
  }                                                                         \
  [[maybe_unused]] static const bool entry##_registered =                   \
      gyre::metal_host::register_kernel({#entry, run_##entry});
