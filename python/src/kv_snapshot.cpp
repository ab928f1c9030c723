#include <nanobind/stl/filesystem.h>

#include <filesystem>

#include "kv_buffer.h"

namespace gyre::python {
namespace {

template <class T, auto Member>
std::string name_of(const T& value) {
  return std::string(name(value.*Member));
}

using Section = KvSnapshotSection;

}  // namespace

void bind_kv_snapshot(nb::module_& module) {
  nb::class_<Section>(module, "KvSnapshotSection", "One tensor of a saved cache.")
      .def_ro("layer", &Section::layer, "The number of its layer.")
      .def_prop_ro("segment", name_of<Section, &Section::segment>,
                   "One of body, sink_tokens and tail.")
      .def_prop_ro(
          "role", [](const Section& section) { return role_name(section.role); }, "Either k or v.")
      .def_prop_ro("part", name_of<Section, &Section::part>, "Either codes or scales.")
      .def_prop_ro("format", name_of<Section, &Section::format>, "The name of its format.")
      .def_ro("slots", &Section::slots, "The number of slots stored.")
      .def_ro("offset", &Section::offset, "The position of its first byte in the file.")
      .def_ro("nbytes", &Section::bytes, "The number of bytes stored.")
      .def_ro("checksum", &Section::checksum, "XXH3, 64 bits, of its bytes.");
  nb::class_<KvSnapshotInfo>(module, "KvSnapshotInfo", "What a snapshot says about itself.")
      .def_ro("version", &KvSnapshotInfo::version, "The version of the file format.")
      .def_ro("length", &KvSnapshotInfo::length, "The number of tokens.")
      .def_ro("sections", &KvSnapshotInfo::sections, "The tensors that are stored.")
      .def_ro("file_bytes", &KvSnapshotInfo::file_bytes, "The bytes of the file.")
      .def_ro("calibration", &KvSnapshotInfo::calibration,
              "A checksum of the calibration that the rows were written with; 0 for none.")
      .def_prop_ro(
          "kv_heads", [](const KvSnapshotInfo& info) { return info.options.kv_heads; },
          "The KV heads of every layer; 0 where layers differ.")
      .def_prop_ro(
          "head_dim", [](const KvSnapshotInfo& info) { return info.options.head_dim; },
          "The head_dim of every layer; 0 where layers differ.")
      .def_prop_ro(
          "v_head_dim", [](const KvSnapshotInfo& info) { return info.options.v_head_dim; },
          "The v_head_dim of every layer; 0 where layers differ.")
      .def_prop_ro(
          "capacity", [](const KvSnapshotInfo& info) { return info.options.capacity; },
          "The capacity of the cache that was saved.")
      .def_prop_ro(
          "step_tokens", [](const KvSnapshotInfo& info) { return info.options.step_tokens; },
          "The step_tokens of the cache that was saved.")
      .def_prop_ro(
          "layers", [](const KvSnapshotInfo& info) { return info.options.layers; },
          "The layers, with every number filled in.");
  module.def(
      "inspect_snapshot",
      [](const std::filesystem::path& path) {
        return without_gil([&] { return inspect_snapshot(path.string()); });
      },
      "path"_a, nb::sig("def inspect_snapshot(path: str | os.PathLike[str]) -> KvSnapshotInfo"),
      "Reads the header of a file that KvCache.save() wrote.");
  module.def(
      "verify_snapshot",
      [](const std::filesystem::path& path) {
        without_gil([&] { verify_snapshot(path.string()); });
      },
      "path"_a, nb::sig("def verify_snapshot(path: str | os.PathLike[str]) -> None"),
      "Reads all of a file that KvCache.save() wrote; refuses one with a single wrong bit.");
}

}  // namespace gyre::python
