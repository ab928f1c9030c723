#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "c_api/guard.h"
#include "c_api/structs.h"
#include "gyre/c/base.h"
#include "gyre/c/device.h"
#include "gyre/gyre.h"

namespace gyre::c_api {

// A handle of C's is a C++ handle on the heap; what these share, they share.
template <HandleKind kOf, class T>
struct HandleOf {
  static constexpr HandleKind kKind = kOf;
  HandleKind kind = kKind;
  T value;
};

// The first description of each part, whose strings and lists were handed out. They do not change.
template <class Info>
class Described {
 public:
  const std::vector<Info>& keep(std::vector<Info>&& described) {
    const std::lock_guard lock(mutex_);
    if (kept_.empty()) kept_ = std::move(described);
    return kept_;
  }

 private:
  std::mutex mutex_;
  std::vector<Info> kept_;
};

}  // namespace gyre::c_api

struct gyre_device : gyre::c_api::HandleOf<gyre::c_api::HandleKind::device, gyre::Device> {};
struct gyre_device_list
    : gyre::c_api::HandleOf<gyre::c_api::HandleKind::device_list, std::vector<gyre::DeviceInfo>> {};
struct gyre_tensor : gyre::c_api::HandleOf<gyre::c_api::HandleKind::tensor, gyre::Tensor> {};
struct gyre_encoder : gyre::c_api::HandleOf<gyre::c_api::HandleKind::encoder, gyre::Encoder> {};
struct gyre_fence : gyre::c_api::HandleOf<gyre::c_api::HandleKind::fence, gyre::Fence> {};
struct gyre_graph : gyre::c_api::HandleOf<gyre::c_api::HandleKind::graph, gyre::Graph> {};
struct gyre_custom_kernel
    : gyre::c_api::HandleOf<gyre::c_api::HandleKind::custom_kernel, gyre::CustomKernel> {};
struct gyre_kv_buffer : gyre::c_api::HandleOf<gyre::c_api::HandleKind::kv_buffer, gyre::KvBuffer> {
};
struct gyre_kv_pages : gyre::c_api::HandleOf<gyre::c_api::HandleKind::kv_pages, gyre::KvPages> {};
struct gyre_kv_cache : gyre::c_api::HandleOf<gyre::c_api::HandleKind::kv_cache, gyre::KvCache> {
  gyre::c_api::Described<gyre::KvLayerInfo> described{};
};
struct gyre_kv_pool : gyre::c_api::HandleOf<gyre::c_api::HandleKind::kv_pool, gyre::KvPool> {
  gyre::c_api::Described<gyre::KvGroupInfo> described{};
};
struct gyre_kv_sequence
    : gyre::c_api::HandleOf<gyre::c_api::HandleKind::kv_sequence, gyre::KvSequence> {};
struct gyre_kv_batch : gyre::c_api::HandleOf<gyre::c_api::HandleKind::kv_batch, gyre::KvBatch> {};
struct gyre_bytes : gyre::c_api::HandleOf<gyre::c_api::HandleKind::bytes, std::string> {};

namespace gyre::c_api {

inline Encoder& value(gyre_encoder* encoder) { return deref(encoder, "encoder").value; }

// The body of every _destroy(). A handle of another type stays, and gyre_last_error() says so.
template <class Handle>
void destroy(const char* function, Handle* handle, const char* name) noexcept {
  guard(function, [&] {
    if (handle == nullptr) return;
    deref(handle, name);
    delete handle;
  });
}

// The body of every op: `body` records it from the caller's inputs.
template <class Inputs, class Body>
gyre_status record(const char* function, gyre_encoder* encoder, const Inputs* inputs,
                   const Body& body) noexcept {
  return guard(function, [&] {
    const Inputs given = read(inputs, "inputs");
    body(deref(encoder, "encoder").value, given);
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
