#pragma once
// What commands that run for a while and write reports share.

#include <string>

namespace gyre::tools {

// A bar that is drawn over itself in a terminal; a line for each thing elsewhere.
class ProgressBar {
 public:
  ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  ~ProgressBar();

  void show(const std::string& what, double done);

 private:
  bool live_;
  std::string what_;
  int percent_ = -1;
};

// Asked before anything is measured: a wrong path must not cost a minute. Leaves a file as it is,
// and makes none. `command` opens the messages; an empty path is no file.
void check_output(const std::string& command, const std::string& path);
void write_output(const std::string& command, const std::string& path, const std::string& text);

std::string now();  // "2026-01-31 12:00 UTC"

}  // namespace gyre::tools
