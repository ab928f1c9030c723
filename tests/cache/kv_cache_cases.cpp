// The ops that only a KvCache records: kv_extend, kv_append and bytes_copy, over memory that a
// cache would lay out.
#include <cstring>

#include "abi/words_write.h"
#include "gyre_test.h"
#include "kv_codec/kv_memory.h"
#include "ops/cache_ops.h"
#include "ops/words_write.h"

namespace gyre::test {
namespace {

using reference::KvSide;

// One step of a layer. Keys are counted from the oldest of the sequence.
struct AppendCase {
  DType source = DType::f32;
  KvFormat k = KvFormat::tq8;
  KvFormat v = KvFormat::tq4;
  uint64_t k_dim = 64, v_dim = 64, heads = 2, sink_tokens = 0;
  uint64_t tail = 0;  // tokens that stay in 16 bits
  uint64_t body = 40, start = 21, tokens = 5;
  uint64_t unseen = 0;  // tokens that the step has beyond those recorded
  std::string name = {};

  uint64_t length() const { return start + tokens; }
  uint64_t tail_slots() const { return tail == 0 ? 0 : tail + 9; }  // 9: the longest step
  abi::KvPlaces places() const { return {sink_tokens, tail, tail_slots(), body}; }
  abi::KvState state() const {
    return {start, length() + unseen, length() > tail_slots() ? length() - tail_slots() : 0};
  }
  KvShape shape(KvRole role) const {
    const bool is_v = role == KvRole::v;
    return {is_v ? v : k, role, heads, body, is_v ? v_dim : k_dim};
  }
  KvShape near(KvRole role, uint64_t slots) const {
    KvShape made = shape(role);
    made.format = KvFormat::f16;
    made.capacity = slots;
    return made;
  }
};

constexpr KvLayout kLayout = KvLayout::head_major;  // of what a cache allocates

// Sink tokens and tail as a cache lays them out: in one piece.
Block joined(const Block& sink_tokens, const Block& tail) {
  Block near = sink_tokens;
  near.dtype = DType::f16;
  near.before.insert(near.before.end(), tail.before.begin(), tail.before.end());
  near.after.insert(near.after.end(), tail.after.begin(), tail.after.end());
  return near;
}

// Blocks of one stream: source, body's codes and scales, sink tokens with the tail.
class Stream {
 public:
  Stream(const AppendCase& c, KvRole role, std::mt19937& random)
      : c_(c),
        shape_(c.shape(role)),
        source_side_{c.source, KvLayout::token_major, c.tokens, c.heads, shape_.head_dim, 0},
        random_(random) {
    source_.dtype = c.source;
    source_.before = Bytes(source_side_.elements() * size_bytes(c.source));
    body_ = kv_memory(shape_, kLayout, [&](uint64_t) { return fresh(DType::f32); });
    sinks_ = near(c.sink_tokens);
    tail_ = near(c.tail_slots());
    for (uint64_t t = 0; t < c.tokens; ++t) {
      for (uint64_t h = 0; h < c.heads; ++h)
        reference::store_row(source_side_, source_.before, t, h, fresh(c.source));
    }
    source_.after = source_.before;
    expect_step();
  }

  std::vector<Block> blocks() const {
    return {source_, body_.codes, body_.scales, joined(sinks_.codes, tail_.codes)};
  }

 private:
  KvMemory near(uint64_t slots) {
    return kv_memory(c_.near(shape_.role, slots), kLayout,
                     [&](uint64_t) { return fresh(DType::f16); });
  }

  std::vector<float> fresh(DType dtype) { return normal_row(shape_, dtype, random_); }

  void expect_step() {
    for (uint64_t key = c_.start; key < c_.length(); ++key) {
      for (uint64_t h = 0; h < c_.heads; ++h) {
        const auto row =
            reference::load_row<float>(source_side_, source_.before, key - c_.start, h);
        if (key < c_.sink_tokens) {
          expect_kv_row(c_.near(shape_.role, c_.sink_tokens), kLayout, {key, h}, row, sinks_);
          continue;
        }
        expect_kv_row(shape_, kLayout, {(key - c_.sink_tokens) % c_.body, h}, row, body_);
        if (c_.tail == 0) continue;
        expect_kv_row(c_.near(shape_.role, c_.tail_slots()), kLayout, {key % c_.tail_slots(), h},
                      row, tail_);
      }
    }
  }

  const AppendCase& c_;
  KvShape shape_;
  KvSide source_side_;
  std::mt19937& random_;
  Block source_;
  KvMemory body_, sinks_, tail_;
};

void record_append(const AppendCase& c, Encoder& encoder, std::span<const Tensor> t) {
  CacheSegments segments;
  segments.of[0] = {kv_buffer(c.shape(KvRole::k), kLayout, t[2], t[3]),
                    kv_buffer(c.shape(KvRole::v), kLayout, t[6], t[7]),
                    {t[0], c.places(), abi::kSegmentBody}};
  if (c.sink_tokens != 0 || c.tail != 0) add_f16(segments, t[4], t[8]);
  append_cache(encoder, {t[1].reshape({c.tokens, c.heads, c.k_dim}),
                         t[5].reshape({c.tokens, c.heads, c.v_dim}), segments});
}

OpRun make_append(const AppendCase& c) {
  std::mt19937 random = random_of(c.name);
  OpRun run;
  run.blocks.push_back(plain_block(DType::u8, std::vector{c.state()}));
  run.blocks.back().aligned = true;  // a cache's state is an allocation of its own
  for (const KvRole role : {KvRole::k, KvRole::v}) {
    for (const Block& made : Stream(c, role, random).blocks()) run.blocks.push_back(made);
  }
  run.record = [c](Encoder& encoder, std::span<const Tensor> t) { record_append(c, encoder, t); };
  return run;
}

OpCase append_case(AppendCase c, const std::string& what) {
  const std::string text = str_cat(c.k, "/", c.v, " from ", c.source, " ", what);
  c.name = "kv_append " + text;
  return kernel_case("kv_append", text, [c] { return make_append(c); });
}

// The state as it is given, and the positions of the step.
OpRun make_extend(uint64_t start, uint64_t tokens) {
  OpRun run;
  const abi::KvExtendParams params{{start, start + tokens, start / 2}, tokens};
  Block state = plain_block(DType::u8, std::vector{params.state});
  state.before = pattern_bytes(sizeof(params.state), 1);
  state.aligned = true;
  Block positions = plain_block(DType::i32, pattern_bytes((tokens + 3) * 4, 2));
  for (uint64_t i = 0; i < tokens; ++i)
    reference::store_bits(DType::i32, positions.after.data(), i, static_cast<uint32_t>(start + i));
  run.blocks = {state, positions};
  run.once = true;
  run.record = [params](Encoder& encoder, std::span<const Tensor> t) {
    extend_cache(encoder, t[0], t[1], params);
  };
  return run;
}

OpRun make_copy(uint64_t bytes) {
  OpRun run;
  const Block from = plain_block(DType::u8, pattern_bytes(bytes, 3));
  Block to = from;
  to.before = pattern_bytes(bytes, 4);
  run.blocks = {from, to};
  run.commands = bytes == 0 ? 0 : 1;
  run.record = [](Encoder& encoder, std::span<const Tensor> t) { copy_bytes(encoder, t[0], t[1]); };
  return run;
}

// Runs of one, two, ... words, each so many words after the last.
OpRun make_words(uint64_t words, uint64_t apart) {
  std::vector<int32_t> values(words);
  for (uint64_t i = 0; i < words; ++i) values[i] = static_cast<int32_t>(i * 2654435761u);
  std::vector<WordRun> runs;
  for (uint64_t at = 0, count = 1; at < words; at += count++ + apart)
    runs.push_back({at, std::min(count, words - at)});
  Block to = plain_block(DType::i32, pattern_bytes(words * sizeof(int32_t), 5));
  uint64_t sum = 0;
  for (const WordRun& run : runs) {
    std::memcpy(to.after.data() + run.at * sizeof(int32_t), values.data() + run.at,
                run.count * sizeof(int32_t));
    sum += run.count;
  }
  OpRun made;
  made.blocks = {to};
  made.commands = sum + 2 * runs.size() <= abi::kMaxWordsWrite ? 1 : 2;
  made.once = true;
  made.record = [values, runs](Encoder& encoder, std::span<const Tensor> t) {
    words_write(encoder, values, runs, t[0]);
  };
  return made;
}

// The first bytes of each row, between rows of different lengths.
OpRun make_copy_rows(uint64_t rows, uint64_t bytes) {
  OpRun run;
  const uint64_t from_stride = bytes + 5, to_stride = bytes + 32;
  const Block from = plain_block(DType::u8, pattern_bytes(rows * from_stride, 3));
  Block to = plain_block(DType::u8, pattern_bytes(rows * to_stride, 4));
  for (uint64_t row = 0; row < rows; ++row) {
    const auto* const first = from.before.data() + row * from_stride;
    std::copy(first, first + bytes, to.after.data() + row * to_stride);
  }
  run.blocks = {from, to};
  run.record = [=](Encoder& encoder, std::span<const Tensor> t) {
    copy_bytes(encoder, t[0].reshape({rows, from_stride}).slice(1, 0, bytes),
               t[1].reshape({rows, to_stride}).slice(1, 0, bytes));
  };
  return run;
}

uint64_t dim_of(KvFormat format, size_t i) {
  constexpr uint64_t kDims[] = {64, 80, 128, 24};
  return class_of(format) == FormatClass::mlx_native ? 256 : kDims[i % 4];
}

}  // namespace

// Every format in either role, every pair of classes, from every dtype: into a body that wraps,
// with and without sink tokens and a tail.
std::vector<OpCase> kv_cache_cases() {
  std::vector<OpCase> cases;
  size_t i = 0;
  for (const KvFormat format : kv_formats()) {
    for (const FormatClass other : kFormatClasses) {
      AppendCase c;
      c.source = kFloats[i % 3];
      c.k = i % 2 == 0 ? format : format_of(other, i);
      c.v = i % 2 == 0 ? format_of(other, i) : format;
      c.k_dim = dim_of(c.k, i);
      c.v_dim = dim_of(c.v, i / 2);
      const bool near =
          class_of(c.k) >= FormatClass::levels || class_of(c.v) >= FormatClass::levels;
      c.sink_tokens = near ? i % 4 : 0;
      c.tail = near && i % 3 != 0 ? 5 : 0;
      c.tokens = i % 5 == 4 ? 9 : 1 + i % 5;
      c.start = i % 7 == 6 ? 2 : 35 + i % 9;  // the sink tokens are new, or the body wraps
      cases.push_back(append_case(c, str_cat("sink tokens ", c.sink_tokens, " tail ", c.tail,
                                             " at ", c.start, " tokens ", c.tokens)));
      ++i;
    }
  }
  // A command recorded for three tokens takes three, however many the step has.
  for (const KvFormat format : {KvFormat::f32, KvFormat::tq8}) {
    AppendCase c{.k = format, .v = format, .tokens = 3, .unseen = 4};
    if (format == KvFormat::tq8) c.tail = 5, c.sink_tokens = 23;
    cases.push_back(append_case(c, "a longer step"));
  }
  for (const uint64_t tokens : {1u, 5u, 300u})
    cases.push_back(kernel_case("kv_extend", str_cat(tokens, " tokens"),
                                [tokens] { return make_extend(7, tokens); }));
  for (const uint64_t bytes : {0u, 1u, 15u, 16u, 4097u, 70001u})
    cases.push_back(
        kernel_case("bytes_copy", str_cat(bytes, " bytes"), [bytes] { return make_copy(bytes); }));
  for (const uint64_t bytes : {1u, 27u, 4096u, 1200000u})
    cases.push_back(kernel_case("bytes_copy", str_cat("3 rows of ", bytes, " bytes"),
                                [bytes] { return make_copy_rows(3, bytes); }));
  for (const auto& [words, apart] : {std::pair{1u, 0u}, {5u, 1u}, {976u, 3u}, {1100u, 0u}})
    cases.push_back(kernel_case("words_write", str_cat(words, " words, ", apart, " apart"),
                                [=] { return make_words(words, apart); }));
  return cases;
}

}  // namespace gyre::test
