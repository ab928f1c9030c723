#include "cache/snapshot_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "runtime/require.h"

namespace gyre {
namespace {

constexpr size_t kMostAtOnce = size_t{1} << 30;  // Linux moves at most 2^31 - 4096 bytes per call

std::string error_text(int error) { return std::generic_category().message(error); }

// A name of this process; one that a crashed process of the same number left is passed over.
int open_temporary(const std::string& path, std::string& name) {
  static std::atomic<uint64_t> count{0};
  constexpr int kAttempts = 1000;
  for (int i = 0; i < kAttempts; ++i) {
    name = join(path, ".", getpid(), "-", count.fetch_add(1), ".tmp");
    const int fd = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0 || (errno != EEXIST && errno != EINTR)) return fd;
  }
  return -1;
}

// A path with a NUL would be cut there and name another file.
const std::string& whole(const char* op, const std::string& path) {
  const size_t nul = path.find('\0');
  require(nul == std::string::npos, op, ": the path has a NUL at byte ", nul);
  return path;
}

// Where a new file goes: not over pipes, devices and folders, and not over a link, but to where it
// leads.
std::string target_of(const char* op, const std::string& path) {
  struct stat facts {};
  if (::lstat(path.c_str(), &facts) != 0) return path;  // none yet, or creating it says why not
  const bool link = S_ISLNK(facts.st_mode);
  if (link && ::stat(path.c_str(), &facts) != 0)
    fail(ErrorCode::io, op, ": ", path, ": is a link that leads nowhere: ", error_text(errno));
  if (!S_ISREG(facts.st_mode)) fail(ErrorCode::io, op, ": ", path, ": is not a regular file");
  if (!link) return path;
  std::error_code error;
  std::string real = std::filesystem::canonical(path, error).string();
  if (error) fail(ErrorCode::io, op, ": ", path, ": cannot follow the link: ", error.message());
  return real;
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

Descriptor::~Descriptor() { close(); }

int Descriptor::close() {
  if (fd_ < 0) return 0;
  const int fd = fd_;
  fd_ = -1;
  return ::close(fd) == 0 ? 0 : errno;
}

// Not blocking: a pipe is refused below instead of waited for.
FileSource::FileSource(const char* op, const std::string& path)
    : SnapshotSource(join(op, ": ", path)),
      file_(::open(whole(op, path).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (file_.get() < 0) fail(ErrorCode::io, where(), ": cannot open: ", error_text(errno));
  struct stat facts {};
  if (::fstat(file_.get(), &facts) != 0) {
    fail(ErrorCode::io, where(), ": cannot ask for its size: ", error_text(errno));
  }
  if (!S_ISREG(facts.st_mode)) fail(ErrorCode::io, where(), ": is not a regular file");
  size_ = static_cast<uint64_t>(facts.st_size);
}

void FileSource::read(uint64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t got = ::pread(file_.get(), to.data(), std::min(to.size(), kMostAtOnce),
                                static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      fail(ErrorCode::io, where(), ": cannot read at byte ", offset, ": ", error_text(errno));
    }
    if (got == 0) fail(ErrorCode::io, where(), ": ends at byte ", offset, " while it is read");
    offset += static_cast<uint64_t>(got);
    to = to.subspan(static_cast<size_t>(got));
  }
}

NewFile::NewFile(const char* op, const std::string& path)
    : op_(op), path_(target_of(op, whole(op, path))), file_(open_temporary(path_, temporary_)) {
  if (file_.get() >= 0) return;
  const int error = errno;
  const std::string name = std::exchange(temporary_, {});
  fail(ErrorCode::io, op_, ": ", path_, ": cannot create ", name, ": ", error_text(error));
}

NewFile::~NewFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void NewFile::failed(const char* what, int error) const {
  fail(ErrorCode::io, op_, ": ", path_, ": cannot ", what, ": ", error_text(error));
}

void NewFile::resize(uint64_t bytes) {
  while (::ftruncate(file_.get(), static_cast<off_t>(bytes)) != 0) {
    if (errno != EINTR) failed("write", errno);
  }
}

void NewFile::write_at(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::pwrite(file_.get(), bytes.data(), std::min(bytes.size(), kMostAtOnce),
                                 static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) failed("write", errno);
    if (put == 0) failed("write", ENOSPC);
    offset += static_cast<uint64_t>(put);
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
}

void NewFile::commit() {
  if (::fsync(file_.get()) != 0) failed("sync", errno);
  if (const int error = file_.close(); error != 0) failed("close", error);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) failed("rename to it", errno);
  temporary_.clear();
  sync_folder();
}

// Without it a power cut can bring the old file back, or none.
void NewFile::sync_folder() const {
  const Descriptor folder(::open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0) failed("open its folder to sync it", errno);
  // EINVAL: a file system that does not sync folders.
  if (::fsync(folder.get()) != 0 && errno != EINVAL) failed("sync its folder", errno);
}

}  // namespace gyre
