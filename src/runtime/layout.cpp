#include "runtime/layout.h"

#include <algorithm>
#include <array>

#include "runtime/require.h"
#include "runtime/storage.h"

namespace gyre {
namespace {

constexpr uint64_t kMaxElements = (uint64_t{1} << 63) - 1;

uint64_t checked_product(const char* what, uint64_t a, uint64_t b, const Dims& dims) {
  uint64_t product = 0;
  require(!__builtin_mul_overflow(a, b, &product) && product <= kMaxElements, what, ": ", dims.text(),
          " counts more than 2^63 - 1 elements");
  return product;
}

bool has_zero(const Dims& shape) { return std::find(shape.begin(), shape.end(), 0) != shape.end(); }

// Dimensions that move through memory, smallest stride first.
struct Steps {
  std::array<uint32_t, kMaxRank> dims{};
  uint32_t count = 0;
};

Steps sorted_steps(const Tensor& tensor) {
  Steps steps;
  for (uint32_t d = 0; d < tensor.rank(); ++d) {
    if (tensor.shape(d) <= 1) continue;
    uint32_t at = steps.count++;
    for (; at > 0 && tensor.stride(steps.dims[at - 1]) > tensor.stride(d); --at) {
      steps.dims[at] = steps.dims[at - 1];
    }
    steps.dims[at] = d;
  }
  return steps;
}

// Whether sum(x_d * stride_d) == distance has a solution with |x_d| < shape_d. Because the strides nest,
// at each step only the two multiples around the distance can leave a rest the inner steps reach.
bool reachable(const Tensor& tensor, const Steps& steps, uint32_t level, int64_t distance) {
  if (level == 0) return distance == 0;
  const uint32_t dim = steps.dims[level - 1];
  const auto stride = static_cast<int64_t>(tensor.stride(dim));
  const auto limit = static_cast<int64_t>(tensor.shape(dim)) - 1;
  int64_t multiple = distance / stride;
  if (distance % stride < 0) --multiple;
  for (const int64_t x : {multiple, multiple + 1}) {
    if (x < -limit || x > limit) continue;
    if (reachable(tensor, steps, level - 1, distance - x * stride)) return true;
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

uint64_t checked_extent(const char* what, const Dims& shape, const Dims& strides) {
  require(shape.size() == strides.size(), what, ": ", strides.size(), " strides for a shape of rank ",
          shape.size());
  if (has_zero(shape)) return 0;
  uint64_t extent = 1;
  for (uint32_t d = 0; d < shape.size(); ++d) {
    const uint64_t step = checked_product(what, shape[d] - 1, strides[d], strides);
    require(step <= kMaxElements - extent, what, ": shape ", shape.text(), " with strides ", strides.text(),
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

bool is_injective(const Tensor& tensor) {
  if (tensor.elements() == 0) return true;
  const Steps steps = sorted_steps(tensor);
  uint64_t extent = 1;
  for (uint32_t i = 0; i < steps.count; ++i) {
    const uint64_t stride = tensor.stride(steps.dims[i]);
    if (stride < extent) return false;
    extent += (tensor.shape(steps.dims[i]) - 1) * stride;
  }
  return true;
}

bool may_overlap(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined() || a.elements() == 0 || b.elements() == 0) return false;
  const uint64_t a_begin = a.storage()->address() + a.byte_offset();
  const uint64_t b_begin = b.storage()->address() + b.byte_offset();
  if (a_begin >= b_begin + b.span_bytes() || b_begin >= a_begin + a.span_bytes()) return false;
  const bool same_grid = a.dtype() == b.dtype() && a.shape() == b.shape() && a.strides() == b.strides();
  if (!same_grid || !is_injective(a)) return true;
  const auto distance = static_cast<int64_t>(b_begin - a_begin);
  const auto unit = static_cast<int64_t>(size_bytes(a.dtype()));
  if (distance % unit != 0) return true;
  const Steps steps = sorted_steps(a);
  return reachable(a, steps, steps.count, distance / unit);
}

}  // namespace gyre
