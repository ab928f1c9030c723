#include "kv_buffer.h"

namespace gyre::python {
namespace {

KvShape shape_of(const std::string& format, const std::string& role, uint64_t heads,
                 uint64_t capacity, uint64_t head_dim, float scale_factor) {
  constexpr Choice<KvRole> kRoles[] = {{"k", KvRole::k}, {"v", KvRole::v}};
  return {.format = kv_format(format),
          .role = choose("KvBuffer: role", role, kRoles),
          .kv_heads = heads,
          .capacity = capacity,
          .head_dim = head_dim,
          .scale_factor = scale_factor};
}

BoundKvBuffer allocate(const DeviceLike& device, const std::string& format, const std::string& role,
                       uint64_t heads, uint64_t capacity, uint64_t head_dim, float scale_factor) {
  Device home = device_of(device);
  KvBuffer buffer =
      KvBuffer::allocate(home, shape_of(format, role, heads, capacity, head_dim, scale_factor));
  return {std::move(home), std::move(buffer)};
}

void bind_formats(nb::module_& module) {
  nb::class_<KvFormatInfo>(module, "KvFormatInfo", "What a reader of a format must know.")
      .def_prop_ro(
          "name", [](const KvFormatInfo& info) { return std::string(info.name); },
          "The name that arguments take.")
      .def_ro("bits", &KvFormatInfo::bits, "The bits stored per coordinate.")
      .def_ro("compressed", &KvFormatInfo::compressed, "Whether it stores codes and scales.")
      .def_ro("scale_block", &KvFormatInfo::scale_block,
              "The largest number of coordinates under one scale.")
      .def_ro("tile_tokens", &KvFormatInfo::tile_tokens,
              "The number of tokens of V that share words.");
  module.def(
      "kv_formats",
      [] {
        std::vector<KvFormatInfo> all;
        for (const KvFormat format : kv_formats()) all.push_back(describe(format));
        return all;
      },
      "Lists every format a cache can have: f32, f16, bf16, tq2 to tq8, and mlx_native4 to "
      "mlx_native8, those of mlx-native.");
}

}  // namespace

void bind_kv_buffer(nb::module_& module) {
  bind_formats(module);
  nb::class_<BoundKvBuffer>(module, "KvBuffer",
                            "Keys or values of a cache, for the ops. KvCache has both for all "
                            "layers of a model and is what most callers want.")
      .def_static(
          "allocate", allocate, "device"_a, nb::kw_only(), "format"_a = "f16", "role"_a = "k",
          "kv_heads"_a, "capacity"_a, "head_dim"_a, "scale_factor"_a = 1.0f,
          "Allocates zero-filled memory for `capacity` tokens of `kv_heads` heads with `head_dim` "
          "coordinates. role is \"k\" or \"v\". scale_factor is mlx-native's scale_factor_d512, "
          "for mlx_native4 to mlx_native8 with 512 coordinates.")
      .def_prop_ro(
          "device", [](const BoundKvBuffer& self) { return self.device; },
          "The device of its memory.")
      .def_prop_ro(
          "format",
          [](const BoundKvBuffer& self) { return std::string(name(self.buffer.shape.format)); },
          "The name of its format.")
      .def_prop_ro(
          "role", [](const BoundKvBuffer& self) { return role_name(self.buffer.shape.role); },
          "Either k or v.")
      .def_prop_ro(
          "kv_heads", [](const BoundKvBuffer& self) { return self.buffer.shape.kv_heads; },
          "The number of KV heads.")
      .def_prop_ro(
          "capacity", [](const BoundKvBuffer& self) { return self.buffer.shape.capacity; },
          "The number of slots.")
      .def_prop_ro(
          "head_dim", [](const BoundKvBuffer& self) { return self.buffer.shape.head_dim; },
          "The coordinates of a head.")
      .def_prop_ro(
          "scale_factor", [](const BoundKvBuffer& self) { return self.buffer.shape.scale_factor; },
          "The scale_factor_d512 of mlx-native; 1 in other formats.")
      .def_prop_ro(
          "nbytes", [](const BoundKvBuffer& self) { return self.buffer.bytes(); },
          "The bytes of codes and scales.")
      .def_prop_ro(
          "codes",
          [](const BoundKvBuffer& self) {
            return BoundTensor{self.device, self.buffer.codes};
          },
          "The stored values: [kv_heads, capacity, head_dim] in f32, f16 and bf16, u8 in "
          "compressed formats.")
      .def_prop_ro(
          "scales",
          [](const BoundKvBuffer& self) -> std::optional<BoundTensor> {
            if (!self.buffer.scales.defined()) return std::nullopt;
            return BoundTensor{self.device, self.buffer.scales};
          },
          "The scales, or None where the format has none.")
      .def("__repr__", [](const BoundKvBuffer& self) {
        const KvShape& shape = self.buffer.shape;
        std::ostringstream text = plain_text();
        text << "gyre.KvBuffer(" << name(shape.format) << " " << role_name(shape.role)
             << ", heads=" << shape.kv_heads << ", capacity=" << shape.capacity
             << ", head_dim=" << shape.head_dim;
        if (shape.scale_factor != 1) text << ", scale_factor=" << shape.scale_factor;
        text << ", device=" << self.device.info().name << ")";
        return text.str();
      });
}

}  // namespace gyre::python
