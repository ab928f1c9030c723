#include "gyre/c/tensor.h"

#include <algorithm>
#include <span>

#include "c_api/enums.h"
#include "c_api/handles.h"
#include "c_api/structs.h"

using namespace gyre::c_api;

static_assert(GYRE_MAX_RANK == gyre::kMaxRank);

namespace {

gyre::Dims dims(uint32_t rank, const uint64_t* values, const char* name) {
  if (rank > gyre::kMaxRank) refuse("rank is ", rank, ", at most ", gyre::kMaxRank);
  if (rank != 0) deref(values, name);
  return gyre::Dims(std::span(values, rank));
}

const gyre::Tensor& value(const gyre_tensor* tensor) { return deref(tensor, "tensor").value; }

// Calls `body` with a null pointer to the element type.
template <class Body>
void with_element(gyre::DType dtype, const Body& body) {
  switch (dtype) {
    case gyre::DType::f32:
      return body(static_cast<float*>(nullptr));
    case gyre::DType::f16:
      return body(static_cast<gyre::Half*>(nullptr));
    case gyre::DType::bf16:
      return body(static_cast<gyre::BFloat16*>(nullptr));
    case gyre::DType::u8:
      return body(static_cast<uint8_t*>(nullptr));
    case gyre::DType::i32:
      return body(static_cast<int32_t*>(nullptr));
    case gyre::DType::u32:
      return body(static_cast<uint32_t*>(nullptr));
    case gyre::DType::i64:
      return body(static_cast<int64_t*>(nullptr));
  }
}

void check_bytes(const gyre::Tensor& tensor, uint64_t bytes) {
  if (bytes != tensor.bytes()) refuse("the tensor has ", tensor.bytes(), " bytes, got ", bytes);
}

}  // namespace

gyre_status gyre_tensor_create(const gyre_device* device, gyre_dtype element, uint32_t rank,
                               const uint64_t* shape, gyre_tensor** tensor) {
  return make(__func__, tensor, "tensor", [&] {
    return deref(device, "device")
        .value.tensor(dtype(element, "dtype"), dims(rank, shape, "shape"));
  });
}

gyre_status gyre_tensor_wrap(const gyre_device* device, const gyre_memory* memory,
                             gyre_tensor** tensor) {
  return guard(__func__, [&] {
    deref(tensor, "tensor") = nullptr;
    const gyre::Device& on = deref(device, "device").value;
    const gyre_memory given = read(memory, "memory");
    const gyre::DType type = dtype(given.dtype, "memory.dtype");
    const gyre::Dims shape = dims(given.rank, given.shape, "memory.shape");
    const gyre::Dims strides =
        given.strides != nullptr ? dims(given.rank, given.strides, "memory.strides") : gyre::Dims();
    auto made = std::make_unique<gyre_tensor>();
    // Armed once nothing can fail any more: a refused call must not release.
    const auto armed = std::make_shared<bool>(false);
    const std::shared_ptr<void> owner(given.context, [armed, release = given.release](void* held) {
      if (*armed && release != nullptr) release(held);
    });
    made->value = given.read_only != 0
                      ? on.wrap(static_cast<const void*>(given.data), type, shape, strides, owner)
                      : on.wrap(given.data, type, shape, strides, owner);
    *armed = true;
    *tensor = made.release();
  });
}

void gyre_tensor_destroy(gyre_tensor* tensor) { destroy(__func__, tensor, "tensor"); }

gyre_status gyre_tensor_get_info(const gyre_tensor* tensor, gyre_tensor_info* info) {
  return guard(__func__, [&] {
    const gyre::Tensor& t = value(tensor);
    gyre_tensor_info filled{.size = 0,
                            .dtype = from_dtype(t.dtype()),
                            .rank = t.rank(),
                            .shape = {},
                            .strides = {},
                            .elements = t.elements(),
                            .bytes = t.bytes(),
                            .address = t.address(),
                            .read_only = t.is_read_only(),
                            .contiguous = t.is_contiguous()};
    std::copy(t.shape().begin(), t.shape().end(), filled.shape);
    std::copy(t.strides().begin(), t.strides().end(), filled.strides);
    write(info, filled, "info");
  });
}

gyre_status gyre_tensor_slice(const gyre_tensor* tensor, uint32_t dim, uint64_t begin,
                              uint64_t count, gyre_tensor** view) {
  return make(__func__, view, "view", [&] { return value(tensor).slice(dim, begin, count); });
}

gyre_status gyre_tensor_permute(const gyre_tensor* tensor, uint32_t rank, const uint64_t* order,
                                gyre_tensor** view) {
  return make(__func__, view, "view",
              [&] { return value(tensor).permute(dims(rank, order, "order")); });
}

gyre_status gyre_tensor_reshape(const gyre_tensor* tensor, uint32_t rank, const uint64_t* shape,
                                gyre_tensor** view) {
  return make(__func__, view, "view",
              [&] { return value(tensor).reshape(dims(rank, shape, "shape")); });
}

gyre_status gyre_tensor_strided(const gyre_tensor* tensor, const gyre_strided_view* layout,
                                gyre_tensor** view) {
  return make(__func__, view, "view", [&] {
    const gyre_strided_view given = read(layout, "layout");
    return value(tensor).strided(dims(given.rank, given.shape, "layout.shape"),
                                 dims(given.rank, given.strides, "layout.strides"),
                                 given.offset_elements);
  });
}

gyre_status gyre_tensor_data(const gyre_tensor* tensor, void** data) {
  return guard(__func__, [&] {
    void*& out = deref(data, "data") = nullptr;
    with_element(value(tensor).dtype(),
                 [&]<class T>(T*) { out = value(tensor).template data<T>().data(); });
  });
}

gyre_status gyre_tensor_const_data(const gyre_tensor* tensor, const void** data) {
  return guard(__func__, [&] {
    const void*& out = deref(data, "data") = nullptr;
    with_element(value(tensor).dtype(),
                 [&]<class T>(T*) { out = value(tensor).template data<const T>().data(); });
  });
}

gyre_status gyre_tensor_write(const gyre_tensor* tensor, const void* source, uint64_t bytes) {
  return guard(__func__, [&] {
    const gyre::Tensor& to = value(tensor);
    check_bytes(to, bytes);
    if (bytes != 0 && source == nullptr) refuse("source is NULL");
    with_element(to.dtype(), [&]<class T>(T*) {
      to.write_from(std::span(static_cast<const T*>(source), to.elements()));
    });
  });
}

gyre_status gyre_tensor_read(const gyre_tensor* tensor, void* target, uint64_t bytes) {
  return guard(__func__, [&] {
    const gyre::Tensor& from = value(tensor);
    check_bytes(from, bytes);
    if (bytes != 0 && target == nullptr) refuse("target is NULL");
    with_element(from.dtype(), [&]<class T>(T*) {
      from.read_to(std::span(static_cast<T*>(target), from.elements()));
    });
  });
}
