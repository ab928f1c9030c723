// Compiled by scripts/llama.sh only, with ggml's headers: what ggml_abi.h says is what they say.
#include <cstddef>

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "ggml_abi.h"

namespace abi = gyre::ggml::abi;

#define GYRE_SAME(ours, our_field, theirs, their_field)                      \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field)); \
  static_assert(sizeof(ours::our_field) == sizeof(theirs::their_field))

static_assert(abi::kBackendApiVersion == GGML_BACKEND_API_VERSION);
static_assert(sizeof(abi::Tensor) == sizeof(ggml_tensor));
GYRE_SAME(abi::Tensor, type, ggml_tensor, type);
GYRE_SAME(abi::Tensor, buffer, ggml_tensor, buffer);
GYRE_SAME(abi::Tensor, ne, ggml_tensor, ne);
GYRE_SAME(abi::Tensor, nb, ggml_tensor, nb);
GYRE_SAME(abi::Tensor, op, ggml_tensor, op);
GYRE_SAME(abi::Tensor, op_params, ggml_tensor, op_params);
GYRE_SAME(abi::Tensor, src, ggml_tensor, src);
GYRE_SAME(abi::Tensor, view_src, ggml_tensor, view_src);
GYRE_SAME(abi::Tensor, data, ggml_tensor, data);

static_assert(sizeof(abi::CustomOp) == sizeof(ggml_custom_op_params));
static_assert(offsetof(abi::CustomOp, tasks) == offsetof(ggml_custom_op_params, n_tasks));
static_assert(offsetof(abi::CustomOp, data) == offsetof(ggml_custom_op_params, userdata));
static_assert(abi::kAllThreads == GGML_N_TASKS_MAX);

static_assert(sizeof(abi::Backend) == sizeof(ggml_backend));
static_assert(sizeof(abi::BackendTable) == sizeof(ggml_backend_i));
GYRE_SAME(abi::BackendTable, free, ggml_backend_i, free);
GYRE_SAME(abi::BackendTable, plan_create, ggml_backend_i, graph_plan_create);
GYRE_SAME(abi::BackendTable, graph_compute, ggml_backend_i, graph_compute);
GYRE_SAME(abi::Backend, device, ggml_backend, device);
GYRE_SAME(abi::Backend, context, ggml_backend, context);

static_assert(sizeof(abi::Device) == sizeof(ggml_backend_device));
GYRE_SAME(abi::DeviceTable, get_props, ggml_backend_device_i, get_props);
GYRE_SAME(abi::DeviceTable, init_backend, ggml_backend_device_i, init_backend);
GYRE_SAME(abi::DeviceTable, supports_op, ggml_backend_device_i, supports_op);
GYRE_SAME(abi::DeviceTable, supports_buft, ggml_backend_device_i, supports_buft);
GYRE_SAME(abi::Device, registry, ggml_backend_device, reg);
GYRE_SAME(abi::DevicePropsHead, description, ggml_backend_dev_props, description);
GYRE_SAME(abi::DevicePropsHead, type, ggml_backend_dev_props, type);
static_assert(int{abi::device_cpu} == int{GGML_BACKEND_DEVICE_TYPE_CPU});
static_assert(int{abi::device_accel} == int{GGML_BACKEND_DEVICE_TYPE_ACCEL});

static_assert(sizeof(abi::Registry) == sizeof(ggml_backend_reg));
GYRE_SAME(abi::Registry, context, ggml_backend_reg, context);
GYRE_SAME(abi::RegistryTable, get_proc_address, ggml_backend_reg_i, get_proc_address);
