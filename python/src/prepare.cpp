#include <gyre/prepare.h>

#include "bound.h"

namespace gyre::python {
namespace {

nb::list prepare_model(const DeviceLike& device, const std::vector<KvLayer>& layers,
                       const std::vector<std::string>& use, uint64_t heads, uint64_t kv_heads,
                       uint64_t head_dim, uint64_t v_head_dim, uint64_t context,
                       uint64_t step_tokens, const std::string& dtype,
                       const std::optional<std::string>& out_dtype, bool rope, bool norm,
                       uint64_t page_tokens, uint64_t max_sequences) {
  ModelShape shape{.heads = heads,
                   .kv_heads = kv_heads,
                   .head_dim = head_dim,
                   .v_head_dim = v_head_dim,
                   .layers = layers,
                   .context = context,
                   .step_tokens = step_tokens,
                   .dtype = dtype_named(dtype)};
  if (out_dtype) shape.out_dtype = dtype_named(*out_dtype);
  if (!rope) shape.rope.reset();
  shape.norm = norm;
  shape.page_tokens = page_tokens;
  shape.max_sequences = max_sequences;
  shape.use_cache = shape.use_batch = false;
  const Choice<bool ModelShape::*> uses[] = {{"cache", &ModelShape::use_cache},
                                             {"batch", &ModelShape::use_batch},
                                             {"pages", &ModelShape::use_pages}};
  for (const std::string& one : use) shape.*choose("prepare: use", one, uses) = true;
  const Device home = device_of(device);
  const auto kernels = without_gil([&] { return prepare(home, shape); });
  nb::list made;
  for (const PreparedKernel& one : kernels)
    made.append(nb::make_tuple(one.name, one.compiled, one.seconds));
  return made;
}

}  // namespace

void bind_prepare(nb::module_& module) {
  module.def(
      "prepare", prepare_model, "device"_a, "layers"_a, "use"_a, nb::kw_only(), "heads"_a,
      "kv_heads"_a, "head_dim"_a, "v_head_dim"_a = 0, "context"_a, "step_tokens"_a = 512,
      "dtype"_a = "f16", "out_dtype"_a = nb::none(), "rope"_a = true, "norm"_a = false,
      "page_tokens"_a = 64, "max_sequences"_a = 64,
      nb::sig("def prepare(device: str | Device, layers: list[KvLayer], use: list[str], *, heads: "
              "int, kv_heads: int, head_dim: int, v_head_dim: int = 0, context: int, step_tokens: "
              "int = 512, dtype: str = 'f16', out_dtype: str | None = None, rope: bool = True, "
              "norm: bool = False, page_tokens: int = 64, max_sequences: int = 64) -> "
              "list[tuple[str, bool, float]]"),
      "Builds the kernels that a model of this shape needs, several at a time, so that its first "
      "tokens wait for none. use lists \"cache\" (KvCache), \"batch\" (KvBatch) and \"pages\" "
      "(kv_write and paged_attention). Returns (name, compiled, seconds) of each kernel; on a CPU "
      "the list is empty.");
}

}  // namespace gyre::python
