#include "bound.h"

namespace gyre::python {

void bind_attention(nb::module_& /*module*/) {}

}  // namespace gyre::python
