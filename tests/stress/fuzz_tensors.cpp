// Tensors: making them, views of them, their bytes on the host.
#include <algorithm>

#include "stress/fuzz_world.h"

namespace gyre::test {
namespace {

Dims some_dims(FuzzInput& in, uint64_t max_rank) {
  std::array<uint64_t, kMaxRank + 2> dims{};
  const uint64_t rank = in.below(max_rank + 1);
  for (uint64_t i = 0; i < rank; ++i) dims[i] = in.number(in.below(6));
  return Dims(std::span<const uint64_t>(dims.data(), rank));
}

Tensor base(FuzzWorld& w) {
  FuzzInput& in = w.in;
  if (!w.kept.empty() && in.chance(3)) return w.kept[in.below(w.kept.size())];
  return w.tensor(w.float_type(), {1 + in.below(5), in.below(4), 8});
}

// Every byte that a view can reach is its parent's.
void expect_inside(const Tensor& view, const Tensor& parent) {
  if (view.elements() == 0) return;
  expect(view.byte_offset() >= parent.byte_offset() &&
             view.byte_offset() + view.span_bytes() <= parent.byte_offset() + parent.span_bytes(),
         "a view leaves its tensor");
  ++fuzz_stats().compared;
}

void fuzz_views(FuzzWorld& w, FuzzInput& in) {
  const Tensor tensor = base(w);
  Tensor view;
  bool made = false;
  switch (in.below(4)) {
    case 0:
      made = w.call("Tensor::slice", [&] {
        const uint64_t begin = in.number(in.below(4));
        view = tensor.slice(static_cast<uint32_t>(in.number(in.below(3))), begin,
                            in.number(in.below(4)));
      });
      break;
    case 1:
      made = w.call("Tensor::permute", [&] {
        const uint64_t turn = in.below(3);
        view =
            tensor.permute({in.number(turn), in.number((turn + 1) % 3), in.number((turn + 2) % 3)});
      });
      break;
    case 2:
      made = w.call("Tensor::reshape", [&] {
        view = tensor.reshape({in.number(tensor.elements() / 8), in.number(2), in.number(4)});
        expect(view.elements() == tensor.elements(), "a reshaped tensor has other elements");
      });
      break;
    default:
      made = w.call("Tensor::strided", [&] {
        const Dims shape = some_dims(in, 4);
        Dims strides = shape;
        for (uint32_t d = 0; d < shape.size(); ++d) strides[d] = in.number(in.below(9));
        view = tensor.strided(shape, strides, in.number(in.below(8)));
      });
  }
  if (!made) return;
  expect_inside(view, tensor);
  if (w.kept.size() < 8) w.kept.push_back(view);
}

void fuzz_tensor(FuzzWorld& w, FuzzInput& in) {
  Tensor made;
  w.call("Dims", [&] {
    constexpr std::array<uint64_t, 8> kOnes = {1, 1, 1, 1, 1, 1, 1, 1};
    const std::span<const uint64_t> ones(kOnes);
    const Dims dims(ones.first(in.below(9)));
    expect(dims.text().size() >= 2, "dims without a text");
  });
  const Dims shape = some_dims(in, kMaxRank);
  if (w.call("Device::tensor", [&] { made = w.some_device().tensor(w.any_type(), shape); })) {
    expect(made.defined() && made.shape() == shape && made.is_contiguous(),
           "not the tensor that was asked for");
    if (made.dtype() == DType::f32 && made.elements() != 0 && made.elements() < 4096) {
      for (const float value : made.data<float>()) expect(value == 0.0f, "new memory is not zero");
      std::ranges::fill(made.data<float>(), 7.0f);  // the next block is zero again
    }
  }
  std::array<float, 64> memory{};
  w.call("Device::wrap", [&] {
    Dims strides = shape;
    for (uint32_t d = 0; d < shape.size(); ++d) strides[d] = in.number(in.below(3));
    // Memory is the caller's word: nothing may touch it here.
    const auto address = reinterpret_cast<uintptr_t>(memory.data()) + in.number(0);
    void* const data = in.spoil() ? nullptr : reinterpret_cast<void*>(address);
    const Tensor wrapped = in.chance(2) ? w.some_device().wrap(static_cast<const void*>(data),
                                                               w.any_type(), shape, strides)
                                        : w.some_device().wrap(data, w.any_type(), shape, strides);
    expect(wrapped.shape() == shape, "not the tensor that was wrapped");
  });
  w.call("Tensor::shape", [&] { made.shape(static_cast<uint32_t>(in.number(0))); });
  w.call("Tensor::stride", [&] { made.stride(static_cast<uint32_t>(in.number(0))); });
}

void fuzz_host(FuzzWorld& w, FuzzInput& in) {
  const Tensor tensor = w.tensor(DType::f32, {in.below(4), 1 + in.below(3), 4});
  std::vector<float> values(in.number(tensor.elements()) % 100, 3.0f);
  const bool wrote =
      w.call("Tensor::write_from", [&] { tensor.write_from(std::span<const float>(values)); });
  std::vector<float> back(in.number(values.size()) % 100, 0.0f);
  const bool read = w.call("Tensor::read_to", [&] { tensor.read_to(std::span(back)); });
  if (wrote && read && tensor.is_injective()) {
    expect(back == values, "other numbers were read than written");
    ++fuzz_stats().compared;
  }
  w.call("Tensor::data", [&] { tensor.data<float>(); });
  w.call("Tensor::data", [&] { tensor.data<const float>(); });
  w.call("Tensor::data", [&] { tensor.data<int64_t>(); });
}

}  // namespace

std::span<const FuzzCall> fuzz_tensor_calls() {
  static constexpr FuzzCall kCalls[] = {fuzz_views, fuzz_tensor, fuzz_host};
  return kCalls;
}

}  // namespace gyre::test
