#pragma once
// What a cache holds, in the clear: its snapshot, dequantized key by key.

#include "folder.h"
#include "gyre_test.h"
#include "kv_codec/kv_codec_fixture.h"

namespace gyre::test {

// [length, kv_heads, head_dim]; NaN for keys that a ring has lost, or that a tail never had.
struct HeldSide {
  std::vector<double> body;  // sink tokens included
  std::vector<double> tail;
};
struct HeldValues {
  HeldSide k, v;
  uint64_t tail_begin;
};

class HeldReader {
 public:
  explicit HeldReader(const std::string& path)
      : info_(inspect_snapshot(path)), file_(bytes_of_file(path)) {}

  HeldValues read(uint64_t layer) const {
    return {side(layer, KvRole::k), side(layer, KvRole::v), info_.tail_begin};
  }

 private:
  static const Device& host() {
    static const Device device = Device::open("cpu", {.threads = 1});
    return device;
  }
  uint64_t dim(KvRole role) const {
    return role == KvRole::k ? info_.options.head_dim : info_.options.v_head_dim;
  }

  void put_bytes(const KvSnapshotSection& section, const Tensor& tensor) const {
    write_bytes(tensor, std::span(file_).subspan(section.offset, section.bytes));
  }

  // A segment as [slots, kv_heads, head_dim].
  std::vector<float> segment(uint64_t layer, KvSegmentKind kind, KvRole role) const {
    KvBuffer buffer;
    for (const KvSnapshotSection& section : info_.sections) {
      if (section.layer != layer || section.segment != kind || section.role != role) continue;
      if (section.slots == 0) return {};
      if (section.part == KvPart::codes)
        buffer = KvBuffer::allocate(
            cpu_, {section.format, role, info_.options.kv_heads, section.slots, dim(role)});
      put_bytes(section, section.part == KvPart::codes ? buffer.codes : buffer.scales);
    }
    if (!buffer.codes.defined()) return {};
    return decoded(cpu_, buffer);
  }

  // docs/kv_cache.md: the first keys are sink tokens, all others are in the body, which is a ring
  // where there is a window, and those from tail_begin on also in the tail's ring.
  HeldSide side(uint64_t layer, KvRole role) const {
    const KvLayer& numbers = info_.options.layers[layer];
    const KvSnapshotSlots& slots = info_.slots[layer];
    const std::vector<float> body = segment(layer, KvSegmentKind::body, role);
    const std::vector<float> sink_tokens = segment(layer, KvSegmentKind::sink_tokens, role);
    const std::vector<float> tail = segment(layer, KvSegmentKind::tail, role);
    const uint64_t row = info_.options.kv_heads * dim(role);
    const auto put = [&](std::vector<double>& to, const std::vector<float>& from, uint64_t slot,
                         bool lost) {
      for (uint64_t i = 0; i < row; ++i)
        to.push_back(lost ? std::numeric_limits<double>::quiet_NaN() : from.at(slot * row + i));
    };
    HeldSide held;
    for (uint64_t key = 0; key < info_.length; ++key) {
      if (key < numbers.sink_tokens) {
        put(held.body, sink_tokens, key, false);
      } else {
        const bool lost = info_.peak - key > slots.body;
        put(held.body, body, (key - numbers.sink_tokens) % slots.body, lost);
      }
      const bool near = numbers.tail != 0 && key >= std::max(info_.tail_begin, numbers.sink_tokens);
      put(held.tail, tail, near ? key % slots.tail : 0, !near);
    }
    return held;
  }

  KvSnapshotInfo info_;
  Bytes file_;
  Device cpu_ = host();
};

}  // namespace gyre::test
