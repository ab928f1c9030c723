#include "gyre/c/custom_kernel.h"

#include "c_api/enums.h"
#include "c_api/handles.h"
#include "c_api/structs.h"
#include "runtime/kernel_use.h"

using namespace gyre::c_api;

namespace {

// The caller's count is checked before anything is read by it.
void check_arguments(uint64_t count, const void* args, const char* name) {
  if (count > gyre::kMaxArgs) refuse(name, "_count is ", count, ", at most ", gyre::kMaxArgs);
  if (count != 0 && args == nullptr) refuse(name, "s is NULL");
}

gyre::CustomCode custom_code(const gyre_custom_code* code) {
  const gyre_custom_code given = read(code, "code");
  check_arguments(given.arg_count, given.args, "code.arg");
  gyre::CustomCode made;
  made.name = &deref(given.name, "code.name");
  for (const gyre_custom_arg& arg :
       read_array(given.args, given.arg_count, gyre::kMaxArgs, "code.args")) {
    made.args.push_back(
        {&deref(arg.name, "code.args.name"),
         same_number(arg.access,
                     {gyre::Access::read, gyre::Access::write, gyre::Access::read_write},
                     "code.args.access")});
  }
  made.params_bytes = given.params_bytes;
  // A function of C's does not throw, but its type cannot say so.
  made.cpu = reinterpret_cast<gyre::CustomTask>(given.cpu);
  if (given.cuda_source != nullptr) made.cuda.source = given.cuda_source;
  if (given.cuda_name != nullptr) made.cuda.name = given.cuda_name;
  if (given.metal_source != nullptr) made.metal.source = given.metal_source;
  if (given.metal_name != nullptr) made.metal.name = given.metal_name;
  return made;
}

}  // namespace

gyre_status gyre_custom_kernel_create(const gyre_custom_code* code, gyre_custom_kernel** kernel) {
  return make(__func__, kernel, "kernel", [&] { return gyre::CustomKernel(custom_code(code)); });
}

void gyre_custom_kernel_destroy(gyre_custom_kernel* kernel) { destroy(__func__, kernel, "kernel"); }

gyre_status gyre_supports_custom_kernel(const gyre_device* device, const gyre_custom_kernel* kernel,
                                        int32_t* supported) {
  return answer(__func__, supported, "supported", [&] {
    return gyre::supports(deref(device, "device").value, deref(kernel, "kernel").value);
  });
}

gyre_status gyre_custom_kernel_record(const gyre_custom_kernel* kernel, gyre_encoder* encoder,
                                      const gyre_custom_call* call) {
  return guard(__func__, [&] {
    const gyre::CustomKernel& recorded = deref(kernel, "kernel").value;
    gyre::Encoder& list = deref(encoder, "encoder").value;
    const gyre_custom_call given = read(call, "call");
    check_arguments(given.arg_count, given.args, "call.arg");
    if (given.params_bytes != 0) deref(static_cast<const char*>(given.params), "call.params");
    std::vector<gyre::Tensor> args;
    for (uint64_t i = 0; i < given.arg_count; ++i) args.push_back(tensor(given.args[i]));
    const gyre::CustomLaunch launch{
        .tasks = given.tasks,
        .grid = {given.grid[0], or_default(given.grid[1], 1u), or_default(given.grid[2], 1u)},
        .block = or_default(given.block, gyre::CustomLaunch{}.block),
        .shared_bytes = given.shared_bytes};
    recorded.record(list, {static_cast<const std::byte*>(given.params), given.params_bytes}, args,
                    launch);
  });
}
