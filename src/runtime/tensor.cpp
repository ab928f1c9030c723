#include "gyre/tensor.h"

#include <algorithm>
#include <cstring>
#include <ostream>
#include <utility>
#include <vector>

#include "runtime/layout.h"
#include "runtime/require.h"
#include "runtime/storage.h"

namespace gyre {

Dims::Dims(std::initializer_list<uint64_t> values)
    : Dims(std::span(values.begin(), values.size())) {}

Dims::Dims(std::span<const uint64_t> values) : size_(static_cast<uint32_t>(values.size())) {
  require(values.size() <= kMaxRank, "dims: at most ", kMaxRank, " dimensions, got ",
          values.size());
  std::copy(values.begin(), values.end(), values_.begin());
}

bool Dims::operator==(const Dims& other) const {
  return std::equal(begin(), end(), other.begin(), other.end());
}

std::string Dims::text() const try {
  std::string text = "[";
  for (uint32_t i = 0; i < size_; ++i) {
    if (i != 0) text += ", ";
    text += std::to_string(values_[i]);
  }
  return text + "]";
} catch (const std::bad_alloc&) {
  out_of_memory("dims.text");
}

std::ostream& operator<<(std::ostream& out, const Dims& dims) { return out << dims.text(); }

Tensor::Tensor(std::shared_ptr<Storage> storage, DType dtype, const Dims& shape,
               const Dims& strides)
    : storage_(std::move(storage)), dtype_(dtype) {
  set_layout(shape, strides);
}

void Tensor::swap(Tensor& other) noexcept {
  std::swap(storage_, other.storage_);
  std::swap(byte_offset_, other.byte_offset_);
  std::swap(elements_, other.elements_);
  std::swap(span_bytes_, other.span_bytes_);
  std::swap(shape_, other.shape_);
  std::swap(strides_, other.strides_);
  std::swap(dtype_, other.dtype_);
  std::swap(injective_, other.injective_);
}

// Kept, not computed when asked for: every recorded command asks.
void Tensor::set_layout(const Dims& shape, const Dims& strides) {
  shape_ = shape;
  strides_ = strides;
  elements_ = 1;
  uint64_t last = 0;
  for (uint32_t d = 0; d < shape.size(); ++d) {
    elements_ *= shape[d];
    last += (shape[d] - 1) * strides[d];
  }
  span_bytes_ = elements_ == 0 ? 0 : (last + 1) * size_bytes(dtype_);
  injective_ = strides_nest(shape, strides);
}

void Tensor::refuse_dim(uint32_t dim) const {
  fail(ErrorCode::invalid_argument, "tensor: dimension ", dim, " of a tensor of rank ", rank());
}

uint64_t Tensor::address() const {
  return defined() && storage_->bytes() != 0 ? storage_->address() + byte_offset_ : 0;
}

bool Tensor::is_read_only() const { return defined() && storage_->read_only(); }

bool Tensor::is_contiguous() const {
  if (elements_ == 0) return true;
  uint64_t expected = 1;
  for (uint32_t d = rank(); d-- > 0;) {
    if (shape_[d] != 1 && strides_[d] != expected) return false;
    expected *= shape_[d];
  }
  return true;
}

Tensor Tensor::slice(uint32_t dim, uint64_t begin, uint64_t count) const {
  require(defined(), "tensor.slice: the tensor is undefined");
  require(dim < rank(), "tensor.slice: dimension ", dim, " of a tensor of rank ", rank());
  require(begin <= shape_[dim] && count <= shape_[dim] - begin, "tensor.slice: dimension ", dim,
          " has ", shape_[dim], " entries, asked for ", count, " from ", begin);
  Tensor view = *this;
  Dims shape = shape_;
  shape[dim] = count;
  view.set_layout(shape, strides_);
  if (count != 0) view.byte_offset_ += begin * strides_[dim] * size_bytes(dtype_);
  return view;
}

Tensor Tensor::permute(const Dims& order) const {
  require(defined(), "tensor.permute: the tensor is undefined");
  require(order.size() == rank(), "tensor.permute: ", order.size(),
          " dimensions for a tensor of rank ", rank());
  Dims shape = shape_, strides = strides_;
  uint32_t seen = 0;
  for (uint32_t d = 0; d < rank(); ++d) {
    require(order[d] < rank() && (seen >> order[d] & 1u) == 0, "tensor.permute: ", order,
            " is not an order of ", rank(), " dimensions");
    const auto from = static_cast<uint32_t>(order[d]);
    seen |= 1u << from;
    shape[d] = shape_[from];
    strides[d] = strides_[from];
  }
  Tensor view = *this;
  view.set_layout(shape, strides);
  return view;
}

Tensor Tensor::reshape(const Dims& shape) const {
  require(defined(), "tensor.reshape: the tensor is undefined");
  require(is_contiguous(), "tensor.reshape: needs a contiguous tensor, got shape ", shape_,
          " with strides ", strides_);
  require(checked_elements("tensor.reshape", shape) == elements(), "tensor.reshape: ", shape_,
          " does not have the elements of ", shape);
  Tensor view = *this;
  view.set_layout(shape, contiguous_strides(shape));
  return view;
}

Tensor Tensor::strided(const Dims& shape, const Dims& strides, uint64_t offset_elements) const {
  require(defined(), "tensor.strided: the tensor is undefined");
  checked_bytes("tensor.strided", dtype_, shape);
  const uint64_t extent = checked_extent("tensor.strided", shape, strides);
  const uint64_t available = checked_extent("tensor.strided", shape_, strides_);
  require(offset_elements <= available && extent <= available - offset_elements,
          "tensor.strided: shape ", shape, " with strides ", strides, " from element ",
          offset_elements, " leaves a view of ", available, " elements");
  Tensor view = *this;
  view.set_layout(shape, strides);
  if (extent != 0) view.byte_offset_ += offset_elements * size_bytes(dtype_);
  return view;
}

void* Tensor::host_data(DType dtype, bool writable) const {
  require(defined(), "tensor.data: the tensor is undefined");
  require(dtype == dtype_, "tensor.data: the tensor holds ", dtype_, ", asked for ", dtype);
  require(is_contiguous(), "tensor.data: needs a contiguous tensor, got shape ", shape_,
          " with strides ", strides_);
  require(!writable || !storage_->read_only(),
          "tensor.data: the memory was wrapped read-only, ask for const elements");
  if (elements() == 0) return nullptr;
  require(storage_->host() != nullptr,
          "tensor.data: the memory is not visible to the host; use write_from and read_to");
  return static_cast<std::byte*>(storage_->host()) + byte_offset_;
}

namespace {

enum class Direction : uint8_t { to_tensor, to_host };

// Walks the view in row-major order; the host side is contiguous.
void copy_strided(const Tensor& tensor, uint32_t dim, std::byte* element, std::byte*& host,
                  Direction direction) {
  const uint64_t unit = size_bytes(tensor.dtype());
  if (dim == tensor.rank()) {
    std::memcpy(direction == Direction::to_tensor ? element : host,
                direction == Direction::to_tensor ? host : element, unit);
    host += unit;
    return;
  }
  if (dim + 1 == tensor.rank() && tensor.stride(dim) == 1) {
    const uint64_t bytes = tensor.shape(dim) * unit;
    std::memcpy(direction == Direction::to_tensor ? element : host,
                direction == Direction::to_tensor ? host : element, bytes);
    host += bytes;
    return;
  }
  for (uint64_t i = 0; i < tensor.shape(dim); ++i)
    copy_strided(tensor, dim + 1, element + i * tensor.stride(dim) * unit, host, direction);
}

// Memory the host cannot reach: the longest contiguous stretches, in row-major order.
// action(offset in the storage, bytes).
template <class Action>
void for_each_run(const Tensor& tensor, uint32_t dim, uint64_t offset, const Action& action) {
  const uint64_t unit = size_bytes(tensor.dtype());
  uint64_t run = 1;
  bool contiguous = true;
  for (uint32_t d = tensor.rank(); d-- > dim;) {
    contiguous = contiguous && (tensor.shape(d) == 1 || tensor.stride(d) == run);
    run *= tensor.shape(d);
  }
  if (contiguous) return action(offset, run * unit);
  for (uint64_t i = 0; i < tensor.shape(dim); ++i)
    for_each_run(tensor, dim + 1, offset + i * tensor.stride(dim) * unit, action);
}

// Run by run: what lies between the elements may be written by others at the same time.
void write_runs(const Tensor& tensor, const std::byte* from) {
  for_each_run(tensor, 0, tensor.byte_offset(), [&](uint64_t offset, uint64_t bytes) {
    storage_of(tensor)->write(offset, from, bytes);
    from += bytes;
  });
}

void read_runs(const Tensor& tensor, std::byte* to) {
  // One copy of all that lies between the first and the last element is faster than many small
  // ones, unless most of it is not asked for.
  constexpr uint64_t kMaxWaste = 8, kSmall = 1 << 20;
  const bool sparse = tensor.span_bytes() > kMaxWaste * tensor.bytes() + kSmall;
  if (sparse || tensor.is_contiguous()) {
    for_each_run(tensor, 0, tensor.byte_offset(), [&](uint64_t offset, uint64_t bytes) {
      storage_of(tensor)->read(offset, to, bytes);
      to += bytes;
    });
    return;
  }
  std::vector<std::byte> span(tensor.span_bytes());
  storage_of(tensor)->read(tensor.byte_offset(), span.data(), span.size());
  copy_strided(tensor, 0, span.data(), to, Direction::to_host);
}

}  // namespace

void Tensor::host_write(DType dtype, const void* source, uint64_t count) const try {
  require(defined(), "tensor.write_from: the tensor is undefined");
  require(dtype == dtype_, "tensor.write_from: the tensor holds ", dtype_, ", got ", dtype);
  require(count == elements(), "tensor.write_from: the tensor has ", elements(), " elements, got ",
          count);
  require(!storage_->read_only(), "tensor.write_from: the memory was wrapped read-only");
  require(injective_, "tensor.write_from: strides ", strides_, " make elements of shape ", shape_,
          " share memory");
  storage_->require_same_process("tensor.write_from");
  if (count == 0) return;
  if (storage_->host() == nullptr) return write_runs(*this, static_cast<const std::byte*>(source));
  auto* host = static_cast<std::byte*>(const_cast<void*>(source));
  copy_strided(*this, 0, static_cast<std::byte*>(storage_->host()) + byte_offset_, host,
               Direction::to_tensor);
} catch (const std::bad_alloc&) {
  out_of_memory("tensor.write_from");
}

void Tensor::host_read(DType dtype, void* target, uint64_t count) const try {
  require(defined(), "tensor.read_to: the tensor is undefined");
  require(dtype == dtype_, "tensor.read_to: the tensor holds ", dtype_, ", asked for ", dtype);
  require(count == elements(), "tensor.read_to: the tensor has ", elements(), " elements, got ",
          count);
  storage_->require_same_process("tensor.read_to");
  if (count == 0) return;
  if (storage_->host() == nullptr) return read_runs(*this, static_cast<std::byte*>(target));
  auto* host = static_cast<std::byte*>(target);
  copy_strided(*this, 0, static_cast<std::byte*>(storage_->host()) + byte_offset_, host,
               Direction::to_host);
} catch (const std::bad_alloc&) {
  out_of_memory("tensor.read_to");
}

}  // namespace gyre
