#pragma once
// How a kernel is described: its name, the size of its Params, its arguments, its Spec.

#include <array>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace gyre {

constexpr uint32_t kMaxArgs = 16;

enum class Access : uint8_t;  // of gyre/custom_kernel.h
constexpr Access kArgRead{0}, kArgWrite{1}, kArgReadWrite{2};

struct ArgInfo {
  const char* name = nullptr;
  Access access = kArgRead;
  bool appended = false;  // a write changes only bytes of the tokens that the command is given
};

constexpr ArgInfo reads(const char* name) { return {name, kArgRead}; }
constexpr ArgInfo writes(const char* name) { return {name, kArgWrite}; }
constexpr ArgInfo updates(const char* name) { return {name, kArgReadWrite}; }

struct ArgList {
  std::array<ArgInfo, kMaxArgs> args{};
  uint32_t count = 0;

  constexpr ArgList(std::initializer_list<ArgInfo> list) { append(list); }
  constexpr void append(std::initializer_list<ArgInfo> list) {
    for (const ArgInfo& arg : list) args.at(count++) = arg;
  }
};

struct KernelCode;

// Identity is the address: one inline constant per kernel.
struct KernelInfo {
  const char* name = nullptr;
  uint32_t params_bytes = 0;
  uint32_t arg_count = 0;
  std::array<ArgInfo, kMaxArgs> args{};
  bool once = false;                 // its params hold for one moment: graphs refuse it
  const KernelCode* code = nullptr;  // of a kernel that is in no table
};

// Ties a kernel to its Spec and Params types, so that a wrong pair does not compile. Problem: what
// a device plans before an op of this kernel is dispatched; void: nothing.
template <class Spec, class Params, class Problem = void>
struct Kernel {
  static_assert(sizeof(Spec) == 8, "a Spec is the pipeline key: exactly 8 bytes");
  static_assert(std::is_trivially_copyable_v<Params> && alignof(Params) <= 8);

  KernelInfo info;

  constexpr Kernel(const char* name, const ArgList& list, bool once = false)
      : info{name, sizeof(Params), list.count, list.args, once} {}
};

template <class Spec>
constexpr uint64_t spec_key(const Spec& spec) {
  return std::bit_cast<uint64_t>(spec);
}

template <class Spec>
constexpr Spec spec_from_key(uint64_t key) {
  return std::bit_cast<Spec>(key);
}

}  // namespace gyre
