#include "bound.h"

namespace gyre::python {

void bind_codec(nb::module_& /*module*/) {}

}  // namespace gyre::python
