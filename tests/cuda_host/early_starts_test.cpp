// Kernels that start before the command ahead of them has ended, on the emulated GPU: what they
// read until then is what that command does not write.
#include <functional>

#include "cuda/foreign_stream.h"
#include "cuda_host/emulated_device.h"
#include "kv_codec/kv_codec_fixture.h"
#include "ops/cache_ops.h"
#include "ops/paged_attention.h"
#include "pages/paged_fixture.h"

namespace gyre::test {
namespace {

// In a graph the driver begins attention, or a write, before the command ahead: what that one
// writes must be waited for, and nothing else need be. Both run as a graph of Gyre's, and list by
// list as one that a caller captures; check() follows each run, prepare() comes before.
void run_both_ways(const Device& device, const std::function<void(Encoder&)>& ahead,
                   const std::function<void(Encoder&)>& record,
                   const std::function<void()>& prepare, const std::function<void()>& check) {
  Encoder encoder(device);
  ahead(encoder);
  record(encoder);
  const Graph graph = encoder.instantiate();
  for (int replay = 0; replay < 2; ++replay) {
    prepare();
    graph.replay().wait();
    check();
  }
  SCOPED_TRACE("captured");
  const ForeignStream stream;
  stream.begin_capture();
  ahead(encoder);
  const Fence first = encoder.submit_on(stream.handle());
  record(encoder);
  const Fence second = encoder.submit_on(stream.handle());
  const CapturedGraph captured(stream);
  prepare();
  captured.run();
  check();
}

TEST(EarlyStarts, AttentionWaitsForWhatIsWrittenAhead) {
  for (const KvFormat format : {KvFormat::tq4, KvFormat::f16}) {
    const PagedWorld world(emulated_device(4), {format, format, 1, 128, 0, 16}, 4, {700, 64});
    const std::vector<Part> parts = {{0, 700, 1}, {1, 64, 1}};
    const RowBits wanted = world.attend(parts);
    PagedAttentionOptions bounds;
    const PagedAttentionInputs in = world.inputs(parts, bounds);
    for (const Tensor* const late : {&in.q, &in.page_table, &in.kv_lengths, &in.pages.bytes}) {
      const Tensor kept = world.device().tensor(late->dtype(), late->shape());
      const Tensor zeros = world.device().tensor(late->dtype(), late->shape());
      const auto copy = [&](const Tensor& from, const Tensor& to) {
        copy_bytes(RunNow(world.device()), from, to);
      };
      copy(*late, kept);
      run_both_ways(
          world.device(), [&](Encoder& encoder) { copy_bytes(encoder, kept, *late); },
          [&](Encoder& encoder) { attention(encoder, in, bounds); }, [&] { copy(zeros, *late); },
          [&] { EXPECT_EQ(compare(wanted, world.bits_of(parts, in.out, in.lse)), wanted.size()); });
    }
  }
}

// What a call reads, one tensor at a time: as if the command ahead made it.
template <class Run, class Result>
void expect_waits(const Device& device, const std::vector<const Tensor*>& reads, const Run& record,
                  const Tensor& out, const Result& wanted) {
  for (const Tensor* const late : reads) {
    const Tensor kept = device.tensor(late->dtype(), late->shape());
    const Tensor zeros = device.tensor(late->dtype(), late->shape());
    copy_bytes(RunNow(device), *late, kept);
    run_both_ways(
        device, [&](Encoder& encoder) { copy_bytes(encoder, kept, *late); }, record,
        [&] {
          write_bytes(out, Bytes(wanted.size()));
          copy_bytes(RunNow(device), zeros, *late);
        },
        [&] { EXPECT_EQ(read_bytes(out), wanted) << late - reads.front(); });
  }
}

TEST(EarlyStarts, WritesWaitForWhatIsWrittenAhead) {
  const Device device = emulated_device(4);
  for (const uint64_t tokens : {7u, 70u}) {  // by rows, and by tiles
    const KvPageShape shape{KvFormat::tq8, KvFormat::tq4, 3, 128, 0, 24};
    std::vector<int64_t> list(tokens);
    for (uint64_t i = 0; i < tokens; ++i) list[i] = static_cast<int64_t>((i * 37) % 119);
    KvWriteInputs in{.k = tensor_of(device, gaussian_rows(tokens * 3, 128, 1), {tokens, 3, 128}),
                     .v = tensor_of(device, gaussian_rows(tokens * 3, 128, 2), {tokens, 3, 128}),
                     .pages = KvPages::allocate(device, shape, 5),
                     .slots = tensor_of(device, list, {tokens})};
    const auto record = [&](Encoder& encoder) { kv_write(encoder, in); };
    record(RunNow(device));
    expect_waits(device, {&in.k, &in.v, &in.slots}, record, in.pages.bytes,
                 read_bytes(in.pages.bytes));
  }
}

TEST(EarlyStarts, TransformsWaitForWhatIsWrittenAhead) {
  const Device device = emulated_device(4);
  for (const uint64_t dim : {128u, 256u}) {  // a matrix of two stages, of more
    const KvTransformInputs in{
        .x = tensor_of(device, gaussian_rows(8, dim, 1), {2, 4, dim}),
        .matrix = tensor_of(device, gaussian_rows(2 * dim, dim, 2), {2, dim, dim}),
        .before = tensor_of(device, gaussian_rows(2, dim, 3), {2, dim}),
        .after = tensor_of(device, gaussian_rows(2, dim, 4), {2, dim}),
        .out = device.tensor(DType::f32, {2, 4, dim})};
    const auto record = [&](Encoder& encoder) { kv_transform(encoder, in); };
    record(RunNow(device));
    expect_waits(device, {&in.x, &in.matrix, &in.before, &in.after}, record, in.out,
                 read_bytes(in.out));
  }
}

}  // namespace
}  // namespace gyre::test
