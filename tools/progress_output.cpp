#include "progress_output.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "gyre/error.h"

namespace gyre::tools {

ProgressBar::ProgressBar() : live_(isatty(STDERR_FILENO) != 0) {}
ProgressBar::~ProgressBar() {
  if (live_) std::cerr << "\r\033[K" << std::flush;
}

void ProgressBar::show(const std::string& what, double done) {
  const auto percent = static_cast<int>(100 * done);
  if (live_ && (what != what_ || percent != percent_)) {
    constexpr size_t kCells = 30;
    const auto full = static_cast<size_t>(kCells * done);
    std::cerr << "\r\033[K[" << std::string(full, '#') << std::string(kCells - full, '.') << "] "
              << percent << " %  " << what << std::flush;
  } else if (!live_ && what != what_) {
    std::cerr << '[' << percent << " %] " << what << '\n';
  }
  what_ = what;
  percent_ = percent;
}

void check_output(const std::string& command, const std::string& path) {
  if (path.empty()) return;
  const std::filesystem::path file = path;
  std::error_code none;
  const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
  const bool exists = std::filesystem::exists(file, none);
  errno = EISDIR;  // a name that is none
  const bool can = exists ? static_cast<bool>(std::ofstream(file, std::ios::app))
                          : file.has_filename() && access(folder.c_str(), W_OK | X_OK) == 0;
  if (can) return;
  const std::string why = std::strerror(errno);
  throw Error(ErrorCode::io, command + ": cannot write \"" + path + "\": " + why);
}

void write_output(const std::string& command, const std::string& path, const std::string& text) {
  if (path.empty()) return;
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw Error(ErrorCode::io, command + ": writing \"" + path + "\" failed");
}

std::string now() {
  const std::time_t seconds = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M UTC", &parts);
  return text;
}

}  // namespace gyre::tools
