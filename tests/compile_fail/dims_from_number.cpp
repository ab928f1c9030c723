// A number is not a shape: tensor.reshape(12) would be a typing error for reshape({12}).
#include "gyre/tensor.h"

#if defined(GYRE_BREAK)
gyre::Tensor flat(const gyre::Tensor& tensor) { return tensor.reshape(12); }
#else
gyre::Tensor flat(const gyre::Tensor& tensor) { return tensor.reshape({12}); }
#endif
