#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "gyre/dtype.h"
#include "gyre/export.h"

namespace gyre {

class Storage;  // a block of device memory; shared by every tensor that views it

constexpr uint32_t kMaxRank = 6;

// A short list of 64-bit numbers: a shape, strides in elements, or an order of dimensions.
class GYRE_API Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<uint64_t> values);
  explicit Dims(std::span<const uint64_t> values);

  uint32_t size() const { return size_; }
  uint64_t operator[](uint32_t i) const { return values_[i]; }
  uint64_t& operator[](uint32_t i) { return values_[i]; }
  const uint64_t* begin() const { return values_.data(); }
  const uint64_t* end() const { return values_.data() + size_; }
  bool operator==(const Dims& other) const;
  std::string text() const;  // "[512, 8, 128]"

 private:
  std::array<uint64_t, kMaxRank> values_{};
  uint32_t size_ = 0;
};

GYRE_API std::ostream& operator<<(std::ostream& out, const Dims& dims);

// A typed, strided view of a Storage. Copying a Tensor copies the handle, never the data; the
// storage lives until its last tensor, and until every submitted command that uses it has finished.
// Strides count elements and are never negative; stride 0 repeats an element (for reading only).
// A tensor that was moved from is undefined: no storage, no elements.
class GYRE_API Tensor {
 public:
  Tensor() = default;
  Tensor(const Tensor&) = default;
  Tensor& operator=(const Tensor&) = default;
  Tensor(Tensor&& other) noexcept { swap(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    Tensor taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~Tensor() = default;

  bool defined() const { return storage_ != nullptr; }
  DType dtype() const { return dtype_; }
  uint32_t rank() const { return shape_.size(); }
  const Dims& shape() const { return shape_; }
  uint64_t shape(uint32_t dim) const {
    if (dim >= rank()) refuse_dim(dim);
    return shape_[dim];
  }
  const Dims& strides() const { return strides_; }
  uint64_t stride(uint32_t dim) const {
    if (dim >= rank()) refuse_dim(dim);
    return strides_[dim];
  }
  uint64_t elements() const { return elements_; }
  uint64_t bytes() const { return elements_ * size_bytes(dtype_); }
  uint64_t byte_offset() const { return byte_offset_; }  // from the start of the storage
  uint64_t span_bytes() const { return span_bytes_; }    // first to last byte the view can touch
  uint64_t address() const;   // of the first element, as the device sees it; 0: no memory
  bool is_read_only() const;  // the memory was wrapped read-only
  bool is_contiguous() const;
  bool is_injective() const {
    return injective_;
  }  // strides nest: no two positions share an element

  // Views share memory with this tensor. All positions are relative to this view and refused when
  // they leave it.
  Tensor slice(uint32_t dim, uint64_t begin, uint64_t count) const;
  Tensor permute(const Dims& order) const;
  Tensor reshape(const Dims& shape) const;  // contiguous tensors only
  // Bounded by this view's extent, from its first element to its last: a view with gaps lets the
  // new one reach what lies in them.
  Tensor strided(const Dims& shape, const Dims& strides, uint64_t offset_elements = 0) const;

  // The elements in host memory: contiguous, host-visible tensors of exactly this element type.
  // T may be const; it must be for memory that was wrapped read-only.
  template <class T>
  std::span<T> data() const {
    constexpr bool kWritable = !std::is_const_v<T>;
    return {static_cast<T*>(host_data(DTypeOf<std::remove_const_t<T>>::value, kWritable)),
            elements()};
  }

  // Copies all elements, in row-major order of this view, from or to host memory of the same type.
  template <class T>
  void write_from(std::span<const T> source) const {
    host_write(DTypeOf<T>::value, source.data(), source.size());
  }
  template <class T>
  void read_to(std::span<T> target) const {
    host_read(DTypeOf<T>::value, target.data(), target.size());
  }

 private:
  friend class Device;
  friend struct Internals;
  Tensor(std::shared_ptr<Storage> storage, DType dtype, const Dims& shape, const Dims& strides);

  void set_layout(const Dims& shape, const Dims& strides);
  void swap(Tensor& other) noexcept;

  [[noreturn]] void refuse_dim(uint32_t dim) const;
  void* host_data(DType dtype, bool writable) const;
  void host_write(DType dtype, const void* source, uint64_t count) const;
  void host_read(DType dtype, void* target, uint64_t count) const;

  std::shared_ptr<Storage> storage_;
  uint64_t byte_offset_ = 0;
  uint64_t elements_ = 0;
  uint64_t span_bytes_ = 0;
  Dims shape_;
  Dims strides_;
  DType dtype_ = DType::f32;
  bool injective_ = true;
};

}  // namespace gyre
