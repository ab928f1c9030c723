#include "metal/sources.h"

#include <algorithm>
#include <set>

#include "runtime/require.h"

namespace gyre::metal {
namespace {

constexpr std::string_view kFolder = "metal/kernels/";

std::string text_of(std::string_view name) {
  const std::span<const EmbeddedFile> files = embedded_files();
  const auto file =
      std::ranges::find_if(files, [&](const EmbeddedFile& f) { return f.name == name; });
  if (file == files.end())
    fail(ErrorCode::compile_failed, name, ": the library holds no such kernel file");
  std::string text;
  for (const std::string_view part : file->parts) text += part;
  return text;
}

// #line makes the compiler's log name our files.
void add_file(const std::string& name, std::set<std::string>& seen, std::string& out) {
  constexpr std::string_view kInclude = "#include \"", kOnce = "#pragma once";
  if (!seen.insert(name).second) return;
  const std::string text = text_of(name);
  out += join("#line 1 \"", name, "\"\n");
  uint64_t number = 1;
  for (size_t at = 0; at < text.size(); ++number) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = std::string_view(text).substr(at, end - at);
    at = end + 1;
    if (line.starts_with(kInclude)) {
      const std::string_view remainder = line.substr(kInclude.size());
      add_file(std::string(remainder.substr(0, remainder.find('"'))), seen, out);
      out += join("#line ", number + 1, " \"", name, "\"\n");
    } else if (line.starts_with(kOnce)) {
      out += '\n';
    } else {
      out += line;
      out += '\n';
    }
  }
}

}  // namespace

std::string kernel_text(std::string_view file) {
  std::set<std::string> seen;
  std::string text;
  add_file(join(kFolder, file), seen, text);
  return text;
}

}  // namespace gyre::metal
