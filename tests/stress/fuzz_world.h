#pragma once
// What the fuzzed calls of one input work on, and what is checked about every one of them: it
// succeeds or throws gyre::Error, a refused one leaves no command, and no byte outside its tensors
// changes.

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gyre/gyre.h"
#include "runtime/storage.h"
#include "stress/fuzz_input.h"
#include "tensor_bytes.h"

namespace gyre::test {

// A rule was broken. Not a gyre::Error, and never caught on the way out.
struct FuzzFailure : std::logic_error {
  using std::logic_error::logic_error;
};

struct FuzzCount {
  uint64_t accepted = 0, refused = 0;
};

// Statistics of the whole process.
struct FuzzStats {
  std::map<std::string, FuzzCount> calls;
  uint64_t compared = 0;              // results that were checked
  const char* volatile current = "";  // the call that is running, for who looks after a crash
};
FuzzStats& fuzz_stats();

void expect(bool holds, const std::string& rule);

struct FuzzCache {
  KvCache cache;
  uint64_t length = 0;
};

struct FuzzSequence {
  KvSequence sequence;
  uint64_t length = 0;
};

struct FuzzServer {
  KvPool pool;
  KvBatch batch;
  std::vector<FuzzSequence> sequences{};
  std::vector<std::byte> page{};  // one that was exported
};

class FuzzWorld {
 public:
  explicit FuzzWorld(std::span<const uint8_t> bytes);
  FuzzWorld(const FuzzWorld&) = delete;
  FuzzWorld& operator=(const FuzzWorld&) = delete;
  ~FuzzWorld();  // the next input finds no file and no trace

  // One public call. True: it was accepted.
  template <class Call>
  bool call(const char* name, const Call& made) {
    FuzzCount& count = begin(name);
    try {
      made();
    } catch (const Error& error) {
      ++count.refused;
      check_refused(name, error);
      return false;
    } catch (const FuzzFailure&) {
      throw;
    } catch (const std::exception& error) {
      expect(false, std::string(name) + " threw " + error.what());
    }
    ++count.accepted;
    return true;
  }

  // A tensor of this type and shape, in memory with a border; odd: any other, or none.
  Tensor tensor(DType dtype, const Dims& shape);
  Tensor packed(DType dtype, const Dims& shape);  // without gaps between its rows
  Tensor floats(const Dims& shape) { return tensor(float_type(), shape); }
  Tensor indices(DType dtype, const Dims& shape, uint64_t limit);  // numbers below it, mostly
  KvBuffer buffer(KvShape shape);
  KvPages pages(const KvPageShape& shape, uint64_t count);
  KvCalibration calibration(uint64_t kv_heads, uint64_t head_dim);
  KvLayer layer();
  // Layers, at times with their calibration.
  template <class Options>
  void add_layers(Options& options) {
    for (uint64_t i = in.number(1 + in.below(2)) % 5; i != 0; --i)
      options.layers.push_back(layer());
    if (in.chance(4) && !options.layers.empty())
      options.layers.push_back(
          {.kv_shared_layer_index = in.number(in.below(options.layers.size()))});
    if (!in.chance(8)) return;
    for (size_t i = 0; i < options.layers.size(); ++i)
      options.calibration.push_back({calibration(options.kv_heads, options.head_dim),
                                     calibration(options.kv_heads, options.head_dim)});
  }
  // Attention of some rows over a layer of a cache or a pool.
  struct Attend {
    AttendInputs inputs;
    AttendOptions options;
  };
  Attend some_attend(const KvLayer& l, uint64_t rows) {
    const uint64_t heads = l.kv_heads * (1 + in.below(3));
    Attend made{
        {.q = floats({rows, heads, l.head_dim}), .out = floats({rows, heads, l.v_head_dim})},
        {.mask = {.causal = !in.chance(4),
                  .window = in.chance(4) ? in.number(1 + in.below(8)) : 0}}};
    if (in.chance(4)) made.inputs.lse = tensor(DType::f32, {rows, heads});
    if (in.chance(6)) made.options.mask.sink_logits = packed(DType::f32, {heads});
    if (in.chance(6)) made.options.mask.alibi_slopes = packed(DType::f32, {heads});
    if (in.chance(8)) made.options.mask.tree_mask = packed(DType::u8, {rows, rows});
    if (in.chance(3)) made.options.scale = in.real(0.25f);
    if (in.chance(6)) made.options.mask.soft_cap = in.real(15.0f);
    return made;
  }

  DType float_type();
  DType any_type();
  KvFormat format();
  uint64_t head_dim();
  Encoder& some_encoder();
  const Device& some_device();
  std::string path();  // in a folder in memory; odd: no file can be there

  // Runs what is recorded and looks at the borders. False: a list that is refused, or would take
  // long, is dropped.
  bool submit();
  bool checked() const {
    return !in.spoiled() && !wild_;
  }  // results follow the rules of finite numbers
  bool heavy() const { return heavy_; }

  FuzzInput in;
  Device device, other;
  Encoder encoder, stranger, moved;
  std::vector<Graph> graphs;
  std::vector<FuzzCache> caches;
  std::vector<FuzzServer> servers;
  std::vector<Tensor> kept;
  std::map<std::string, uint64_t> saved;  // lengths, by path

 private:
  struct Block {
    std::shared_ptr<std::vector<uint8_t>> memory;
    std::vector<uint8_t> outside;  // 1: no element of the view
    DType dtype;
    Dims shape, strides;
    const char* before;  // the call that was made before it
  };

  FuzzCount& begin(const char* name);
  void check_refused(const char* name, const Error& error);
  Tensor good(const Device& on, DType dtype, const Dims& shape, bool gaps);
  Tensor odd(DType dtype, const Dims& shape);
  Tensor odd_shape(DType dtype, Dims shape);
  Tensor odd_view(DType dtype, const Dims& shape);
  Tensor guarded(const Device& on, DType dtype, const Dims& shape, const Dims& strides);
  void fill(const Tensor& tensor);
  void keep(const Tensor& tensor);

  std::vector<Block> blocks_;
  std::vector<std::string> paths_;
  uint32_t commands_ = 0, barriers_ = 0;
  bool heavy_ = false, wild_ = false;
};

// All elements in row-major order.
std::vector<float> values(const Tensor& tensor);
// Finite, and no larger than `most`.
void expect_bounded(const Tensor& tensor, float most, const char* what);

using FuzzCall = void (*)(FuzzWorld&, FuzzInput&);  // the world, and its `in`
std::span<const FuzzCall> fuzz_op_calls();
std::span<const FuzzCall> fuzz_attention_calls();
std::span<const FuzzCall> fuzz_rope_calls();
std::span<const FuzzCall> fuzz_runtime_calls();
std::span<const FuzzCall> fuzz_tensor_calls();
std::span<const FuzzCall> fuzz_cache_calls();
std::span<const FuzzCall> fuzz_serving_calls();
std::span<const FuzzCall> fuzz_c_calls();

void trim_fuzz_devices();
// Calls until the bytes are used up. Throws FuzzFailure.
void fuzz_one(std::span<const uint8_t> bytes);

}  // namespace gyre::test
