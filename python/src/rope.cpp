#include "bound.h"

namespace gyre::python {

void bind_rope(nb::module_& /*module*/) {}

}  // namespace gyre::python
