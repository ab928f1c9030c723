#pragma once
// What a model does between Gyre's ops, as kernels of its own: they are recorded into the same
// list, so that a token is one graph. Simple ones: an engine would call its matrix library instead.
#include <gyre/gyre.h>

namespace tiny_model {

class Kernels {
 public:
  Kernels();

  // out = x / rms(x) * weight; x and out [tokens, size].
  void norm(gyre::Encoder& encoder, const gyre::Tensor& x, const gyre::Tensor& weight,
            float epsilon, const gyre::Tensor& out) const;
  // out = x weight^T, or out += x weight^T; weight [rows, columns], as in the file.
  void linear(gyre::Encoder& encoder, const gyre::Tensor& x, const gyre::Tensor& weight,
              const gyre::Tensor& out, bool add = false) const;
  // gate = silu(gate) up.
  void swiglu(gyre::Encoder& encoder, const gyre::Tensor& gate, const gyre::Tensor& up) const;

 private:
  gyre::CustomKernel norm_, linear_, swiglu_;
};

}  // namespace tiny_model
