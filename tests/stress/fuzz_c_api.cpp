// The C ABI: null pointers, structs of other sizes, numbers that are no enumerators.
#include <cstring>

#include "gyre/gyre_c.h"
#include "stress/fuzz_world.h"

namespace gyre::test {
namespace {

template <class Handle, void (*Destroy)(Handle*)>
struct Owned {
  Handle* handle = nullptr;
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Destroy(handle); }
  Handle** out(FuzzInput& in) {
    Destroy(handle);
    handle = nullptr;
    return in.spoil() ? nullptr : &handle;
  }
  Handle* in(FuzzInput& choices) const { return choices.spoil() ? nullptr : handle; }
};
using CTensor = Owned<gyre_tensor, gyre_tensor_destroy>;
using CFence = Owned<gyre_fence, gyre_fence_destroy>;

// A status that is one, with a message where it is not OK. True: accepted.
bool ask(FuzzWorld& w, const char* name, gyre_status status) {
  return w.call(name, [&] {
    expect(status >= GYRE_OK && status < GYRE_INTERNAL,
           "status " + std::to_string(status) + ": " + gyre_last_error());
    if (status == GYRE_OK) return;
    expect(std::strlen(gyre_last_error()) != 0, "a refusal without a message");
    throw Error(static_cast<ErrorCode>(status - 1), gyre_last_error());
  });
}

#define ASK(function, ...) ask(w, #function, function(__VA_ARGS__))

// A struct of another size: shorter than its first fields, or one of a newer library, whose further
// fields are 0 or not. Until the next one of its kind.
template <class Struct>
const Struct* odd_size(FuzzInput& in, const Struct& given) {
  constexpr size_t kFurther = 4;
  static std::array<uint64_t, sizeof(Struct) / 8 + kFurther> room;
  room.fill(0);
  std::memcpy(room.data(), &given, sizeof given);
  room[0] = in.spoil() ? in.below(sizeof(room) + 1) : sizeof(Struct);  // its size
  if (in.spoil()) room.back() = 1;
  return in.spoil() ? nullptr : reinterpret_cast<const Struct*>(room.data());
}

gyre_device* c_device() {
  struct Opened {
    gyre_device* device = nullptr;
    Opened() {
      gyre_device_options options{};
      options.size = sizeof(options);
      options.threads = 1;
      if (gyre_device_open("cpu", &options, &device) != GYRE_OK)
        throw FuzzFailure(gyre_last_error());
    }
    ~Opened() { gyre_device_destroy(device); }
  };
  static const Opened kOpened;
  return kOpened.device;
}

void make(FuzzWorld& w, CTensor& tensor, gyre_dtype dtype, std::initializer_list<uint64_t> shape) {
  FuzzInput& in = w.in;
  std::array<uint64_t, 8> dims{};
  size_t rank = 0;
  for (const uint64_t n : shape) dims[rank++] = in.number(n);
  ASK(gyre_tensor_create, in.spoil() ? nullptr : c_device(),
      static_cast<gyre_dtype>(in.number(static_cast<uint64_t>(dtype))),
      static_cast<uint32_t>(in.spoil() ? in.below(9) : rank), in.spoil() ? nullptr : dims.data(),
      tensor.out(in));
}

void fuzz_tensors(FuzzWorld& w, FuzzInput& in) {
  CTensor tensor, view;
  make(w, tensor, static_cast<gyre_dtype>(1 + in.below(7)), {1 + in.below(4), 4});
  gyre_tensor_info info{};
  info.size = sizeof(info);
  if (in.spoil()) info.size = in.below(sizeof(info));
  ASK(gyre_tensor_get_info, tensor.in(in), in.spoil() ? nullptr : &info);
  ASK(gyre_tensor_slice, tensor.in(in), static_cast<uint32_t>(in.number(0)), in.number(0),
      in.number(1), view.out(in));
  const std::array<uint64_t, 8> dims = {in.number(1), in.number(0), 0, 0, 0, 0, 0, 0};
  ASK(gyre_tensor_permute, tensor.in(in), static_cast<uint32_t>(in.spoil() ? in.below(9) : 2),
      in.spoil() ? nullptr : dims.data(), view.out(in));
  const std::array<uint64_t, 8> shape = {in.number(2), in.number(2), 1, 1, 1, 1, 1, 1};
  ASK(gyre_tensor_reshape, tensor.in(in), static_cast<uint32_t>(in.spoil() ? in.below(9) : 2),
      shape.data(), view.out(in));
  gyre_strided_view layout{};
  layout.shape = shape.data();
  layout.strides = dims.data();
  layout.rank = static_cast<uint32_t>(in.spoil() ? in.below(9) : 2);
  ASK(gyre_tensor_strided, tensor.in(in), odd_size(in, layout), view.out(in));
  std::array<std::byte, 256> memory{};
  const uint64_t bytes = in.spoil() ? in.below(256) : std::min<uint64_t>(info.bytes, 256);
  ASK(gyre_tensor_write, tensor.in(in), in.spoil() ? nullptr : memory.data(), bytes);
  ASK(gyre_tensor_read, tensor.in(in), in.spoil() ? nullptr : memory.data(), bytes);
  void* data = nullptr;
  ASK(gyre_tensor_data, tensor.in(in), in.spoil() ? nullptr : &data);
}

void fuzz_objects(FuzzWorld& w, FuzzInput& in) {
  Owned<gyre_encoder, gyre_encoder_destroy> encoder;
  Owned<gyre_kv_cache, gyre_kv_cache_destroy> cache, fork;
  Owned<gyre_graph, gyre_graph_destroy> graph;
  CFence fence;
  CTensor k, out, positions;
  ASK(gyre_encoder_create, in.spoil() ? nullptr : c_device(), encoder.out(in));
  gyre_kv_layer layer{};
  layer.k = static_cast<gyre_kv_format>(in.number(1 + in.below(3)));
  layer.v = static_cast<gyre_kv_format>(in.number(16 + in.below(6)));
  gyre_kv_cache_options options{};
  options.kv_heads = in.number(1);
  options.head_dim = in.number(16);
  options.capacity = in.number(16);
  options.step_tokens = in.number(4);
  options.layers = odd_size(in, layer);
  options.layer_count = in.spoil() ? in.below(2) : 1;
  ASK(gyre_kv_cache_create, c_device(), odd_size(in, options), cache.out(in));
  make(w, k, GYRE_F32, {2, 1, 16});
  make(w, out, GYRE_F32, {2, 1, 16});
  ASK(gyre_kv_cache_begin_step, cache.in(in), encoder.in(in), in.number(2));
  ASK(gyre_kv_cache_append, cache.in(in), encoder.in(in), in.number(0), k.in(in), k.in(in));
  gyre_attend_inputs inputs{};
  inputs.q = k.in(in);
  inputs.out = out.in(in);
  ASK(gyre_kv_cache_attend, cache.in(in), encoder.in(in), in.number(0), odd_size(in, inputs),
      nullptr);
  ASK(gyre_encoder_submit, encoder.in(in), in.chance(2) ? nullptr : fence.out(in));
  ASK(gyre_fence_wait, fence.in(in));
  ASK(gyre_kv_cache_fork, cache.in(in), encoder.in(in), in.number(0), fork.out(in));
  ASK(gyre_encoder_instantiate, encoder.in(in), graph.out(in));
  ASK(gyre_graph_replay, graph.in(in), nullptr);
  ASK(gyre_kv_cache_rollback, cache.in(in), encoder.in(in), in.number(1));
  uint64_t length = 0;
  ASK(gyre_kv_cache_length, cache.in(in), in.spoil() ? nullptr : &length);
  ASK(gyre_kv_cache_positions, cache.in(in), in.number(1), positions.out(in));
  gyre_kv_layer_info info{};
  info.size = in.number(sizeof(info)) % (sizeof(info) + 1);
  ASK(gyre_kv_cache_describe, cache.in(in), in.number(0), in.spoil() ? nullptr : &info);
}

void fuzz_pool(FuzzWorld& w, FuzzInput& in) {
  Owned<gyre_kv_pool, gyre_kv_pool_destroy> pool;
  Owned<gyre_kv_sequence, gyre_kv_sequence_destroy> sequence, fork;
  Owned<gyre_kv_batch, gyre_kv_batch_destroy> batch;
  Owned<gyre_bytes, gyre_bytes_destroy> page;
  Owned<gyre_encoder, gyre_encoder_destroy> encoder;
  CTensor k;
  gyre_kv_pool_options options{};
  options.kv_heads = in.number(1);
  options.head_dim = in.number(16);
  options.pages = in.number(4);
  options.page_tokens = in.number(8);
  options.sequences = in.number(2);
  options.step_tokens = in.number(8);
  ASK(gyre_kv_pool_create, c_device(), odd_size(in, options), pool.out(in));
  ASK(gyre_kv_pool_sequence, pool.in(in), sequence.out(in));
  gyre_kv_batch_options bounds{};
  bounds.max_tokens = in.number(8);
  bounds.max_sequences = in.number(2);
  ASK(gyre_kv_batch_create, pool.in(in), odd_size(in, bounds), batch.out(in));
  ASK(gyre_encoder_create, c_device(), encoder.out(in));
  gyre_kv_step step{};
  step.sequence = sequence.in(in);
  step.tokens = in.number(8);
  ASK(gyre_kv_batch_begin_step, batch.in(in), encoder.in(in), odd_size(in, step),
      in.spoil() ? in.below(2) : 1);
  make(w, k, GYRE_F32, {8, 1, 16});
  ASK(gyre_kv_batch_append, batch.in(in), encoder.in(in), in.number(0), k.in(in), k.in(in));
  ASK(gyre_encoder_submit, encoder.in(in), nullptr);
  const std::array<int32_t, 8> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  ASK(gyre_kv_pool_publish, pool.in(in), sequence.in(in), in.spoil() ? nullptr : tokens.data(), 8);
  ASK(gyre_kv_pool_match, pool.in(in), tokens.data(), 8, fork.out(in));
  ASK(gyre_kv_sequence_fork, sequence.in(in), fork.out(in));
  if (ASK(gyre_kv_pool_export_page, pool.in(in), sequence.in(in), in.number(0), page.out(in))) {
    const void* data = nullptr;
    uint64_t size = 0;
    if (ASK(gyre_bytes_get, page.in(in), &data, &size))
      ASK(gyre_kv_pool_import_page, pool.in(in), fork.in(in), data, in.spoil() ? size / 2 : size);
  }
  gyre_kv_pool_info info{};
  info.size = in.number(sizeof(info)) % (sizeof(info) + 1);
  ASK(gyre_kv_pool_describe, pool.in(in), in.spoil() ? nullptr : &info);
  ASK(gyre_kv_sequence_rollback, sequence.in(in), in.number(1));
}

}  // namespace

std::span<const FuzzCall> fuzz_c_calls() {
  static constexpr FuzzCall kCalls[] = {fuzz_tensors, fuzz_objects, fuzz_pool};
  return kCalls;
}

}  // namespace gyre::test
