// Files of caches and pools when the system fails: the n-th call, for every n; modes, names, and
// what killed processes leave.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <locale>

#include "cache/snapshot_fixture.h"
#include "expect_error.h"
#include "files/container.h"
#include "in_threads.h"
#include "serving/serving_fixture.h"
#include "stress/failing_files.h"

namespace gyre::test {
namespace {

constexpr uint64_t kNever = ~uint64_t{0};

mode_t mode_of(const std::string& path) {
  struct stat facts {};
  EXPECT_EQ(stat(path.c_str(), &facts), 0) << path;
  return facts.st_mode & 07777;
}

KvCacheOptions some_options() {
  return {.kv_heads = 1,
          .head_dim = 16,
          .capacity = 64,
          .layers = {{.tail = 8, .sink_tokens = 2}},
          .step_tokens = 16};
}

class Files : public testing::Test {
 protected:
  const Device device = Device::open("cpu", {.threads = 1});
  Folder folder;
};

TEST_F(Files, ANewFileIsItsOwnersAlone) {
  const mode_t before = umask(0);
  Session session(device, some_options());
  session.append(3);
  session.cache.save(folder / "a");
  umask(before);
  EXPECT_EQ(mode_of(folder / "a"), 0600u);
}

TEST_F(Files, AFileKeepsItsMode) {
  Session session(device, some_options());
  for (const mode_t mode : {0600u, 0640u, 0644u, 0400u, 0666u}) {
    session.cache.save(folder / "a");
    ASSERT_EQ(chmod((folder / "a").c_str(), mode), 0);
    session.append(1);
    session.cache.save(folder / "a");
    EXPECT_EQ(mode_of(folder / "a"), mode);
    EXPECT_EQ(inspect_snapshot(folder / "a").length, session.cache.length());
  }
}

// Another user's file does not decide who may read ours; nor does a link that takes its place.
TEST_F(Files, AFileOfAnotherUserGivesNoMode) {
  if (geteuid() != 0) GTEST_SKIP() << "only root gives files away";
  Session session(device, some_options());
  session.append(3);
  put_file(folder / "a", Bytes(10));
  ASSERT_EQ(chmod((folder / "a").c_str(), 0666), 0);
  ASSERT_EQ(chown((folder / "a").c_str(), 1001, 1001), 0);
  session.cache.save(folder / "a");
  EXPECT_EQ(mode_of(folder / "a"), 0600u);
}
TEST_F(Files, ALinkGivesNoMode) {
  put_file(folder / "victim", Bytes(10));
  ASSERT_EQ(chmod((folder / "victim").c_str(), 0666), 0);
  {
    NewFile file("test", folder / "a");
    ASSERT_EQ(symlink("victim", (folder / "a").c_str()), 0);
    file.commit();
  }
  EXPECT_FALSE(std::filesystem::is_symlink(folder / "a"));
  EXPECT_EQ(mode_of(folder / "a"), 0600u);
}

// While it is written, too: nobody else may open it before it has its mode, which it gets when all
// is written.
TEST_F(Files, ATemporaryFileIsNeverOpenToOthers) {
  for (const bool over_another : {false, true}) {
    if (over_another) {
      put_file(folder / "a", Bytes(10));
      ASSERT_EQ(chmod((folder / "a").c_str(), 0666), 0);
    }
    const mode_t before = umask(0);
    NewFile file("test", folder / "a");
    umask(before);
    file.write_at(0, Bytes(10));
    uint64_t seen = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder / "")) {
      if (entry.path() == folder / "a") continue;
      ++seen;
      EXPECT_EQ(mode_of(entry.path()), 0600u);
    }
    EXPECT_EQ(seen, 1u);
    file.commit();
    EXPECT_EQ(mode_of(folder / "a"), over_another ? 0666u : 0600u);
  }
}

TEST_F(Files, NamesMayBeAsLongAsTheSystemAllows) {
  Session session(device, some_options());
  session.append(3);
  const std::string name(255, 'n');
  session.cache.save(folder / name);
  session.append(1);
  session.cache.save(folder / name);
  EXPECT_EQ(inspect_snapshot(folder / name).length, 4u);
  EXPECT_ERROR(io, ("File name too long"), session.cache.save(folder / (name + "n")));
  EXPECT_EQ(folder.files(), 1u);
}

// A folder that cannot be synced is found before the file is replaced.
TEST_F(Files, AFolderThatCannotBeOpened) {
  if (geteuid() == 0) GTEST_SKIP() << "root opens everything";
  Session session(device, some_options());
  session.append(3);
  std::filesystem::create_directory(folder / "inner");
  session.cache.save(folder / "inner/a");
  session.append(1);
  ASSERT_EQ(chmod((folder / "inner").c_str(), 0300), 0);
  EXPECT_ERROR(io, ("cannot open its folder", "Permission denied"),
               session.cache.save(folder / "inner/a"));
  ASSERT_EQ(chmod((folder / "inner").c_str(), 0700), 0);
  EXPECT_EQ(inspect_snapshot(folder / "inner/a").length, 3u);
}

// Every call of a save fails once, with errors that mean different things.
void every_call_of_a_save_may_fail(Session& session, const Folder& folder, const char* name) {
  uint64_t count = 0, old_file = 0, new_file = 0;
  {
    const FailingFiles files(kNever, EIO);
    session.cache.save(folder / name);
    count = files.calls();
    EXPECT_EQ(files.open_files(), 0u);
  }
  for (uint64_t at = 0; at < count; ++at) {
    for (const int error : {EIO, ENOSPC, EMFILE, EACCES}) {
      const uint64_t before = inspect_snapshot(folder / "a").length;
      session.append(1);
      bool thrown = false, renamed = false;
      {
        const FailingFiles files(at, error);
        try {
          session.cache.save(folder / name);
        } catch (const Error& e) {
          thrown = true;
          ASSERT_EQ(e.code(), ErrorCode::io) << e.what();
        }
        renamed = files.renamed();
        EXPECT_EQ(files.open_files(), 0u) << at;
      }
      ASSERT_EQ(thrown, !renamed) << "call " << at << ", " << std::strerror(error);
      ASSERT_NO_THROW(verify_snapshot(folder / "a"));
      ASSERT_EQ(inspect_snapshot(folder / "a").length, thrown ? before : session.cache.length());
      ++(thrown ? old_file : new_file);
      if (session.cache.length() > 50) session.rollback(20);
    }
  }
  EXPECT_GT(old_file, 20u);
  EXPECT_GT(new_file, 0u);
}
TEST_F(Files, EveryCallOfASaveMayFail) {
  Session session(device, some_options());
  session.append(10);
  session.cache.save(folder / "a");
  session.append(1);
  every_call_of_a_save_may_fail(session, folder, "a");
  ASSERT_EQ(symlink("a", (folder / "link").c_str()), 0);
  every_call_of_a_save_may_fail(session, folder, "link");
  session.cache.save(folder / "a");
  EXPECT_EQ(folder.files(), 2u) << "temporary files are left";
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
}

TEST_F(Files, EveryCallOfALoadMayFail) {
  Session from(device, some_options()), to(device, some_options(), 2);
  from.append(10);
  from.cache.save(folder / "a");
  to.append(4);
  to.cache.save(folder / "before");
  uint64_t count = 0, refused = 0;
  {
    const FailingFiles files(kNever, EIO);
    to.cache.load(folder / "a");
    count = files.calls();
  }
  to.cache.load(folder / "before");
  const auto before = to.answers();
  for (uint64_t at = 0; at < count; ++at) {
    try {
      const FailingFiles files(at, EIO);
      to.cache.load(folder / "a");
      // The last close fails: everything was read.
      EXPECT_EQ(to.cache.length(), 10u);
      to.cache.load(folder / "before");
    } catch (const Error& error) {
      ++refused;
      ASSERT_EQ(error.code(), ErrorCode::io);
      ASSERT_EQ(to.cache.length(), 4u);
      ASSERT_EQ(to.answers(), before);
    }
  }
  EXPECT_GE(refused, count - 3);
}

TEST_F(Files, SignalsAreSurvived) {
  Session session(device, some_options());
  session.append(10);
  {
    const FailingFiles files(0, EINTR);
    session.cache.save(folder / "a");
    session.cache.load(folder / "a");
  }
  EXPECT_NO_THROW(verify_snapshot(folder / "a"));
}

TEST_F(Files, EveryCallOfAPoolsSaveMayFail) {
  Server server(device, small_pool());
  Talk talk = server.talk();
  server.fill(talk, some_tokens(20, 1));
  server.pool.publish(talk.sequence, talk.tokens);
  server.pool.save(talk.sequence, folder / "a");
  server.pool.save_prefixes(folder / "p");
  const Bytes a = bytes_of_file(folder / "a"), p = bytes_of_file(folder / "p");
  uint64_t at = 0;
  for (bool reached = true; reached; ++at) {
    for (const bool prefixes : {false, true}) {
      const FailingFiles files(at, EIO);
      bool thrown = false;
      try {
        prefixes ? server.pool.save_prefixes(folder / "p")
                 : server.pool.save(talk.sequence, folder / "a");
      } catch (const Error& error) {
        thrown = true;
        ASSERT_EQ(error.code(), ErrorCode::io);
      }
      ASSERT_EQ(thrown, !files.renamed()) << at;
      reached = files.calls() > at;
    }
    ASSERT_EQ(bytes_of_file(folder / "a"), a);
    ASSERT_EQ(bytes_of_file(folder / "p"), p);
  }
  EXPECT_GT(at, 30u);
}

// A process that is killed while it saves leaves a file; the next save to that path removes it.
TEST_F(Files, WhatAKilledProcessLeavesIsRemoved) {
  Session session(device, some_options());
  session.append(3);
  session.cache.save(folder / "a");
  for (int i = 0; i < 3; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      NewFile one("test", folder / "a"), other("test", folder / "a"), third("test", folder / "b");
      kill(getpid(), SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    EXPECT_EQ(folder.files(), i == 0 ? 4u : 5u);  // a and b's stay apart
    session.cache.save(folder / "a");
    EXPECT_EQ(folder.files(), i == 0 ? 2u : 2u + 1u) << i;
    session.cache.save(folder / "b");
    EXPECT_EQ(folder.files(), 2u);
    EXPECT_EQ(inspect_snapshot(folder / "a").length, 3u);
  }
}

// A temporary file has the same name in every locale: who comes next finds what was left.
TEST_F(Files, TemporaryNamesDoNotDependOnTheLocale) {
  struct Grouped : std::numpunct<char> {
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };
  const auto temporary = [&] {
    const NewFile file("test", folder / "a");
    return std::filesystem::directory_iterator(folder / "")->path().filename().string();
  };
  const std::string name = temporary();
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Grouped));
  const std::string other = temporary();
  std::locale::global(before);
  EXPECT_EQ(other, name);
}

// Files that others write at this moment are not taken for left ones.
TEST_F(Files, SavesToOnePathAtTheSameTime) {
  constexpr int kThreads = 6, kSaves = 40;
  std::atomic<int> failures{0};
  in_threads(kThreads, [&](size_t t) {
    try {
      const std::byte content[4] = {static_cast<std::byte>(t)};
      for (int i = 0; i < kSaves; ++i) {
        NewFile file("test", folder / "a");
        file.write_at(0, content);
        file.commit();
      }
    } catch (const Error& error) {
      ++failures;
      std::fprintf(stderr, "%s\n", error.what());
    }
  });
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(folder.files(), 1u);
}

// A name that somebody else holds, in a folder that all may write to, is not written to.
TEST_F(Files, AFileThatIsThereIsNotTaken) {
  Session session(device, some_options());
  session.append(3);
  std::string name;
  {
    NewFile file("test", folder / "a");
    name = std::filesystem::directory_iterator(folder / "")->path();
  }
  put_file(folder / "victim", Bytes(100, std::byte{7}));
  ASSERT_EQ(symlink((folder / "victim").c_str(), name.c_str()), 0);
  session.cache.save(folder / "a");
  EXPECT_EQ(bytes_of_file(folder / "victim"), Bytes(100, std::byte{7}));
  EXPECT_NO_THROW(verify_snapshot(folder / "a"));
}

// A number of rows takes no memory: with holes, a file of any size costs who wrote it nothing.
TEST_F(Files, RowsOfAPoolsFileAreReadInPieces) {
  KvPool pool(device, small_pool());
  pool.save(pool.sequence(), folder / "a");
  Bytes bytes = bytes_of_file(folder / "a");
  const uint64_t size = uint64_t{8} << 30, rows = (size - bytes.size()) / 32;
  std::memcpy(&bytes[24], &rows, sizeof rows);
  std::memcpy(&bytes[32], &size, sizeof size);
  put_file(folder / "a", bytes);
  ASSERT_EQ(truncate((folder / "a").c_str(), static_cast<off_t>(size)), 0);
  const FailingFiles files(kNever, EIO);
  EXPECT_ERROR(io, ("kv_pool.load", "row 0"), (void)pool.load(folder / "a"));
  EXPECT_LT(files.bytes_read(), 4u << 20);
}

// inspect reads the header, however large the file is.
TEST_F(Files, InspectReadsTheHeaderAlone) {
  KvCacheOptions large = some_options();
  large.capacity = 1 << 15;
  large.step_tokens = 1 << 13;
  Session session(device, large);
  session.append(1 << 13);
  session.cache.save(folder / "a");
  KvSnapshotInfo info;
  {
    const FailingFiles files(kNever, EIO);
    info = inspect_snapshot(folder / "a");
    EXPECT_GE(files.bytes_read(), info.header_bytes);
    EXPECT_LE(files.bytes_read(), 2 * info.header_bytes) << "of " << info.file_bytes;
    EXPECT_LT(2 * info.header_bytes, info.file_bytes / 4);
  }
  Bytes bytes = bytes_of_file(folder / "a");
  bytes.back() ^= std::byte{1};
  put_file(folder / "a", bytes);
  EXPECT_EQ(inspect_snapshot(folder / "a").length, info.length);
  EXPECT_ERROR(io, ("verify_snapshot", "checksum"), verify_snapshot(folder / "a"));
}

}  // namespace
}  // namespace gyre::test
