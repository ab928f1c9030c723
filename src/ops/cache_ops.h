#pragma once
// The ops only a KvCache records: they read and write its state in device memory, and are right
// only for memory that the cache laid out.

#include "abi/kv_extend.h"
#include "abi/kv_state.h"
#include "abi/write.h"
#include "gyre/attention.h"
#include "gyre/calibration.h"
#include "gyre/encoder.h"
#include "gyre/format.h"
#include "gyre/rope_append.h"
#include "runtime/command_notes.h"

namespace gyre {

class Recording;

// Each op leaves the cache's note beside its commands, if it is given one.

struct CacheState {
  Tensor state;  // u8: an abi::KvState
  abi::KvPlaces places{};
  abi::KvSegment segment = abi::kSegmentBody;
};

// Keys of one layer that lie in one place.
struct CacheSegment {
  KvBuffer k, v;
  CacheState at;
};

struct CacheSegments {
  CacheSegment of[3];  // the body, then sink tokens and tail if there are any
  uint32_t count = 1;
  Tensor k_f16{}, v_f16{};  // f16: memory of sink tokens and tail; undefined: there are none
  KvLayerCalibration calibration{};  // all segments are in its bases
};

// How many f16 elements a half's sink tokens and tail take, as dims that nobody has multiplied yet.
Dims f16_shape(const KvShape& body, const abi::KvPlaces& places);
// Adds the segments for sink tokens and tail, over contiguous memory of that size each.
void add_f16(CacheSegments& segments, const Tensor& k_f16, const Tensor& v_f16);

struct CacheAppend {
  const Tensor& k;  // [tokens, kv_heads, head_dim]
  const Tensor& v;
  const CacheSegments& segments;
};

// k, v and where they go, checked; and the command that takes them there.
abi::WriteParams checked_append(const char* op, const CacheAppend& in);
void dispatch_append(Recording& recording, const Device& device, const CacheAppend& in,
                     abi::WriteParams params);

void extend_cache(Encoder& encoder, const Tensor& state, const Tensor& positions,
                  const abi::KvExtendParams& params, const NewNote* note = nullptr);
void append_cache(Encoder& encoder, const CacheAppend& append, const NewNote* note = nullptr);
void rope_append_cache(Encoder& encoder, const RopeAppendInputs& inputs,
                       const RopeAppendOptions& options, const CacheSegments& segments,
                       const NewNote* note = nullptr);
// A schedule of attention over pages, and the command of a list that writes it.
struct ListedSchedule {
  static constexpr uint64_t kNone = ~uint64_t{0};
  uint32_t key = 0;
  uint64_t command = kNone;
  Tensor memory;
};

// Memory that the attention of all layers uses, one after the other; it grows.
struct AttendScratch {
  Tensor in_kernel;  // of plans that reduce in the kernel: nobody else may write to it
  Tensor latent;     // of those of latent attention
  Tensor states;     // partial states on their way to attention_merge

  Tensor& of_kernels(bool over_latent) { return over_latent ? latent : in_kernel; }
};

// Refuses what is not scratch memory that an earlier call made; null: there is none.
void check_scratch(const char* op, const Tensor* scratch);
// Calls `attend` with memory to use, what kernels need of it the caller's own if there is any.
template <class Attend>
void with_scratch(const char* op, AttendScratch& own, Tensor* callers, bool latent,
                  const Attend& attend) {
  if (callers == nullptr) return attend(own);
  check_scratch(op, callers);
  AttendScratch used = own;
  used.of_kernels(latent) = *callers;
  attend(used);
  *callers = used.of_kernels(latent);
  own.states = used.states;
}

// Reads the caches of `segments` and ignores those of `inputs`. A refused call leaves `scratch` as
// it is.
void attend_cache(Encoder& encoder, const AttentionInputs& inputs, const AttentionOptions& options,
                  const CacheSegments& segments, AttendScratch& scratch,
                  const NewNote* note = nullptr);
std::string describe_attention(const Device& device, const KvShape& k, const KvShape& v,
                               bool latent);
// How rope_append refuses a latent layer or latent pages.
inline constexpr const char* kLatentIsNotRotated =
    " is latent: its k is not rotated; rotate v with rope(), then append";
// Tensors of one shape. Rows, along the first dimension, are contiguous in both.
void copy_bytes(Encoder& encoder, const Tensor& from, const Tensor& to,
                const NewNote* note = nullptr);

}  // namespace gyre
