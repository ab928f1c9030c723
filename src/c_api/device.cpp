#include "gyre/c/device.h"

#include <sstream>

#include "c_api/enums.h"
#include "c_api/handles.h"
#include "c_api/structs.h"

using namespace gyre::c_api;

namespace {

gyre::DeviceOptions device_options(const gyre_device_options& given) {
  gyre::DeviceOptions options;
  options.threads = given.threads;
  if (given.has_spin_us != 0) options.spin_us = given.spin_us;
  if (given.has_pool_limit != 0) options.pool_limit_bytes = given.pool_limit_bytes;
  if (given.kernel_cache != nullptr) options.kernel_cache = given.kernel_cache;
  options.check_each_launch = given.check_each_launch != 0;
  return options;
}

gyre_device_info device_info(const gyre::DeviceInfo& info) {
  return {.size = 0,
          .name = info.name.c_str(),
          .reason = info.reason.c_str(),
          .description = info.description.c_str(),
          .memory_bytes = info.memory_bytes,
          .compute_units = info.compute_units,
          .available = info.available};
}

const gyre::Device& value(const gyre_device* device) { return deref(device, "device").value; }

}  // namespace

gyre_status gyre_device_open(const char* name, const gyre_device_options* options,
                             gyre_device** device) {
  return make(__func__, device, "device", [&] {
    return gyre::Device::open(&deref(name, "name"),
                              device_options(read_or_default(options, "options")));
  });
}

void gyre_device_destroy(gyre_device* device) { destroy(__func__, device, "device"); }

gyre_status gyre_device_get_info(const gyre_device* device, gyre_device_info* info) {
  return guard(__func__, [&] { write(info, device_info(value(device).info()), "info"); });
}

gyre_status gyre_device_list_create(gyre_device_list** list) {
  return make(__func__, list, "list", [] { return gyre::devices(); });
}

gyre_status gyre_device_list_size(const gyre_device_list* list, uint64_t* count) {
  return answer(__func__, count, "count", [&] { return deref(list, "list").value.size(); });
}

gyre_status gyre_device_list_get(const gyre_device_list* list, uint64_t index,
                                 gyre_device_info* info) {
  return guard(__func__, [&] {
    const auto& devices = deref(list, "list").value;
    if (index >= devices.size()) refuse("index is ", index, " of ", devices.size());
    write(info, device_info(devices[index]), "info");
  });
}

void gyre_device_list_destroy(gyre_device_list* list) { destroy(__func__, list, "list"); }

gyre_status gyre_device_memory(const gyre_device* device, gyre_memory_use* use) {
  return guard(__func__, [&] {
    const gyre::MemoryUse memory = value(device).memory();
    write(use,
          {0, memory.in_use_bytes, memory.cached_bytes, memory.system_allocations, memory.reuses},
          "use");
  });
}

gyre_status gyre_device_trim(const gyre_device* device) {
  return guard(__func__, [&] { value(device).trim(); });
}

gyre_status gyre_device_wait(const gyre_device* device) {
  return guard(__func__, [&] { value(device).wait(); });
}

gyre_status gyre_device_stream(const gyre_device* device, uint64_t* stream) {
  return answer(__func__, stream, "stream", [&] { return value(device).stream(); });
}

gyre_status gyre_device_start_trace(const gyre_device* device) {
  return guard(__func__, [&] { value(device).start_trace(); });
}

gyre_status gyre_device_stop_trace(const gyre_device* device, gyre_trace_format format,
                                   gyre_bytes** trace) {
  return make(__func__, trace, "trace", [&] {
    if (format < GYRE_TRACE_TEXT || format > GYRE_TRACE_CHROME)
      refuse("format is ", format, ", which is no gyre_trace_format");
    const gyre::Trace stopped = value(device).stop_trace();
    std::ostringstream text;
    if (format == GYRE_TRACE_TEXT) stopped.write_text(text);
    if (format == GYRE_TRACE_TABLE) stopped.write_table(text);
    if (format == GYRE_TRACE_CHROME) stopped.write_chrome(text);
    return text.str();
  });
}
