#include <unistd.h>

#if defined(__APPLE__)
#include <pthread.h>
#endif

#include <map>
#include <mutex>
#include <sstream>

#include "bound.h"

namespace gyre::python {
namespace {

// Never destroyed: at exit its threads, or CUDA, may be gone before.
struct Shared {
  std::mutex mutex;
  std::map<std::string, Device> devices;
  pid_t process = 0;  // after a fork the threads of a device are gone, so the child opens its own
};

bool is_main_thread() {
#if defined(__APPLE__)
  return pthread_main_np() != 0;
#else
  return gettid() == getpid();
#endif
}

// DeviceOptions::poll: Ctrl-C ends a list. Python runs handlers of signals in its main thread
// alone, and only that one may ask for the GIL while the interpreter ends.
void check_signals() {
  if (!is_main_thread()) return;
  const nb::gil_scoped_acquire acquired;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

Device open_shared(const std::string& name) {
  static auto* const kShared = new Shared;
  const ReleasedGil released;
  const std::lock_guard lock(kShared->mutex);
  if (kShared->process != getpid()) {
    new std::map<std::string, Device>(std::move(kShared->devices));  // left as it is
    kShared->devices.clear();
    kShared->process = getpid();
  }
  const auto found = kShared->devices.find(name);
  if (found != kShared->devices.end()) return found->second;
  return kShared->devices.emplace(name, Device::open(name, {.poll = check_signals})).first->second;
}

Device open_with(const std::string& name, const DeviceOptions& options) {
  const DeviceOptions usual;
  const bool plain = options.threads == usual.threads && options.spin_us == usual.spin_us &&
                     options.pool_limit_bytes == usual.pool_limit_bytes &&
                     options.kernel_cache == usual.kernel_cache &&
                     options.check_each_launch == usual.check_each_launch;
  if (plain) return open_shared(name);
  return without_gil([&] { return Device::open(name, options); });
}

template <class Write>
std::string written(const Trace& trace, Write write) {
  std::ostringstream out;
  (trace.*write)(out);
  return out.str();
}

void bind_info(nb::module_& module) {
  nb::class_<DeviceInfo>(module, "DeviceInfo", "What a device is, or why there is none.")
      .def_ro("name", &DeviceInfo::name, "What Device() takes: \"cpu\", \"cuda:0\".")
      .def_ro("available", &DeviceInfo::available, "Whether Device() can open it.")
      .def_ro("reason", &DeviceInfo::reason, "Why it is not available; empty when it is.")
      .def_ro("description", &DeviceInfo::description, "The processor, and what kernels use of it.")
      .def_ro("compute_units", &DeviceInfo::compute_units,
              "The number of cores or multiprocessors.")
      .def_ro("memory_bytes", &DeviceInfo::memory_bytes, "The bytes of its memory.")
      .def("__repr__", [](const DeviceInfo& info) {
        return "gyre.DeviceInfo(" + info.name + ": " +
               (info.available ? info.description : "not available, " + info.reason) + ")";
      });
  nb::class_<MemoryUse>(module, "MemoryUse", "What a device's tensors take.")
      .def_ro("in_use_bytes", &MemoryUse::in_use_bytes, "Bytes of blocks that tensors hold.")
      .def_ro("cached_bytes", &MemoryUse::cached_bytes, "Bytes of blocks kept for reuse.")
      .def_ro("system_allocations", &MemoryUse::system_allocations,
              "How often memory was taken from the system.")
      .def_ro("reuses", &MemoryUse::reuses, "How often a cached block was used again.");
  nb::class_<Trace>(module, "Trace", "What ran between start_trace() and stop_trace().")
      .def(
          "__len__", [](const Trace& trace) { return trace.events.size(); },
          "Returns the number of commands.")
      .def_ro("dropped", &Trace::dropped, "The number of commands beyond the limit of one trace.")
      .def(
          "text", [](const Trace& trace) { return written(trace, &Trace::write_text); },
          "Returns one line per command.")
      .def(
          "table", [](const Trace& trace) { return written(trace, &Trace::write_table); },
          "Returns a table with the count and the total, least and greatest time of each kernel.")
      .def(
          "chrome", [](const Trace& trace) { return written(trace, &Trace::write_chrome); },
          "Returns JSON for Perfetto and chrome://tracing.");
}

}  // namespace

Device device_of(const DeviceLike& device) {
  if (const auto* const name = std::get_if<std::string>(&device)) return open_shared(*name);
  return std::get<Device>(device);
}

void bind_device(nb::module_& module) {
  bind_info(module);
  nb::class_<Device>(
      module, "Device",
      "A device, for example \"cpu\" or \"cuda:0\". By name alone it is the same one for the "
      "whole process; with options it is one of its own. Copies share it.")
      .def(
          "__init__",
          [](Device* self, const std::string& name, uint32_t threads, uint32_t spin_us,
             std::optional<uint64_t> pool_limit_bytes, const std::string& kernel_cache,
             bool check_each_launch) {
            const DeviceOptions options{threads,      spin_us,           pool_limit_bytes,
                                        kernel_cache, check_each_launch, check_signals};
            new (self) Device(open_with(name, options));
          },
          "name"_a = "cpu", "threads"_a = 0, nb::kw_only(), "spin_us"_a = 50,
          "pool_limit_bytes"_a = nb::none(), "kernel_cache"_a = "", "check_each_launch"_a = false,
          "threads is the number of CPU threads; 0 takes GYRE_THREADS, or else every usable core. "
          "spin_us is how long an idle worker polls. pool_limit_bytes limits the freed memory that "
          "is kept for reuse. kernel_cache is the folder of compiled CUDA kernels, or \"off\". "
          "check_each_launch waits after each CUDA command, so that an error names it.")
      .def_prop_ro(
          "name", [](const Device& device) { return device.info().name; },
          "The name that opens it, such as \"cpu\".")
      .def_prop_ro(
          "info", [](const Device& device) { return device.info(); }, "What the device is.")
      .def("memory", &Device::memory,
           "Returns how much memory tensors hold and how much is cached.")
      .def(
          "trim", [](const Device& device) { without_gil([&] { device.trim(); }); },
          "Gives cached memory back to the system.")
      .def(
          "wait", [](const Device& device) { without_gil([&] { device.wait(); }); },
          "Waits until all submitted work is done; raises what went wrong while it ran.")
      .def_prop_ro("stream", &Device::stream,
                   "The CUDA stream that everything runs on, as a number; 0 if there is none.")
      .def("start_trace", &Device::start_trace, "Times every command from here on.")
      .def(
          "stop_trace",
          [](const Device& device) { return without_gil([&] { return device.stop_trace(); }); },
          "Ends the trace and returns what ran since start_trace().")
      .def(
          "__eq__",
          [](const Device& a, nb::handle b) {
            return nb::isinstance<Device>(b) && a == nb::cast<const Device&>(b);
          },
          "other"_a.sig("other: object"))
      .def("__hash__",
           [](const Device& device) {
             return std::hash<const DeviceInfo*>()(&device.info());  // one for each device
           })
      .def("__repr__", [](const Device& device) {
        return "gyre.Device(\"" + device.info().name + "\", " + device.info().description + ")";
      });
  module.def(
      "devices", [] { return without_gil([] { return devices(); }); },
      "Lists every backend that Gyre knows: its devices with their properties, or why it has none "
      "here.");
}

}  // namespace gyre::python
