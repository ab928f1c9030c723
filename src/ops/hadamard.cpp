#include <array>
#include <bit>

#include "gyre/quantize.h"
#include "ops/table.h"
#include "runtime/layout.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {
namespace {

constexpr uint64_t kMaxPoints = 8192;

abi::HadamardSpec hadamard_spec(DType x, DType out) {
  return spec_from_key<abi::HadamardSpec>(static_cast<uint64_t>(x) | static_cast<uint64_t>(out)
                                                                         << 8);
}

void check_tensor(const char* what, const Tensor& t) {
  require(t.defined(), "hadamard: ", what, " is undefined");
  require(t.rank() >= 1 && t.rank() <= 3, "hadamard: ", what, " must have 1 to 3 dimensions, got ",
          t.rank());
  require(is_float(t.dtype()), "hadamard: ", what, " must be f32, f16 or bf16, got ", t.dtype());
  require(t.stride(t.rank() - 1) == 1, "hadamard: the last dimension of ", what,
          " must be contiguous, got stride ", t.stride(t.rank() - 1));
}

void check_size(uint64_t points, HadamardSigns signs) {
  const bool power_of_two = points >= 2 && std::has_single_bit(points) && points <= kMaxPoints;
  const bool blocks = points >= 16 && points % 8 == 0 && points <= abi::kKvMaxHeadDim;
  require(power_of_two || blocks,
          "hadamard: the last dimension must be a power of two up to 8192 or a multiple of 8 from "
          "16 to 1024, got ",
          points);
  require(signs != HadamardSigns::native || points <= abi::kKvMaxHeadDim,
          "hadamard: native signs reach to 1024 coordinates, got ", points);
  require(signs != HadamardSigns::mlx_native || points == 256 || points == 512,
          "hadamard: mlx-native's signs (mlx_native) are for 256 and 512 coordinates, got ",
          points);
}

}  // namespace

std::string hadamard_shape(const void* params) {
  const auto& p = *static_cast<const abi::HadamardParams*>(params);
  return join("rows=", p.rows[0], "x", p.rows[1], " points=", p.head_dim);
}

std::span<const uint64_t> hadamard_specs() {
  return spec_list([](auto add) {
    for (const DType in : kFloats) {
      for (const DType out : kFloats) add(hadamard_spec(in, out));
    }
  });
}

void hadamard(Encoder& encoder, const HadamardInputs& in, const HadamardOptions& options) try {
  Recording recording(encoder, "hadamard");
  check_tensor("x", in.x);
  check_tensor("out", in.out);
  require(options.signs <= HadamardSigns::mlx_native,
          "hadamard: ", static_cast<uint32_t>(options.signs), " is not a kind of signs");
  require(options.direction <= HadamardDirection::inverse,
          "hadamard: ", static_cast<uint32_t>(options.direction), " is not a direction");
  require(in.out.shape() == in.x.shape(), "hadamard: out must have the shape of x ", in.x.shape(),
          ", got ", in.out.shape());
  const uint32_t last = in.x.rank() - 1;
  check_size(in.x.shape(last), options.signs);
  require(in.out.is_injective(), "hadamard: strides ", in.out.strides(),
          " make elements of out share memory");
  require(is_same_view(in.x, in.out) || !may_overlap(in.x, in.out),
          "hadamard: x and out share memory");
  if (in.x.elements() == 0) return;
  abi::HadamardParams params{};
  params.rows[0] = params.rows[1] = 1;
  for (uint32_t i = 0; i < last; ++i) {
    const uint32_t level = i + 2 - last;  // the rows' dimensions, right-aligned
    params.rows[level] = in.x.shape(i);
    params.x_stride[level] = in.x.stride(i) * size_bytes(in.x.dtype());
    params.out_stride[level] = in.out.stride(i) * size_bytes(in.out.dtype());
  }
  params.head_dim = static_cast<uint32_t>(in.x.shape(last));
  params.inverse = options.direction == HadamardDirection::inverse ? 1 : 0;
  params.signs = static_cast<uint32_t>(options.signs);
  recording.dispatch(kHadamard, hadamard_spec(in.x.dtype(), in.out.dtype()), params,
                     {&in.x, &in.out});
  recording.commit();
} catch (const std::bad_alloc&) {
  out_of_memory("hadamard");
}

}  // namespace gyre
