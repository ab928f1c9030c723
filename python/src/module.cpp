#include <cstdlib>

#include "bound.h"
#include "exchange.h"
#include "gyre/version.h"

NB_MODULE(_gyre, module) {
  // What it keeps (devices, classes of errors, the queue of releases) is the process's.
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0)
    throw nanobind::import_error("gyre: a subinterpreter cannot import it; use processes");
  // Servers end with threads and modules still alive, and nanobind would blame the binding for what
  // they hold. The tests ask for its report.
  nanobind::set_leak_warnings(std::getenv("GYRE_LEAK_WARNINGS") != nullptr);
  module.doc() = "The compiled half of gyre; import gyre instead.";
  module.attr("__version__") = std::string(gyre::version());
  gyre::python::bind_errors(module);
  gyre::python::bind_device(module);
  gyre::python::bind_numpy(module);
  gyre::python::bind_tensor(module);
  gyre::python::bind_encoder(module);
  gyre::python::bind_kv_buffer(module);
  gyre::python::bind_kv_calibration(module);
  gyre::python::bind_quantize(module);
  gyre::python::bind_rope(module);
  gyre::python::bind_attention(module);
  gyre::python::bind_kv_cache(module);
  gyre::python::bind_kv_pages(module);
  gyre::python::bind_rope_append(module);
  gyre::python::bind_kv_pool(module);
  gyre::python::bind_kv_snapshot(module);
  gyre::python::bind_prepare(module);
}
