#pragma once

#include <string>
#include <vector>

#include "c_api/guard.h"
#include "gyre/c/base.h"
#include "gyre/c/device.h"
#include "gyre/gyre.h"

// A handle of C's is a C++ handle on the heap; what these share, they share.
struct gyre_device {
  gyre::Device value;
};
struct gyre_device_list {
  std::vector<gyre::DeviceInfo> value;
};
struct gyre_tensor {
  gyre::Tensor value;
};
struct gyre_encoder {
  gyre::Encoder value;
};
struct gyre_fence {
  gyre::Fence value;
};
struct gyre_graph {
  gyre::Graph value;
};
struct gyre_custom_kernel {
  gyre::CustomKernel value;
};
struct gyre_kv_buffer {
  gyre::KvBuffer value;
};
struct gyre_kv_pages {
  gyre::KvPages value;
};
struct gyre_kv_cache {
  gyre::KvCache value;
  std::vector<gyre::KvLayerInfo> described{};  // holds the strings that were handed out
};
struct gyre_kv_pool {
  gyre::KvPool value;
  std::vector<gyre::KvGroupInfo> described{};
};
struct gyre_kv_sequence {
  gyre::KvSequence value;
};
struct gyre_kv_batch {
  gyre::KvBatch value;
};
struct gyre_bytes {
  std::string value;
};

namespace gyre::c_api {

// NULL is what was left out.
inline Tensor tensor(const gyre_tensor* handle) {
  return handle != nullptr ? handle->value : Tensor{};
}
inline KvBuffer kv_buffer(const gyre_kv_buffer* handle) {
  return handle != nullptr ? handle->value : KvBuffer{};
}
inline KvPages kv_pages(const gyre_kv_pages* handle) {
  return handle != nullptr ? handle->value : KvPages{};
}

}  // namespace gyre::c_api
