#pragma once
// What the threads of a simdgroup and of a thread group do together.

namespace metal {

// What the fibers do.
#if defined(GYRE_METAL_CHECK)
inline void meet_group() {}
inline void meet_simdgroup() {}
inline uint lane_index() { return 0; }
template <class T>
T value_of_lane(T value, uint /*lane*/) {
  return value;
}
#else
inline void meet_group() { gyre::fibers::wait(gyre::fibers::block->all); }
inline void meet_simdgroup() { gyre::fibers::wait(gyre::fibers::warp()); }
inline uint lane_index() { return gyre::fibers::lane(); }
template <class T>
T value_of_lane(T value, uint lane) {
  return gyre::fibers::shuffle(value, lane);
}
#endif

inline void threadgroup_barrier(mem_flags /*flags*/) { meet_group(); }
inline void simdgroup_barrier(mem_flags /*flags*/) { meet_simdgroup(); }

template <class T>
T simd_shuffle(T value, ushort lane) {
  return value_of_lane(value, lane);
}
template <class T>
T simd_shuffle_xor(T value, ushort mask) {
  return value_of_lane(value, lane_index() ^ mask);
}
// Lanes before the first keep what they have; Metal leaves it open.
template <class T>
T simd_shuffle_up(T value, ushort delta) {
  const uint lane = lane_index();
  return value_of_lane(value, lane >= delta ? lane - delta : lane);
}
template <class T>
T simd_max(T value) {
  for (ushort step = 16; step != 0; step /= 2) value = max(value, simd_shuffle_xor(value, step));
  return value;
}
template <class T>
T simd_min(T value) {
  for (ushort step = 16; step != 0; step /= 2) value = min(value, simd_shuffle_xor(value, step));
  return value;
}
inline bool simd_any(bool value) { return simd_max<uint>(value ? 1 : 0) != 0; }

// 8 x 8 values, two with each lane; which ones is Metal's affair, so that the text must not know.
// Here they are of two rows, there of one.
template <class T>
struct simdgroup_matrix8x8 {
  T values[2] = {};

  thread T (&thread_elements())[2] { return values; }

  static uint row(uint i) { return (lane_index() + 3 * i) % 8; }
  static uint column(uint i) { return lane_index() / 8 * 2 + i; }
  // Who has a value; it is that lane's `column % 2`.
  static uint lane_of(uint row, uint column) {
    return column / 2 * 8 + (row + 8 - 3 * (column % 2)) % 8;
  }
};
using simdgroup_float8x8 = simdgroup_matrix8x8<float>;

template <class T, int kRows, int kColumns>
simdgroup_matrix8x8<T> make_filled_simdgroup_matrix(T value) {
  static_assert(kRows == 8 && kColumns == 8);
  return {{value, value}};
}
// Nobody waits for the others here: Metal does not promise it, so that a text without its barriers
// fails.
template <class T, class Pointer>
void simdgroup_load(thread simdgroup_matrix8x8<T>& m, Pointer from, ulong stride) {
  for (uint i = 0; i < 2; ++i) m.values[i] = from[m.row(i) * stride + m.column(i)];
}
template <class T, class Pointer>
void simdgroup_load(thread simdgroup_matrix8x8<T>& m, Pointer from, ulong stride, ulong2 /*origin*/,
                    bool transpose) {
  for (uint i = 0; i < 2; ++i) {
    m.values[i] =
        transpose ? from[m.column(i) * stride + m.row(i)] : from[m.row(i) * stride + m.column(i)];
  }
}
template <class T, class Pointer>
void simdgroup_store(simdgroup_matrix8x8<T> m, Pointer to, ulong stride) {
  for (uint i = 0; i < 2; ++i) to[m.row(i) * stride + m.column(i)] = m.values[i];
}
template <class T, class Pointer>
void simdgroup_store(simdgroup_matrix8x8<T> m, Pointer to, ulong stride, ulong2 /*origin*/,
                     bool transpose) {
  for (uint i = 0; i < 2; ++i)
    to[transpose ? m.column(i) * stride + m.row(i) : m.row(i) * stride + m.column(i)] = m.values[i];
}
// Every lane puts down its values, then each computes its own sums in order.
template <class T>
void simdgroup_multiply_accumulate(thread simdgroup_float8x8& d, thread simdgroup_matrix8x8<T>& a,
                                   thread simdgroup_matrix8x8<T>& b, thread simdgroup_float8x8& c) {
#if defined(GYRE_METAL_CHECK)
  (void)a, (void)b;
  d = c;
#else
  const auto word = [](T x, T y) {
    return uint64_t{as_type<uint32_t>(float(x))} | uint64_t{as_type<uint32_t>(float(y))} << 32;
  };
  const auto value = [](uint64_t words, uint i) {
    return as_type<float>(static_cast<uint32_t>(words >> (32 * i)));
  };
  gyre::fibers::with_operands(
      {word(a.values[0], a.values[1]), word(b.values[0], b.values[1])}, [&](const auto* lanes) {
        for (uint i = 0; i < 2; ++i) {
          float sum = c.values[i];
          for (uint k = 0; k < 8; ++k) {
            const uint row = a.row(i), column = b.column(i);
            const float x = value(lanes[a.lane_of(row, k)][0], k % 2);
            const float y = value(lanes[b.lane_of(k, column)][1], column % 2);
            sum = std::fma(x, y, sum);
          }
          d.values[i] = sum;
        }
      });
#endif
}

}  // namespace metal
