#include "cache/coding_identity.h"

#include <algorithm>

#include "cache/snapshot.h"
#include "ops/kv_coding.h"
#include "runtime/require.h"

namespace gyre {
namespace {

// Tensors that are not there count, too: what follows them would otherwise look like them.
void add_tensor(Checksum& checksum, const Tensor& tensor) {
  const uint64_t elements = tensor.defined() ? tensor.elements() : 0;
  checksum.add(std::as_bytes(std::span(&elements, 1)));
  if (elements == 0) return;
  std::vector<float> values(elements);
  tensor.read_to(std::span<float>(values));
  checksum.add(std::as_bytes(std::span(values)));
}

void add_coding(Checksum& checksum, const KvCoding& coding) {
  for (const Tensor* tensor : {&coding.basis.matrix, &coding.basis.inverse, &coding.basis.mean,
                               &coding.shaping.factor, &coding.shaping.diagonal})
    add_tensor(checksum, *tensor);
  checksum.add(std::as_bytes(std::span(coding.shaping.gains)));
}

bool is_native(KvFormat format) { return describe(format).signs_version != 0; }

}  // namespace

void check_layer_codings(const char* op, const CodedGeometry& geometry,
                         const std::vector<KvLayer>& layers,
                         const std::vector<KvLayerCoding>& codings) {
  require(codings.empty() || codings.size() == layers.size(), op,
          ": codings are for every layer or for none, got ", codings.size(), " for ", layers.size(),
          " layers");
  for (size_t i = 0; i < codings.size(); ++i) {
    const KvLayerCoding& coding = codings[i];
    if (!coding.k.defined() && !coding.v.defined()) continue;
    require(is_native(layers[i].k) && is_native(layers[i].v), op, ": layer ", i, " is ",
            gyre::name(layers[i].k), " and ", gyre::name(layers[i].v),
            ", a coding is for native formats of both");
    require(coding.k.basis.defined() == coding.v.basis.defined(), op, ": layer ", i,
            " has a basis of ", coding.k.basis.defined() ? "k" : "v", " alone");
    check_coding(op, "k", coding.k, layers[i].k, geometry.kv_heads, geometry.head_dim);
    check_coding(op, "v", coding.v, layers[i].v, geometry.kv_heads, geometry.v_head_dim);
  }
}

uint64_t coding_checksum(const KvLayerCoding& coding) {
  if (!coding.k.defined() && !coding.v.defined()) return 0;
  Checksum checksum;
  add_coding(checksum, coding.k);
  add_coding(checksum, coding.v);
  return std::max<uint64_t>(1, checksum.value());
}

uint32_t coding_identity(std::span<const uint64_t> checksums) {
  if (std::ranges::all_of(checksums, [](uint64_t checksum) { return checksum == 0; })) return 0;
  return std::max(1u, static_cast<uint32_t>(checksum_of(std::as_bytes(checksums))));
}

}  // namespace gyre
