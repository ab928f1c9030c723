// Files on the disk: read, and replaced as a whole.
#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <climits>
#include <system_error>
#include <utility>

#include "files/calls.h"
#include "files/container.h"

namespace gyre {
namespace {

constexpr size_t kMaxAtOnce = size_t{1} << 30;  // Linux moves at most 2^31 - 4096 bytes per call

std::string error_text(int error) { return std::generic_category().message(error); }

// A path with a NUL would be cut there and name another file.
const std::string& whole(const char* op, const std::string& path) {
  require(!path.empty(), op, ": the path is empty");
  const size_t nul = path.find('\0');
  require(nul == std::string::npos, op, ": the path has a NUL at byte ", nul);
  return path;
}

// Where a new file goes: not over pipes, devices and folders, and not over a link, but to where it
// leads.
std::string target_of(const char* op, const std::string& path) {
  struct stat facts {};
  const FileCalls& calls = file_calls();
  if (calls.stat_at(AT_FDCWD, path.c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) return path;  // none yet; creating it may say why not
    fail(ErrorCode::io, op, ": ", path, ": cannot be looked at: ", error_text(errno));
  }
  const bool link = S_ISLNK(facts.st_mode);
  if (link && calls.stat_at(AT_FDCWD, path.c_str(), &facts, 0) != 0)
    fail(ErrorCode::io, op, ": ", path, ": is a link that leads nowhere: ", error_text(errno));
  if (!S_ISREG(facts.st_mode)) fail(ErrorCode::io, op, ": ", path, ": is not a regular file");
  if (!link) return path;
  char real[PATH_MAX];
  if (calls.real_path(path.c_str(), real) == nullptr)
    fail(ErrorCode::io, op, ": ", path, ": cannot follow the link: ", error_text(errno));
  return real;
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

Descriptor::Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}
Descriptor::~Descriptor() { close(); }

int Descriptor::close() {
  if (fd_ < 0) return 0;
  const int fd = std::exchange(fd_, -1);
  // Linux closes it also where a signal interrupts.
  return file_calls().close(fd) == 0 || errno == EINTR ? 0 : errno;
}

// Not blocking: a pipe is refused below instead of waited for.
FileSource::FileSource(const char* op, const std::string& path) : Source(join(op, ": ", path)) {
  whole(op, path);
  constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
  file_ = Descriptor(
      uninterrupted([&] { return file_calls().open_at(AT_FDCWD, path.c_str(), kFlags, 0); }));
  if (file_.get() < 0) fail(ErrorCode::io, where(), ": cannot open: ", error_text(errno));
  struct stat facts {};
  if (file_calls().stat(file_.get(), &facts) != 0) {
    fail(ErrorCode::io, where(), ": cannot ask for its size: ", error_text(errno));
  }
  if (!S_ISREG(facts.st_mode)) fail(ErrorCode::io, where(), ": is not a regular file");
  size_ = static_cast<uint64_t>(facts.st_size);
}

void FileSource::read(uint64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t got = uninterrupted([&] {
      return file_calls().read_at(file_.get(), to.data(), std::min(to.size(), kMaxAtOnce),
                                  static_cast<off_t>(offset));
    });
    if (got < 0) {
      fail(ErrorCode::io, where(), ": cannot read at byte ", offset, ": ", error_text(errno));
    }
    if (got == 0) fail(ErrorCode::io, where(), ": ends at byte ", offset, " while it is read");
    offset += static_cast<uint64_t>(got);
    to = to.subspan(static_cast<size_t>(got));
  }
}

NewFile::NewFile(const char* op, const std::string& path)
    : op_(op), path_(target_of(op, whole(op, path))) {
  open_folder();
  try {
    open_temporary();
  } catch (...) {  // no destructor runs
    if (!temporary_.empty()) file_calls().remove_at(folder_.get(), temporary_.c_str());
    throw;
  }
}

NewFile::~NewFile() {
  if (!temporary_.empty()) file_calls().remove_at(folder_.get(), temporary_.c_str());
}

void NewFile::failed(const char* what, int error) const {
  fail(ErrorCode::io, op_, ": ", path_, ": cannot ", what, ": ", error_text(error));
}

// First, and synced once: after the rename there is nothing left that can fail.
void NewFile::open_folder() {
  const size_t slash = path_.find_last_of('/');
  name_ = slash == std::string::npos ? path_ : path_.substr(slash + 1);
  const std::string folder = folder_of(path_);
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
  folder_ = Descriptor(
      uninterrupted([&] { return file_calls().open_at(AT_FDCWD, folder.c_str(), kFlags, 0); }));
  if (folder_.get() < 0) failed("open its folder", errno);
  // EINVAL: a file system that does not sync folders.
  if (uninterrupted([&] { return file_calls().sync(folder_.get()); }) != 0 && errno != EINVAL)
    failed("sync its folder", errno);
}

// Short, whatever the name: a file system allows as much for the one as for the other.
std::string NewFile::temporary_name(int number) const {
  return join(".gyre-", std::hex, checksum_of(std::as_bytes(std::span(name_))), "-", number,
              ".tmp");
}

// Whether the name is free again. One that nobody has locked was left by a killed process.
bool NewFile::remove_left(const std::string& name) const {
  const FileCalls& calls = file_calls();
  constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW;
  const Descriptor left(calls.open_at(folder_.get(), name.c_str(), kFlags, 0));
  if (left.get() < 0) return errno == ENOENT;
  struct stat facts {};
  if (calls.stat(left.get(), &facts) != 0 || !S_ISREG(facts.st_mode)) return false;
  if (calls.lock(left.get(), LOCK_EX | LOCK_NB) != 0) return false;
  // While it was opened, another may have removed it and made a file of that name.
  struct stat now {};
  if (calls.stat_at(folder_.get(), name.c_str(), &now, AT_SYMLINK_NOFOLLOW) != 0 ||
      now.st_ino != facts.st_ino || now.st_dev != facts.st_dev) {
    return false;
  }
  return calls.remove_at(folder_.get(), name.c_str()) == 0;
}

// Whether it is there, new, locked and still at its name: who removes what was left may have taken
// it for such a file before it was locked.
bool NewFile::create(const std::string& name) {
  const FileCalls& calls = file_calls();
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
  temporary_ = name;  // before there is a file: it takes memory
  file_ = Descriptor(
      uninterrupted([&] { return calls.open_at(folder_.get(), name.c_str(), kFlags, 0600); }));
  if (file_.get() < 0) {
    const int error = errno;
    temporary_.clear();
    errno = error;
    return false;
  }
  // Where files cannot be locked they are written all the same, and what is left is not removed.
  locked_ = uninterrupted([&] { return calls.lock(file_.get(), LOCK_EX); }) == 0;
  struct stat facts {};
  if (calls.stat(file_.get(), &facts) == 0 && facts.st_nlink != 0) return true;
  temporary_.clear();
  errno = EEXIST;
  return false;
}

// Whether what was written is still at its name.
bool NewFile::is_in_place() const {
  const FileCalls& calls = file_calls();
  struct stat own {
  }, there{};
  return calls.stat(file_.get(), &own) == 0 &&
         calls.stat_at(folder_.get(), temporary_.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0 &&
         own.st_ino == there.st_ino && own.st_dev == there.st_dev;
}

void NewFile::open_temporary() {
  constexpr int kNames = 32;  // files for one path that are written at the same time
  int error = EEXIST;
  for (int i = 0; i < kNames; ++i) {
    const std::string name = temporary_name(i);
    errno = EEXIST;
    const bool is_free = remove_left(name);
    if (file_.get() >= 0) continue;
    if (!is_free) {  // what is said if no name is free
      if (error == EEXIST && errno != EWOULDBLOCK) error = errno;
      continue;
    }
    if (!create(name)) error = errno;
    if (file_.get() < 0 && error != EEXIST) break;
    if (temporary_.empty()) file_ = Descriptor();
  }
  if (file_.get() < 0) failed("create a file in its folder", error);
}

// Who may read the file that is replaced may read the new one, if its owner is the same and so
// decided it: another user's file, or a link, says nothing about ours. Its group may see what the
// old file's group could, or nothing.
void NewFile::keep_mode() const {
  const FileCalls& calls = file_calls();
  struct stat old {
  }, made{};
  if (calls.stat_at(folder_.get(), name_.c_str(), &old, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return;
    failed("ask for the old file's mode", errno);
  }
  if (calls.stat(file_.get(), &made) != 0) failed("ask for its mode", errno);
  if (!S_ISREG(old.st_mode) || old.st_uid != made.st_uid) return;  // it is 0600
  mode_t mode = old.st_mode & 0777;
  if (made.st_gid != old.st_gid && calls.change_group(file_.get(), old.st_gid) != 0)
    mode &= ~static_cast<mode_t>(0070);
  if (calls.change_mode(file_.get(), mode) != 0) failed("keep its mode", errno);
}

void NewFile::resize(uint64_t bytes) {
  if (uninterrupted([&] { return file_calls().resize(file_.get(), static_cast<off_t>(bytes)); }) !=
      0) {
    failed("write", errno);
  }
}

void NewFile::write_at(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = uninterrupted([&] {
      return file_calls().write_at(file_.get(), bytes.data(), std::min(bytes.size(), kMaxAtOnce),
                                   static_cast<off_t>(offset));
    });
    if (put < 0) failed("write", errno);
    if (put == 0) failed("write", ENOSPC);
    offset += static_cast<uint64_t>(put);
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
}

void NewFile::commit() {
  const FileCalls& calls = file_calls();
  keep_mode();  // until now nobody else could open it
  if (uninterrupted([&] { return calls.sync(file_.get()); }) != 0) failed("sync", errno);
  // One that is not locked may be taken for one that was left.
  if (!locked_ && !is_in_place()) failed("find what was written", ENOENT);
  if (calls.rename_at(folder_.get(), temporary_.c_str(), name_.c_str()) != 0)
    failed("rename to it", errno);
  temporary_.clear();
  // So that no power cut brings the old file back. The new one is there, whatever this returns.
  (void)uninterrupted([&] { return calls.sync(folder_.get()); });
  // Closed, and unlocked, under its own name: nobody takes it for one that was left.
  (void)file_.close();
}

}  // namespace gyre
