#include <algorithm>
#include <bit>
#include <limits>

#include "cache/kv_cache_state.h"
#include "cache/snapshot.h"
#include "gyre/snapshot.h"
#include "runtime/device_impl.h"
#include "runtime/launches.h"
#include "runtime/require.h"

namespace gyre {
namespace {

static_assert(std::endian::native == std::endian::little, "sections are memory as it lies");

const Tensor& tensor_of(const CacheSegments& segments, const KvSnapshotSection& section) {
  uint32_t i = 0;
  const auto kind = static_cast<abi::KvSegment>(section.segment);
  while (i + 1 < segments.count && segments.of[i].at.segment != kind) ++i;
  const KvBuffer& buffer = section.role == KvRole::k ? segments.of[i].k : segments.of[i].v;
  return section.part == KvPart::codes ? buffer.codes : buffer.scales;
}

uint64_t row_bytes(const Tensor& tensor) {
  return std::max<uint64_t>(1, tensor.bytes() / tensor.shape(0) / tensor.shape(1));
}

// Slots of a tensor, or tiles of them, that a section stores.
uint64_t stored_rows(const Tensor& tensor, const KvSnapshotSection& section) {
  const uint64_t heads = tensor.shape(0), slots = tensor.shape(1);
  if (section.bytes == 0 || heads == 0 || slots == 0) return 0;
  return section.bytes / heads / row_bytes(tensor);
}

// Calls visit(view, bytes) for the stored part of a tensor, in the order of the file: head by head,
// each in chunks of bounded size.
template <class Visit>
void for_chunks(const Tensor& tensor, const KvSnapshotSection& section, const Visit& visit) {
  const uint64_t rows = stored_rows(tensor, section);
  if (rows == 0) return;
  const uint64_t row = row_bytes(tensor), chunk_rows = std::max<uint64_t>(1, kFileChunkBytes / row);
  for (uint64_t head = 0; head < tensor.shape(0); ++head) {
    for (uint64_t first = 0; first < rows; first += chunk_rows) {
      const uint64_t count = std::min(chunk_rows, rows - first);
      visit(tensor.slice(0, head, 1).slice(1, first, count), count * row);
    }
  }
}

// Calls `with` with a null pointer to the tensor's element type.
template <class With>
void with_element(DType dtype, const With& with) {
  switch (dtype) {
    case DType::f32:
      return with(static_cast<float*>(nullptr));
    case DType::f16:
      return with(static_cast<Half*>(nullptr));
    case DType::bf16:
      return with(static_cast<BFloat16*>(nullptr));
    default:
      return with(static_cast<uint8_t*>(nullptr));
  }
}

void read_chunk(const Tensor& view, std::span<std::byte> to) {
  with_element(view.dtype(), [&]<class T>(T*) {
    view.read_to(std::span<T>(reinterpret_cast<T*>(to.data()), view.elements()));
  });
}

void write_chunk(const Tensor& view, std::span<const std::byte> from) {
  with_element(view.dtype(), [&]<class T>(T*) {
    view.write_from(std::span<const T>(reinterpret_cast<const T*>(from.data()), view.elements()));
  });
}

uint64_t save_section(NewFile& file, const KvSnapshotSection& section, const Tensor& tensor) {
  std::vector<std::byte> staged;
  Checksum checksum;
  uint64_t at = section.offset;
  for_chunks(tensor, section, [&](const Tensor& view, uint64_t bytes) {
    staged.resize(bytes);
    read_chunk(view, staged);
    checksum.add(staged);
    file.write_at(at, staged);
    at += bytes;
  });
  return checksum.value();
}

uint64_t load_section(const Source& source, const KvSnapshotSection& section,
                      const Tensor& tensor) {
  std::vector<std::byte> staged;
  Checksum checksum;
  uint64_t at = section.offset;
  for_chunks(tensor, section, [&](const Tensor& view, uint64_t bytes) {
    staged.resize(bytes);
    source.read(at, staged);
    checksum.add(staged);
    write_chunk(view, staged);
    at += bytes;
  });
  return checksum.value();
}

}  // namespace

void KvCache::State::copy_layers(Encoder& encoder, const KvSnapshotInfo& held, const State& to,
                                 const NewNote* note) const {
  for (const KvSnapshotSection& section : held.sections) {
    const Tensor& a = tensor_of(layers[section.layer].segments, section);
    const Tensor& b = tensor_of(to.layers[section.layer].segments, section);
    const uint64_t rows = stored_rows(a, section);
    if (rows != 0) copy_bytes(encoder, a.slice(1, 0, rows), b.slice(1, 0, rows), note);
  }
}

KvSnapshotInfo KvCache::State::snapshot() const {
  KvSnapshotInfo info;
  info.version = snapshot_version(resolved);
  info.options = options;
  info.options.layers = resolved;
  const LayerShape common = common_shape(resolved);
  info.options.kv_heads = common.kv_heads;
  info.options.head_dim = common.head_dim;
  info.options.v_head_dim = common.v_head_dim;
  info.length = sequence.length;
  info.tail_begin = sequence.tail_begin;
  info.peak = sequence.peak;
  info.calibration = calibration;
  for (const Layer& layer : layers) {
    const abi::KvPlaces& places = layer.segments.of[0].at.places;
    info.slots.push_back({places.body_capacity, places.tail_capacity});
  }
  return info;
}

void KvCache::save(const std::string& path) const try {
  const State& s = state();
  impl_of(s.device)->require_same_process("kv_cache.save");
  s.steps->require_submitted("kv_cache.save");
  s.require_complete("kv_cache.save");
  impl_of(s.device)->wait();
  KvSnapshotInfo info = s.snapshot();
  plan_snapshot(info, std::numeric_limits<int64_t>::max());
  NewFile file("kv_cache.save", path);
  file.resize(info.file_bytes);  // zeros between the sections
  for (KvSnapshotSection& section : info.sections) {
    const Tensor& tensor = tensor_of(s.layers[section.layer].segments, section);
    section.checksum = save_section(file, section, tensor);
  }
  file.write_at(0, snapshot_header(info));
  file.commit();
} catch (const std::bad_alloc&) {
  out_of_memory("kv_cache.save");
}

void KvCache::load(const std::string& path) try {
  State& s = state();
  impl_of(s.device)->require_same_process("kv_cache.load");
  s.steps->require_submitted("kv_cache.load");
  const FileSource source("kv_cache.load", path);
  const KvSnapshotInfo info = read_snapshot_header(source);
  check_snapshot_fits(source.where(), info, s.snapshot());
  verify_snapshot(source, info);
  // The file is read twice, so it is checked twice: it may change in between.
  auto made = std::make_unique<State>(s.device, s.options);
  for (size_t i = 0; i < info.sections.size(); ++i) {
    const KvSnapshotSection& section = info.sections[i];
    const Tensor& tensor = tensor_of(made->layers[section.layer].segments, section);
    check_section(source, info, i, load_section(source, section, tensor));
  }
  // Into the memory that was there: graphs recorded before go on with what was loaded.
  Encoder encoder(s.device);
  made->copy_layers(encoder, info, s);
  const State::Sequence loaded{info.length, info.tail_begin, info.peak};
  extend_cache(encoder, s.state, s.positions, loaded.params());
  const uint64_t before = launches();
  try {
    encoder.submit().wait();
  } catch (...) {  // what it is says nothing: DeviceOptions::poll throws anything, so may a wait
    if (launches() != before) {
      s.log->lost();
      s.unwritten = {Steps::kLostStep, 0};
    }
    throw;
  }
  s.sequence = loaded;
  s.steps->forget(s.unwritten.step);
  s.unwritten = {};
  s.log->loaded(loaded.place());
} catch (const std::bad_alloc&) {
  out_of_memory("kv_cache.load");
}

KvSnapshotInfo inspect_snapshot(const std::string& path) try {
  return read_snapshot_header(FileSource("inspect_snapshot", path));
} catch (const std::bad_alloc&) {
  out_of_memory("inspect_snapshot");
}

void verify_snapshot(const std::string& path) try {
  const FileSource source("verify_snapshot", path);
  verify_snapshot(source, read_snapshot_header(source));
} catch (const std::bad_alloc&) {
  out_of_memory("verify_snapshot");
}

}  // namespace gyre
