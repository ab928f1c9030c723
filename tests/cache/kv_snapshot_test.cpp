// save() and load(): a loaded cache cannot be told from the one that was saved.
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "cache/snapshot_fixture.h"
#include "gyre/snapshot.h"

namespace gyre::test {
namespace {

class KvSnapshot : public testing::Test {
 public:
  // Saved, loaded into another cache that held something else, and continued.
  void expect_same(Session& from, const KvCacheOptions& options, const std::string& what) {
    SCOPED_TRACE(what);
    from.cache.save(folder / "a");
    Session to(device, options, 5);
    to.append(3);
    to.cache.load(folder / "a");
    EXPECT_EQ(to.cache.length(), from.cache.length());
    EXPECT_EQ(to.answers(), from.answers());
    if (options.capacity == from.cache.options().capacity) {
      to.cache.save(folder / "b");
      EXPECT_EQ(bytes_of_file(folder / "a"), bytes_of_file(folder / "b"));
    }
    to.follow(from);
    for (const uint64_t tokens : {1, 4, 1}) {
      from.append(tokens);
      to.append(tokens);
      EXPECT_EQ(to.answers(), from.answers()) << "after " << tokens << " more";
    }
    from.rollback(2);
    to.rollback(2);
    EXPECT_EQ(to.answers(), from.answers());
    from.append(2);
    to.append(2);
    EXPECT_EQ(to.answers(), from.answers());
    EXPECT_EQ(folder.files(), options.capacity == from.cache.options().capacity ? 2u : 1u);
  }

  Device device = Device::open("cpu", {.threads = 1});
  Folder folder;
};

KvCacheOptions options_for(const KvLayer& layer) {
  const bool wide = layer.k == KvFormat::mlx_native5 || layer.k == KvFormat::mlx_native6 ||
                    layer.k == KvFormat::mlx_native8;
  const uint64_t dim = wide ? 256 : 16;
  return {.kv_heads = 2,
          .head_dim = dim,
          .v_head_dim = dim,
          .capacity = 60,
          .layers = {layer},
          .step_tokens = 5};
}

std::string text_of(const KvLayer& layer, uint64_t tokens) {
  return std::string(name(layer.k)) + " window " + std::to_string(layer.window) + " tail " +
         std::to_string(layer.tail) + " at " + std::to_string(tokens);
}

void fill(Session& session, uint64_t tokens) {
  while (session.cache.length() + 5 <= tokens) session.append(5);
  while (session.cache.length() < tokens) session.append(1);
}

// A graph recorded before a load attends over what was loaded.
TEST_F(KvSnapshot, GraphsGoOn) {
  const KvCacheOptions options = options_for({.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 3});
  Session from(device, options, 1), to(device, options, 5);
  fill(from, 23);
  fill(to, 7);
  const Tensor q = device.tensor(DType::f32, {1, 2, 16}),
               out = device.tensor(DType::f32, {1, 2, 16}),
               wanted = device.tensor(DType::f32, {1, 2, 16});
  for (float& value : q.data<float>()) value = 0.3f;
  Encoder encoder(device);
  to.cache.attend(encoder, 0, {.q = q, .out = out});
  const Graph graph = encoder.instantiate();
  from.cache.save(folder / "a");
  to.cache.load(folder / "a");
  graph.replay().wait();
  from.cache.attend(encoder, 0, {.q = q, .out = wanted});
  encoder.submit().wait();
  EXPECT_EQ(floats_of(out), floats_of(wanted));
}

// Until the next begin_step() there is no step: a replay is refused.
TEST_F(KvSnapshot, AReplayAfterALoadDoesNoHarm) {
  for (const uint64_t tokens : {7, 20}) {
    const KvCacheOptions options =
        options_for({.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 3, .sink_tokens = 1});
    Session from(device, options, 1), to(device, options, 5);
    fill(from, 40);
    fill(to, tokens);
    Encoder encoder(device);
    to.cache.begin_step(encoder, 1);
    encoder.submit().wait();
    const Tensor rows = device.tensor(DType::f32, {1, 2, 16});
    for (float& value : rows.data<float>()) value = 100;
    to.cache.append(encoder, 0, rows, rows);
    const Graph graph = encoder.instantiate();
    graph.replay().wait();
    from.cache.save(folder / "a");
    to.cache.load(folder / "a");
    EXPECT_REFUSED(("graph.replay", "begin_step() comes first"), graph.replay());
    EXPECT_EQ(to.answers(), from.answers());
    to.cache.save(folder / "b");
    EXPECT_EQ(bytes_of_file(folder / "a"), bytes_of_file(folder / "b"));
  }
}

TEST_F(KvSnapshot, EveryFormatLinearAndRingWithSinksAndTail) {
  for (const KvFormat format : kv_formats()) {
    const bool compressed = describe(format).compressed;
    std::vector<KvLayer> layers = {{.k = format, .v = format},
                                   {.k = format, .v = format, .window = 11}};
    if (compressed) {
      layers.push_back({.k = format, .v = format, .tail = 6, .sink_tokens = 3});
      layers.push_back({.k = format, .v = format, .window = 9, .tail = 4});
    }
    for (const KvLayer& layer : layers) {
      for (const uint64_t tokens : {2, 14, 15, 43}) {
        Session from(device, options_for(layer));
        fill(from, tokens);
        expect_same(from, from.cache.options(), text_of(layer, tokens));
      }
    }
  }
}

TEST_F(KvSnapshot, LayersThatDiffer) {
  KvCacheOptions options = options_for({});
  options.head_dim = 32;
  options.layers = kv_layers(
      5, {.layer = {.tail = 6, .sink_tokens = 2}, .edge_layers = 1, .window = 10, .full_every = 2});
  Session from(device, options);
  fill(from, 37);
  expect_same(from, options, "filled");
  from.rollback(4);
  expect_same(from, options, "truncated");
}

// Version 4, with layers that have no sections.
TEST_F(KvSnapshot, LayersOfOtherShapesAndSharedOnes) {
  KvCacheOptions options = options_for({.tail = 6, .sink_tokens = 2});
  options.layers.push_back(
      {.k = KvFormat::f16, .v = KvFormat::f16, .window = 10, .kv_heads = 3, .head_dim = 72});
  options.layers.push_back({.kv_shared_layer_index = 0});
  options.layers.push_back({.kv_shared_layer_index = 1});
  options.layers.push_back({.k = KvFormat::bf16, .v = KvFormat::tq3, .v_head_dim = 1024});
  Session from(device, options);
  fill(from, 37);
  expect_same(from, options, "filled");
  from.rollback(4);
  expect_same(from, options, "truncated");
  const KvSnapshotInfo info = inspect_snapshot(folder / "a");
  EXPECT_EQ(info.version, 4u);
  EXPECT_EQ(info.options.layers, from.cache.layers());
  EXPECT_EQ(info.options.kv_heads, 0u);
  EXPECT_EQ(info.options.v_head_dim, 0u);
  for (const KvSnapshotSection& section : info.sections)
    EXPECT_TRUE(section.layer < 2 || section.layer == 4);
  const auto refuses = [&](const std::vector<std::string>& parts, const auto& change) {
    KvCacheOptions other = options;
    change(other.layers);
    Session to(device, other);
    EXPECT_TRUE(refused(parts, [&] { to.cache.load(folder / "a"); }));
  };
  using L = std::vector<KvLayer>;
  refuses({"head_dim of layer 1 is 72", "and 80"}, [](L& l) { l[1].head_dim = 80; });
  refuses({"kv_heads of layer 4 is 2", "and 1"}, [](L& l) { l[4].kv_heads = 1; });
  refuses({"v_head_dim of layer 4 is 1024", "and 16"}, [](L& l) { l[4].v_head_dim = 16; });
  refuses({"the layer with the cache of layer 2 is 0", "and 2"}, [](L& l) { l[2] = l[0]; });
}

TEST_F(KvSnapshot, AnEmptyCacheAndAClearedOne) {
  const KvCacheOptions options = options_for({.tail = 4, .sink_tokens = 2});
  Session from(device, options);
  expect_same(from, options, "empty");
  from.cache.clear(from.encoder);
  from.encoder.submit().wait();
  expect_same(from, options, "cleared");
}

TEST_F(KvSnapshot, OnlyWhatIsInUseIsStored) {
  KvCacheOptions options = options_for({.k = KvFormat::tq4, .v = KvFormat::f16});
  options.capacity = 100'000;
  Session from(device, options);
  from.append(5);
  from.cache.save(folder / "a");
  const KvSnapshotInfo info = inspect_snapshot(folder / "a");
  ASSERT_EQ(info.sections.size(), 3u);
  EXPECT_EQ(info.sections[0].slots, 8u);  // a tile
  EXPECT_EQ(info.sections[0].bytes, 2u * 8 * 16 / 2);
  EXPECT_EQ(info.sections[1].bytes, 2u * 8 * 2);
  EXPECT_EQ(info.sections[2].bytes, 2u * 8 * 16 * 2);
  EXPECT_EQ(info.file_bytes, std::filesystem::file_size(folder / "a"));
  EXPECT_LT(info.file_bytes, 2000u);
}

TEST_F(KvSnapshot, SectionsLargerThanAPiece) {
  KvCacheOptions options = options_for({.k = KvFormat::f32, .v = KvFormat::tq8});
  options.head_dim = options.v_head_dim = 512;
  options.capacity = 2000;
  options.step_tokens = 700;
  Session from(device, options);
  for (int i = 0; i < 2; ++i) from.append(700);
  expect_same(from, options, "1400 tokens of 2 KiB");
}

TEST_F(KvSnapshot, ALargerCacheTakesASmallerOne) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::tq3, KvFormat::mlx_native4}) {
    const KvLayer layer{.k = format, .v = format, .tail = format == KvFormat::f16 ? 0u : 5u};
    KvCacheOptions options = options_for(layer);
    options.capacity = 43;
    Session from(device, options);
    fill(from, 30);
    options.capacity = 70;
    expect_same(from, options, std::string(name(format)));
  }
}

TEST_F(KvSnapshot, InspectSaysWhatItHolds) {
  KvCacheOptions options = options_for({.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 6});
  options.layers[0].sink_tokens = 3;
  Session from(device, options);
  fill(from, 43);
  from.cache.save(folder / "a");
  const KvSnapshotInfo info = inspect_snapshot(folder / "a");
  EXPECT_EQ(info.version, 3u);
  EXPECT_EQ(info.options.kv_heads, 2u);
  EXPECT_EQ(info.options.capacity, 60u);
  EXPECT_EQ(info.options.layers[0].sink_tokens, 3u);
  EXPECT_EQ(info.length, 43u);
  EXPECT_EQ(info.tail_begin, 32u);
  EXPECT_EQ(info.peak, 43u);
  ASSERT_EQ(info.sections.size(), 8u);
  std::string text;
  for (const KvSnapshotSection& section : info.sections) text += section_text(section) + "; ";
  EXPECT_EQ(text,
            "layer 0 body K codes; layer 0 body K scales; layer 0 body V codes; "
            "layer 0 body V scales; layer 0 sink_tokens K codes; layer 0 sink_tokens V codes; "
            "layer 0 tail K codes; layer 0 tail V codes; ");
  EXPECT_EQ(info.sections[0].slots, 40u);
  EXPECT_EQ(info.sections[4].slots, 3u);
  EXPECT_EQ(info.sections[6].slots, 11u);  // a ring that has wrapped
}

TEST_F(KvSnapshot, RefusesAnotherGeometryAndSaysWhich) {
  KvCacheOptions options = options_for({.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 6});
  options.layers.push_back({.k = KvFormat::f16, .v = KvFormat::f16, .window = 10});
  Session from(device, options);
  fill(from, 20);
  from.cache.save(folder / "a");
  const auto refuses = [&](const std::vector<std::string>& parts, const auto& change) {
    KvCacheOptions other = options;
    change(other);
    Session to(device, other, 3);
    to.append(2);
    const std::vector<uint32_t> before = to.answers();
    EXPECT_TRUE(refused(parts, [&] { to.cache.load(folder / "a"); }));
    EXPECT_EQ(to.cache.length(), 2u);
    EXPECT_EQ(to.answers(), before);
  };
  using O = KvCacheOptions;
  refuses({"kv_cache.load", "kv_heads of layer 0 is 2", "and 1"}, [](O& o) { o.kv_heads = 1; });
  refuses({" head_dim of layer 0 is 16", "and 24"}, [](O& o) { o.head_dim = 24; });
  refuses({"v_head_dim of layer 0 is 16", "and 32"}, [](O& o) { o.v_head_dim = 32; });
  refuses({"capacity of 60", "only 59"}, [](O& o) { o.capacity = 59; });
  refuses({"number of layers is 2", "and 1"}, [](O& o) { o.layers.pop_back(); });
  refuses({"K of layer 0 is tq8", "and tq6"}, [](O& o) { o.layers[0].k = KvFormat::tq6; });
  refuses({"V of layer 1 is f16", "and bf16"}, [](O& o) { o.layers[1].v = KvFormat::bf16; });
  refuses({"window of layer 1 is 10", "and 9"}, [](O& o) { o.layers[1].window = 9; });
  refuses({"tail of layer 0 is 6", "and 7"}, [](O& o) { o.layers[0].tail = 7; });
  refuses({"sink_tokens of layer 0 is 0", "and 2"}, [](O& o) { o.layers[0].sink_tokens = 2; });
  refuses({"tail's slots of layer 0 is 11", "and 12"}, [](O& o) { o.step_tokens = 6; });
  options.layers[0] = {.window = 10};
  Session ring(device, options);
  ring.cache.save(folder / "a");
  refuses({"ring's slots of layer 0 is 14", "and 15"}, [](O& o) { o.step_tokens = 6; });
}

TEST_F(KvSnapshot, FilesThatCannotBeRead) {
  Session session(device, options_for({}));
  const auto cannot = [&](const std::string& path, const std::vector<std::string>& parts) {
    EXPECT_TRUE(throws_error(ErrorCode::io, parts, [&] { session.cache.load(path); }));
    EXPECT_ERROR(io, ("inspect_snapshot", path), inspect_snapshot(path));
  };
  cannot(folder / "none", {"kv_cache.load", "none", "No such file"});
  cannot(folder / ".", {"not a regular file"});
  cannot("/dev/null", {"not a regular file"});
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  cannot(pipe, {"not a regular file"});
  put_file(folder / "empty", {});
  cannot(folder / "empty", {"has 0 bytes"});
  if (geteuid() == 0) return;  // root reads everything
  session.cache.save(folder / "locked");
  std::filesystem::permissions(folder / "locked", std::filesystem::perms::none);
  cannot(folder / "locked", {"Permission denied"});
}

// Only regular files are replaced; a link stays and leads to the new file.
TEST_F(KvSnapshot, WhatASaveReplaces) {
  Session session(device, options_for({}));
  session.append(5);
  const auto cannot = [&](const std::string& path, const std::vector<std::string>& parts) {
    const size_t before = folder.files();
    EXPECT_TRUE(throws_error(ErrorCode::io, parts, [&] { session.cache.save(path); }));
    EXPECT_EQ(folder.files(), before);
  };
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  cannot(pipe, {"kv_cache.save", "pipe", "not a regular file"});
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  std::filesystem::create_symlink("pipe", folder / "to_pipe");
  cannot(folder / "to_pipe", {"to_pipe", "not a regular file"});
  EXPECT_TRUE(std::filesystem::is_fifo(folder / "to_pipe"));
  std::filesystem::create_symlink("none", folder / "to_none");
  cannot(folder / "to_none", {"to_none", "leads nowhere"});
  std::filesystem::create_directory(folder / "inner");
  cannot(folder / "inner", {"inner", "not a regular file"});

  session.cache.save(folder / "inner/a");
  session.append(5);
  std::filesystem::create_symlink("inner/a", folder / "link");
  session.cache.save(folder / "link");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_FALSE(std::filesystem::is_symlink(folder / "inner/a"));
  EXPECT_EQ(inspect_snapshot(folder / "inner/a").length, 10u);

  const std::string cut = (folder / "cut") + std::string("\0.gyrekv", 8);
  EXPECT_REFUSED(("kv_cache.save", "NUL"), session.cache.save(cut));
  session.cache.save(folder / "cut");
  EXPECT_REFUSED(("kv_cache.load", "NUL"), session.cache.load(cut));
}

// Whatever goes wrong while saving, the old file stays and nothing is left beside it.
TEST_F(KvSnapshot, ASaveThatFailsLeavesTheOldFile) {
  Session session(device, options_for({}));
  session.append(5);
  session.cache.save(folder / "a");
  const Bytes before = bytes_of_file(folder / "a");
  fill(session, 40);
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  for (const rlim_t limit : {0, 100, 1000}) {
    const rlimit small{limit, old.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    EXPECT_ERROR(io, ("kv_cache.save", "cannot write", "File too large"),
                 session.cache.save(folder / "a"));
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  }
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(bytes_of_file(folder / "a"), before);
  EXPECT_EQ(folder.files(), 1u);
  std::filesystem::create_directory(folder / "taken");
  EXPECT_ERROR(io, ("kv_cache.save", "not a regular file"), session.cache.save(folder / "taken"));
  EXPECT_ERROR(io, ("cannot open its folder", "No such file"),
               session.cache.save(folder / "none/a"));
  EXPECT_EQ(folder.files(), 2u);
  session.cache.save(folder / "a");
  EXPECT_EQ(inspect_snapshot(folder / "a").length, 40u);
}

TEST(KvSnapshotNames, OfNumbersThatAreNone) {
  EXPECT_EQ(name(KvSegmentKind::tail), "tail");
  for (const int number : {3, 4, 100, 255}) {
    EXPECT_EQ(name(static_cast<KvSegmentKind>(number)), "invalid") << number;
  }
}

}  // namespace
}  // namespace gyre::test
