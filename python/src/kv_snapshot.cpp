#include "bound.h"

namespace gyre::python {

void bind_kv_snapshot(nb::module_& /*module*/) {}

}  // namespace gyre::python
