#pragma once

#include <string>
#include <vector>

#include "c_api/guard.h"
#include "gyre/c/base.h"
#include "gyre/c/device.h"
#include "gyre/gyre.h"

// A handle of C's is a C++ handle on the heap; what these share, they share.
struct gyre_device {
  static constexpr auto kKind = gyre::c_api::HandleKind::device;
  gyre::c_api::HandleKind kind = kKind;
  gyre::Device value;
};
struct gyre_device_list {
  static constexpr auto kKind = gyre::c_api::HandleKind::device_list;
  gyre::c_api::HandleKind kind = kKind;
  std::vector<gyre::DeviceInfo> value;
};
struct gyre_tensor {
  static constexpr auto kKind = gyre::c_api::HandleKind::tensor;
  gyre::c_api::HandleKind kind = kKind;
  gyre::Tensor value;
};
struct gyre_encoder {
  static constexpr auto kKind = gyre::c_api::HandleKind::encoder;
  gyre::c_api::HandleKind kind = kKind;
  gyre::Encoder value;
};
struct gyre_fence {
  static constexpr auto kKind = gyre::c_api::HandleKind::fence;
  gyre::c_api::HandleKind kind = kKind;
  gyre::Fence value;
};
struct gyre_graph {
  static constexpr auto kKind = gyre::c_api::HandleKind::graph;
  gyre::c_api::HandleKind kind = kKind;
  gyre::Graph value;
};
struct gyre_custom_kernel {
  static constexpr auto kKind = gyre::c_api::HandleKind::custom_kernel;
  gyre::c_api::HandleKind kind = kKind;
  gyre::CustomKernel value;
};
struct gyre_kv_buffer {
  static constexpr auto kKind = gyre::c_api::HandleKind::kv_buffer;
  gyre::c_api::HandleKind kind = kKind;
  gyre::KvBuffer value;
};
struct gyre_kv_pages {
  static constexpr auto kKind = gyre::c_api::HandleKind::kv_pages;
  gyre::c_api::HandleKind kind = kKind;
  gyre::KvPages value;
};
struct gyre_kv_cache {
  static constexpr auto kKind = gyre::c_api::HandleKind::kv_cache;
  gyre::c_api::HandleKind kind = kKind;
  gyre::KvCache value;
  std::vector<gyre::KvLayerInfo> described{};  // holds the strings that were handed out
};
struct gyre_kv_pool {
  static constexpr auto kKind = gyre::c_api::HandleKind::kv_pool;
  gyre::c_api::HandleKind kind = kKind;
  gyre::KvPool value;
  std::vector<gyre::KvGroupInfo> described{};
};
struct gyre_kv_sequence {
  static constexpr auto kKind = gyre::c_api::HandleKind::kv_sequence;
  gyre::c_api::HandleKind kind = kKind;
  gyre::KvSequence value;
};
struct gyre_kv_batch {
  static constexpr auto kKind = gyre::c_api::HandleKind::kv_batch;
  gyre::c_api::HandleKind kind = kKind;
  gyre::KvBatch value;
};
struct gyre_bytes {
  static constexpr auto kKind = gyre::c_api::HandleKind::bytes;
  gyre::c_api::HandleKind kind = kKind;
  std::string value;
};

namespace gyre::c_api {

// The body of every _destroy(). A handle of another type stays, and gyre_last_error() says so.
template <class Handle>
void destroy(const char* function, Handle* handle, const char* name) noexcept {
  guard(function, [&] {
    if (handle == nullptr) return;
    deref(handle, name);
    delete handle;
  });
}

// NULL is what was left out.
inline Tensor tensor(const gyre_tensor* handle) {
  return handle != nullptr ? deref(handle, "a tensor").value : Tensor{};
}
inline KvBuffer kv_buffer(const gyre_kv_buffer* handle) {
  return handle != nullptr ? deref(handle, "a buffer").value : KvBuffer{};
}
inline KvPages kv_pages(const gyre_kv_pages* handle) {
  return handle != nullptr ? deref(handle, "pages").value : KvPages{};
}

}  // namespace gyre::c_api
