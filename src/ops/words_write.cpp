#include "ops/words_write.h"

#include <algorithm>

#include "abi/words_write.h"
#include "ops/table.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {
namespace {

constexpr const char* kOp = "words_write";

void check_runs(std::span<const int32_t> words, std::span<const WordRun> runs, const Tensor& to) {
  require(to.defined() && to.is_contiguous() && to.bytes() % sizeof(uint32_t) == 0, kOp,
          ": the tensor must be contiguous words of 32 bits");
  require(to.bytes() / sizeof(uint32_t) == words.size(), kOp, ": the tensor has ",
          to.bytes() / sizeof(uint32_t), " words, got ", words.size());
  require(words.size() <= uint64_t{1} << 32, kOp, ": at most 2^32 words, got ", words.size());
  for (const WordRun& run : runs) {
    require(run.at <= words.size() && run.count <= words.size() - run.at, kOp, ": ", run.count,
            " words from ", run.at, " of ", words.size());
  }
}

}  // namespace

std::string words_write_shape(const void* params) {
  const auto& p = *static_cast<const abi::WordsWriteParams*>(params);
  return join("runs=", p.runs, " words=", p.words);
}

void words_write(Encoder& encoder, std::span<const int32_t> words, std::span<const WordRun> runs,
                 const Tensor& to) {
  Recording recording(encoder, kOp);
  check_runs(words, runs, to);
  abi::WordsWriteParams params{};
  const auto flush = [&] {
    if (params.words == 0) return;
    recording.dispatch(kWordsWrite, abi::WordsWriteSpec{}, params, {&to});
    params.runs = params.words = 0;
  };
  for (WordRun run : runs) {
    while (run.count != 0) {
      if (2 * params.runs + params.words + 3 > abi::kMaxWordsWrite) flush();
      const uint64_t room = abi::kMaxWordsWrite - 2 * (params.runs + 1) - params.words;
      const uint64_t count = std::min(room, run.count);
      uint32_t* const head = params.buffer + 2 * uint64_t{params.runs};
      head[0] = static_cast<uint32_t>(run.at);
      head[1] = params.words;
      for (uint64_t i = 0; i < count; ++i) {
        params.buffer[abi::kMaxWordsWrite - 1 - params.words++] =
            static_cast<uint32_t>(words[run.at + i]);
      }
      ++params.runs;
      run.at += count;
      run.count -= count;
    }
  }
  flush();
  recording.commit();
}

}  // namespace gyre
