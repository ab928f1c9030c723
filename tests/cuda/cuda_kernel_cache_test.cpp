#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "cuda/kernel_cache.h"
#include "gyre_test.h"

namespace gyre::cuda {
namespace {

namespace fs = std::filesystem;

class KernelCacheTest : public testing::Test {
 protected:
  KernelCacheTest()
      : folder_(fs::temp_directory_path() / ("gyre_kernel_cache_" + std::to_string(getpid()))) {
    fs::remove_all(folder_);
  }
  ~KernelCacheTest() override { fs::remove_all(folder_); }

  KernelCache cache() const { return KernelCache(folder_.string()); }
  fs::path only_file() const {
    EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
    return fs::directory_iterator(folder_)->path();
  }

  fs::path folder_;
};

CacheKey key_of(std::initializer_list<std::string_view> parts) {
  CacheKey key;
  for (const std::string_view part : parts) key.add(part);
  return key;
}

CompiledKernel some_kernel(char fill = 'x') {
  return {"_Zsymbol", std::vector<char>(5000, fill), "a log"};
}

TEST_F(KernelCacheTest, KeepsSymbolAndCode) {
  const CacheKey key = key_of({"a", "b"});
  EXPECT_FALSE(cache().load(key));
  cache().store(key, some_kernel());
  const std::optional<CompiledKernel> found = cache().load(key);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->symbol, "_Zsymbol");
  EXPECT_EQ(found->cubin, some_kernel().cubin);
  EXPECT_FALSE(cache().load(key_of({"a", "c"})));
}

TEST_F(KernelCacheTest, KeysKeepPartsApart) {
  EXPECT_NE(key_of({"ab", "c"}).text(), key_of({"a", "bc"}).text());
  EXPECT_NE(key_of({"a"}).text(), key_of({"a", ""}).text());
  EXPECT_EQ(key_of({"a", "b"}).text(), key_of({"a", "b"}).text());
  EXPECT_EQ(key_of({"a"}).text().size(), 32u);
}

TEST_F(KernelCacheTest, ADamagedEntryIsMissingAndWrittenAgain) {
  const CacheKey key = key_of({"a"});
  cache().store(key, some_kernel());
  const fs::path file = only_file();
  const uint64_t bytes = fs::file_size(file);
  for (const uint64_t at : {uint64_t{0}, uint64_t{9}, uint64_t{25}, uint64_t{50}, bytes - 1}) {
    {
      std::fstream out(file, std::ios::in | std::ios::out | std::ios::binary);
      out.seekp(static_cast<std::streamoff>(at));
      out.put('\x7F');
    }
    EXPECT_FALSE(cache().load(key)) << "byte " << at;
    cache().store(key, some_kernel());
    EXPECT_TRUE(cache().load(key));
  }
  for (const uint64_t size : {uint64_t{0}, uint64_t{20}, uint64_t{48}, bytes - 1, bytes + 1}) {
    fs::resize_file(file, size);
    EXPECT_FALSE(cache().load(key)) << size << " bytes";
    cache().store(key, some_kernel());
    EXPECT_TRUE(cache().load(key));
  }
}

TEST_F(KernelCacheTest, AnEntryUnderAnotherNameIsNotTaken) {
  cache().store(key_of({"a"}), some_kernel());
  fs::rename(only_file(), folder_ / (key_of({"b"}).text() + ".cubin"));
  EXPECT_FALSE(cache().load(key_of({"b"})));
}

TEST_F(KernelCacheTest, WritersAtTheSameTimeLeaveOneWholeEntry) {
  const CacheKey key = key_of({"a"});
  std::vector<std::thread> writers;
  for (char fill = 'a'; fill < 'e'; ++fill) {
    writers.emplace_back([this, key, fill] {
      for (int i = 0; i < 50; ++i) {
        cache().store(key, some_kernel(fill));
        const std::optional<CompiledKernel> found = cache().load(key);
        ASSERT_TRUE(found);
        EXPECT_EQ(found->cubin, std::vector<char>(5000, found->cubin[0]));
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  only_file();
}

TEST_F(KernelCacheTest, OffKeepsNothing) {
  const KernelCache off("off");
  EXPECT_TRUE(off.folder().empty());
  off.store(key_of({"a"}), some_kernel());
  EXPECT_FALSE(off.load(key_of({"a"})));
}

TEST_F(KernelCacheTest, AFolderThatCannotBeWrittenIsNoError) {
  const KernelCache nowhere("/proc/gyre_cannot_be_made");
  nowhere.store(key_of({"a"}), some_kernel());
  EXPECT_FALSE(nowhere.load(key_of({"a"})));
}

// Sets a variable while it lives; null removes it.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name); before != nullptr) before_ = before;
    set(value);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { set(before_ ? before_->c_str() : nullptr); }

 private:
  void set(const char* value) const {
    if (value != nullptr) {
      setenv(name_, value, 1);
    } else {
      unsetenv(name_);
    }
  }

  const char* name_;
  std::optional<std::string> before_;
};

// Folders that a package or an image carries: read, never written.
TEST_F(KernelCacheTest, ReadsCarriedFolders) {
  const CacheKey key = key_of({"a"}), other = key_of({"b"});
  const fs::path carried = folder_ / "carried", mine = folder_ / "mine";
  KernelCache(carried.string()).store(key, some_kernel());
  const std::string path = "/nowhere::" + carried.string();
  const Variable variable("GYRE_KERNEL_PATH", path.c_str());
  const KernelCache cache(mine.string());
  const std::optional<CompiledKernel> found = cache.load(key);
  ASSERT_TRUE(found);
  EXPECT_TRUE(found->from_cache);
  EXPECT_FALSE(cache.load(other));
  cache.store(other, some_kernel());
  EXPECT_TRUE(cache.load(other));
  EXPECT_FALSE(KernelCache(carried.string()).load(other));
  EXPECT_FALSE(KernelCache("off").load(key)) << "off is off";
}

TEST(KernelCacheFolder, FollowsTheVariable) {
  const Variable home("HOME", "/home/somebody");
  const Variable cache("GYRE_KERNEL_CACHE", "/kernels");
  EXPECT_EQ(KernelCache("").folder(), "/kernels");
  EXPECT_EQ(KernelCache("/given").folder(), "/given");
  const Variable off("GYRE_KERNEL_CACHE", "off");
  EXPECT_TRUE(KernelCache("").folder().empty());
}

TEST(KernelCacheFolder, FollowsTheRulesOfXdg) {
  const Variable none("GYRE_KERNEL_CACHE", nullptr);
  const Variable home("HOME", "/home/somebody");
  {
    const Variable cache("XDG_CACHE_HOME", "/elsewhere");
    EXPECT_EQ(KernelCache("").folder(), "/elsewhere/gyre");
    EXPECT_EQ(KernelCache("/given").folder(), "/given");
  }
  for (const char* unusable : {static_cast<const char*>(nullptr), "", "relative"}) {
    const Variable cache("XDG_CACHE_HOME", unusable);
    EXPECT_EQ(KernelCache("").folder(), "/home/somebody/.cache/gyre");
  }
  const Variable cache("XDG_CACHE_HOME", nullptr);
  const Variable no_home("HOME", nullptr);
  EXPECT_TRUE(KernelCache("").folder().empty());
}

}  // namespace
}  // namespace gyre::cuda
