// Tensor::data takes the element types that tensors have.
#include "gyre/tensor.h"

#if defined(GYRE_BREAK)
using Element = double;
#else
using Element = float;
#endif

auto first(const gyre::Tensor& tensor) { return tensor.data<Element>()[0]; }
