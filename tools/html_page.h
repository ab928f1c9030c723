#pragma once
// The parts that reports share.

#include <string>

namespace gyre::tools {

// What a page says about the run beside its figures.
struct ReportInfo {
  std::string command;  // the command line
  std::string date, version;
};

// One self-contained page: no scripts, nothing loaded. `body` is HTML.
std::string html_page(const std::string& title, const std::string& body);

std::string tag(const std::string& name, const std::string& text);  // escapes the text
std::string figure(const std::string& caption, const std::string& svg);
std::string run_facts(const std::string& machine, const ReportInfo& info);

}  // namespace gyre::tools
