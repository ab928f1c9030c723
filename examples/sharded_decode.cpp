// Sequence-sharded decode over MPI: a context larger than one device. Every rank holds a part of
// the keys in a compressed cache of its own, attends over it, and all ranks merge all states.
//
//   mpirun -np 4 sharded_decode [prompt tokens] [tokens to decode]
//
// Rank 0 also computes the unsharded result, with the same splits, from one cache that holds all
// keys; the exit status is 0 if every rank has it byte for byte. What goes through sockets
// (`--mca pml ob1 --mca btl tcp,self`: all of it, also on one machine) is measured and must be what
// is predicted.
#include <gyre/gyre.h>
#include <mpi.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <exception>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr uint64_t kHeads = 32, kKvHeads = 8, kDim = 128;
constexpr uint64_t kBlock = 64;           // consecutive tokens that one rank owns
constexpr uint64_t kLoadStep = 512;       // tokens of the prompt that are stored at once
constexpr float kScale = 0.08838834764f;  // 1 / sqrt(kDim)
// Relative squared error between results of different splits
// (tests/attention/attention_tolerance.h).
constexpr double kMaxError = 4e-6;

// Blocks of tokens go round the ranks, so that all have as many keys, give or take a block.
struct Shards {
  uint64_t ranks;

  uint64_t owner(uint64_t position) const { return position / kBlock % ranks; }
  uint64_t slot(uint64_t position) const {
    return position / (kBlock * ranks) * kBlock + position % kBlock;
  }
  // Keys of a rank when the sequence has `length`.
  uint64_t keys(uint64_t rank, uint64_t length) const {
    const uint64_t round = kBlock * ranks, rest = length % round, before = rank * kBlock;
    return length / round * kBlock + (rest > before ? std::min(rest - before, kBlock) : 0);
  }
};

struct Cache {
  gyre::KvBuffer k, v;

  Cache(const gyre::Device& device, uint64_t capacity)
      : k(gyre::KvBuffer::allocate(
            device, {gyre::KvFormat::tq8, gyre::KvRole::k, kKvHeads, capacity, kDim})),
        v(gyre::KvBuffer::allocate(
            device, {gyre::KvFormat::tq4, gyre::KvRole::v, kKvHeads, capacity, kDim})) {}
};

// New tokens: q [tokens, heads, dim], k and v [tokens, kv_heads, dim].
struct Step {
  gyre::Tensor q, k, v;

  Step(const gyre::Device& device, uint64_t tokens)
      : q(device.tensor(gyre::DType::f32, {tokens, kHeads, kDim})),
        k(device.tensor(gyre::DType::f32, {tokens, kKvHeads, kDim})),
        v(device.tensor(gyre::DType::f32, {tokens, kKvHeads, kDim})) {}

  // Stands in for a model that every rank runs: the same numbers everywhere.
  void fill(std::mt19937& random) const {
    std::normal_distribution<float> normal;
    for (const gyre::Tensor& tensor : {q, k, v})
      for (float& value : tensor.data<float>()) value = normal(random);
  }
  uint64_t tokens() const { return k.shape(0); }
  void store(gyre::Encoder& encoder, const Cache& cache, uint64_t token, uint64_t count,
             uint64_t slot) const {
    gyre::kv_quantize(encoder, {.k = k, .k_cache = cache.k, .v = v, .v_cache = cache.v},
                      {.position = slot, .source_begin = token, .tokens = count});
  }
};

// What a rank does: it keeps its tokens, and gives the state of its keys.
class Shard {
 public:
  Shard(const gyre::Device& device, Shards shards, uint64_t rank, uint64_t capacity)
      : shards_(shards), rank_(rank), cache_(device, capacity) {}

  void append(gyre::Encoder& encoder, const Step& step, uint64_t position) const {
    for (uint64_t token = 0; token < step.tokens();) {
      const uint64_t at = position + token;
      const uint64_t count = std::min(step.tokens() - token, kBlock - at % kBlock);
      if (shards_.owner(at) == rank_) step.store(encoder, cache_, token, count, shards_.slot(at));
      token += count;
    }
  }
  // The query is newer than every key here, whoever owns its own: nothing is masked.
  void attend(gyre::Encoder& encoder, const gyre::Tensor& q, const gyre::Tensor& state,
              uint64_t length) const {
    gyre::attention_partial(encoder,
                            {.q = q, .k_cache = cache_.k, .v_cache = cache_.v, .partial = state},
                            {.length = shards_.keys(rank_, length), .scale = kScale});
  }

 private:
  Shards shards_;
  uint64_t rank_;
  Cache cache_;
};

// All keys on one rank: once in ranges, one for each rank's share, so that the splits are the same,
// and once in their order, to see that no key is missing.
class Unsharded {
 public:
  Unsharded(const gyre::Device& device, Shards shards, uint64_t share)
      : shards_(shards),
        share_(share),
        ranges_(device, shards.ranks * share),
        ordered_(device, shards.ranks * share),
        states_(device.tensor(gyre::DType::f32, {shards.ranks, 1, kHeads, kDim + 2})),
        out_(device.tensor(gyre::DType::f32, {1, kHeads, kDim})),
        whole_(device.tensor(gyre::DType::f32, {1, kHeads, kDim})) {}

  void append(gyre::Encoder& encoder, const Step& step, uint64_t position) const {
    step.store(encoder, ordered_, 0, step.tokens(), position);
    for (uint64_t token = 0; token < step.tokens(); ++token) {
      const uint64_t at = position + token;
      step.store(encoder, ranges_, token, 1, shards_.owner(at) * share_ + shards_.slot(at));
    }
  }
  void attend(gyre::Encoder& encoder, const gyre::Tensor& q, uint64_t length) const {
    for (uint64_t rank = 0; rank < shards_.ranks; ++rank) {
      gyre::attention_partial(
          encoder,
          {.q = q,
           .k_cache = ranges_.k,
           .v_cache = ranges_.v,
           .partial = states_.slice(0, rank, 1)},
          {.length = shards_.keys(rank, length), .ring_start = rank * share_, .scale = kScale});
    }
    gyre::attention_merge(encoder, {.partial = states_, .out = out_});
    gyre::attention(encoder, {.q = q, .k_cache = ordered_.k, .v_cache = ordered_.v, .out = whole_},
                    {.length = length, .scale = kScale});
  }
  bool same_bytes(const gyre::Tensor& out) const {
    return std::memcmp(out.data<float>().data(), out_.data<float>().data(), out.bytes()) == 0;
  }
  double error(const gyre::Tensor& out) const {
    const auto given = out.data<float>(), expected = whole_.data<float>();
    double error = 0, energy = 0;
    for (size_t i = 0; i < given.size(); ++i) {
      error += (given[i] - expected[i]) * (given[i] - expected[i]);
      energy += expected[i] * expected[i];
    }
    return error / energy;
  }

 private:
  Shards shards_;
  uint64_t share_;
  Cache ranges_, ordered_;
  gyre::Tensor states_, out_, whole_;
};

// Bytes that this process has written by system calls: those of MPI's sockets while it is in MPI.
uint64_t written_bytes() {
  std::ifstream io("/proc/self/io");
  std::string key;
  for (uint64_t value = 0; io >> key >> value;)
    if (key == "wchar:") return value;
  return 0;
}

struct Counts {
  uint64_t prompt = 1000, steps = 200;
};

struct Outcome {
  uint64_t different = 0;      // steps in which some rank had other bytes
  double error = 0;            // the largest, against attention over the keys in their order
  uint64_t sent_bytes = 0;     // by all ranks through sockets, in all steps
  uint64_t longest_share = 0;  // keys, at the end
};

bool all_ranks_have(const gyre::Tensor& out, int rank) {
  std::vector<float> first(out.elements());
  if (rank == 0) std::ranges::copy(out.data<float>(), first.begin());
  MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
  int same = std::memcmp(first.data(), out.data<float>().data(), out.bytes()) == 0 ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &same, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  return same == 1;
}

Outcome decode(Shards shards, int rank, const Counts& counts) {
  const gyre::Device device = gyre::Device::open("cpu", {.threads = 1});
  gyre::Encoder encoder(device);
  const uint64_t tokens = counts.prompt + counts.steps;
  const uint64_t share = (tokens / (kBlock * shards.ranks) + 1) * kBlock;
  const Shard shard(device, shards, static_cast<uint64_t>(rank), share);
  const Unsharded unsharded(device, shards, rank == 0 ? share : kBlock);
  const gyre::Tensor state = device.tensor(gyre::DType::f32, {1, 1, kHeads, kDim + 2});
  const gyre::Tensor states = device.tensor(gyre::DType::f32, {shards.ranks, 1, kHeads, kDim + 2});
  const gyre::Tensor out = device.tensor(gyre::DType::f32, {1, kHeads, kDim});
  std::mt19937 random(1);
  const auto append = [&](const Step& step, uint64_t position) {
    step.fill(random);
    shard.append(encoder, step, position);
    if (rank == 0) unsharded.append(encoder, step, position);
    encoder.submit().wait();
  };
  for (uint64_t at = 0; at < counts.prompt; at += kLoadStep)
    append(Step(device, std::min(kLoadStep, counts.prompt - at)), at);

  Outcome outcome;
  const Step step(device, 1);
  const int floats = static_cast<int>(state.elements());
  for (uint64_t length = counts.prompt + 1; length <= tokens; ++length) {
    append(step, length - 1);
    shard.attend(encoder, step.q, state, length);
    encoder.submit().wait();
    const uint64_t before = written_bytes();
    MPI_Allgather(state.data<float>().data(), floats, MPI_FLOAT, states.data<float>().data(),
                  floats, MPI_FLOAT, MPI_COMM_WORLD);
    outcome.sent_bytes += written_bytes() - before;
    gyre::attention_merge(encoder, {.partial = states, .out = out});
    if (rank == 0) unsharded.attend(encoder, step.q, length);
    encoder.submit().wait();
    bool same = all_ranks_have(out, rank);
    if (rank == 0) {
      same = same && unsharded.same_bytes(out);
      outcome.error = std::max(outcome.error, unsharded.error(out));
    }
    outcome.different += same ? 0 : 1;
  }
  MPI_Allreduce(MPI_IN_PLACE, &outcome.sent_bytes, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
  outcome.longest_share = shards.keys(0, tokens);
  return outcome;
}

uint64_t number(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value > 1'000'000)
    throw std::invalid_argument("not a number of tokens up to 1000000: " + std::string(text));
  return value;
}

int run(std::span<char*> arguments) {
  Counts counts;
  if (arguments.size() > 1) counts.prompt = number(arguments[1]);
  if (arguments.size() > 2) counts.steps = std::max<uint64_t>(number(arguments[2]), 1);
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const Shards shards{static_cast<uint64_t>(ranks)};
  const Outcome outcome = decode(shards, rank, counts);
  if (rank != 0) return 0;

  // Every rank's state reaches every other rank once; MPI adds a header to each message.
  const auto predicted =
      static_cast<double>(shards.ranks * (shards.ranks - 1) * kHeads * (kDim + 2) * sizeof(float));
  const double sent = static_cast<double>(outcome.sent_bytes) / static_cast<double>(counts.steps);
  std::cout << std::setprecision(10) << ranks << " ranks, " << counts.prompt + counts.steps
            << " tokens, at most " << outcome.longest_share << " on a rank\n"
            << "bytes per token and layer: predicted " << predicted << ", sent through sockets "
            << sent << '\n'
            << outcome.different << " of " << counts.steps
            << " steps differ from the unsharded result; error against other splits "
            << outcome.error << '\n';
  const bool as_predicted = sent == 0 || (sent >= predicted && sent < 1.02 * predicted);
  return outcome.different == 0 && outcome.error < kMaxError && as_predicted ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  try {
    const int status = run({argv, static_cast<size_t>(argc)});
    MPI_Finalize();
    return status;
  } catch (const std::exception& error) {
    std::cerr << "sharded_decode: " << error.what() << '\n';
    MPI_Abort(MPI_COMM_WORLD, 2);  // the other ranks wait for this one
  }
  return 2;
}
