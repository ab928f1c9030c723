#include "runtime/layout.h"

#include <algorithm>
#include <array>
#include <optional>

#include "runtime/require.h"

namespace gyre {
namespace {

constexpr uint64_t kMaxElements = (uint64_t{1} << 63) - 1;

uint64_t checked_product(const char* what, uint64_t a, uint64_t b, const Dims& dims) {
  uint64_t product = 0;
  require(!__builtin_mul_overflow(a, b, &product) && product <= kMaxElements, what, ": ", dims,
          " counts more than 2^63 - 1 elements");
  return product;
}

bool has_zero(const Dims& shape) { return std::find(shape.begin(), shape.end(), 0) != shape.end(); }

// Dimensions that move through memory, smallest stride first.
struct Steps {
  std::array<uint32_t, kMaxRank> dims{};
  uint32_t count = 0;
};

Steps sorted_steps(const Dims& shape, const Dims& strides) {
  Steps steps;
  for (uint32_t d = 0; d < shape.size(); ++d) {
    if (shape[d] <= 1) continue;
    uint32_t at = steps.count++;
    for (; at > 0 && strides[steps.dims[at - 1]] > strides[d]; --at)
      steps.dims[at] = steps.dims[at - 1];
    steps.dims[at] = d;
  }
  return steps;
}

// Two tensors that step through memory alike.
struct Grid {
  Dims a_shape, b_shape, strides;
  Steps steps;
};

// Whether sum(x_d * stride_d) == distance has a solution with x_d the difference of a position in a
// and one in b. Because the strides nest, at each step only the two multiples around the distance
// can leave a rest the inner steps reach.
bool reachable(const Grid& grid, uint32_t level, int64_t distance) {
  if (level == 0) return distance == 0;
  const uint32_t dim = grid.steps.dims[level - 1];
  const auto stride = static_cast<int64_t>(grid.strides[dim]);
  const auto max = static_cast<int64_t>(grid.a_shape[dim]) - 1;
  const auto min = 1 - static_cast<int64_t>(grid.b_shape[dim]);
  int64_t multiple = distance / stride;
  if (distance % stride < 0) --multiple;
  for (const int64_t x : {multiple, multiple + 1}) {
    if (x < min || x > max) continue;
    if (reachable(grid, level - 1, distance - x * stride)) return true;
  }
  return false;
}

}  // namespace

uint64_t checked_elements(const char* what, const Dims& shape) {
  if (has_zero(shape)) return 0;
  uint64_t elements = 1;
  for (const uint64_t n : shape) elements = checked_product(what, elements, n, shape);
  return elements;
}

uint64_t checked_bytes(const char* what, DType dtype, const Dims& shape) {
  uint64_t bytes = 0;
  const bool fits =
      !__builtin_mul_overflow(checked_elements(what, shape), size_bytes(dtype), &bytes);
  require(fits && bytes <= kMaxElements, what, ": shape ", shape, " of ", dtype,
          " has more than 2^63 - 1 bytes");
  return bytes;
}

uint64_t checked_extent(const char* what, const Dims& shape, const Dims& strides) {
  require(shape.size() == strides.size(), what, ": ", strides.size(),
          " strides for a shape of rank ", shape.size());
  if (has_zero(shape)) return 0;
  uint64_t extent = 1;
  for (uint32_t d = 0; d < shape.size(); ++d) {
    const uint64_t step = checked_product(what, shape[d] - 1, strides[d], strides);
    require(step <= kMaxElements - extent, what, ": shape ", shape, " with strides ", strides,
            " reaches past 2^63 - 1 elements");
    extent += step;
  }
  return extent;
}

Dims contiguous_strides(const Dims& shape) {
  Dims strides = shape;
  uint64_t stride = 1;
  for (uint32_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<uint64_t>(shape[d], 1);
  }
  return strides;
}

bool strides_nest(const Dims& shape, const Dims& strides) {
  if (has_zero(shape)) return true;
  const Steps steps = sorted_steps(shape, strides);
  uint64_t extent = 1;
  for (uint32_t i = 0; i < steps.count; ++i) {
    const uint32_t d = steps.dims[i];
    if (strides[d] < extent) return false;
    extent += (shape[d] - 1) * strides[d];
  }
  return true;
}

bool is_same_view(const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype() || a.shape() != b.shape()) return false;
  if (storage_of(a)->address() + a.byte_offset() != storage_of(b)->address() + b.byte_offset())
    return false;
  for (uint32_t d = 0; d < a.rank(); ++d) {
    if (a.shape(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

namespace {

uint64_t address(const Tensor& tensor) {
  return storage_of(tensor)->address() + tensor.byte_offset();
}

// The stride of a dimension of one entry means nothing: the other tensor's is taken.
std::optional<Grid> common_grid(const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype() || a.rank() != b.rank()) return std::nullopt;
  Grid grid{a.shape(), b.shape(), a.strides(), {}};
  Dims larger = a.shape();
  for (uint32_t d = 0; d < a.rank(); ++d) {
    if (a.shape(d) > 1 && b.shape(d) > 1 && a.stride(d) != b.stride(d)) return std::nullopt;
    if (a.shape(d) <= 1) grid.strides[d] = b.stride(d);
    larger[d] = std::max(a.shape(d), b.shape(d));
  }
  if (!strides_nest(larger, grid.strides)) return std::nullopt;
  grid.steps = sorted_steps(larger, grid.strides);
  return grid;
}

// Q and K in one row of a packed projection: the same step from token to token, and side by side
// within it.
bool lie_side_by_side(const Tensor& a, const Tensor& b) {
  const Steps a_steps = sorted_steps(a.shape(), a.strides());
  const Steps b_steps = sorted_steps(b.shape(), b.strides());
  if (a_steps.count == 0 || b_steps.count == 0) return false;
  const uint32_t a_outer = a_steps.dims[a_steps.count - 1],
                 b_outer = b_steps.dims[b_steps.count - 1];
  const uint64_t step = a.stride(a_outer) * size_bytes(a.dtype());
  if (step == 0 || step != b.stride(b_outer) * size_bytes(b.dtype())) return false;
  const uint64_t a_inner = a.span_bytes() - (a.shape(a_outer) - 1) * step;
  const uint64_t b_inner = b.span_bytes() - (b.shape(b_outer) - 1) * step;
  if (a_inner > step || b_inner > step) return false;
  const uint64_t apart = address(b) >= address(a)
                             ? (address(b) - address(a)) % step
                             : (step - (address(a) - address(b)) % step) % step;
  return apart >= a_inner && apart + b_inner <= step;
}

}  // namespace

bool grids_may_meet(const Tensor& a, const Tensor& b) {
  if (lie_side_by_side(a, b)) return false;
  const std::optional<Grid> grid = common_grid(a, b);
  if (!grid) return true;
  const auto distance = static_cast<int64_t>(address(b) - address(a));
  const auto unit = static_cast<int64_t>(size_bytes(a.dtype()));
  if (unit == 0 || distance % unit != 0) return true;
  return reachable(*grid, grid->steps.count, distance / unit);
}

}  // namespace gyre
