#pragma once
// Reads a .safetensors file: eight bytes of header size, a JSON header, then the tensors' bytes.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace tiny_model {

class SafeTensors {
 public:
  // Checks every entry of the header against the size of the file; throws gyre::Error.
  explicit SafeTensors(const std::filesystem::path& path);

  // F32, F16 and BF16 tensors as floats. The file must have this shape.
  std::vector<float> floats(const std::string& name, const std::vector<uint64_t>& shape) const;
  std::vector<int32_t> integers(const std::string& name) const;  // I32
  const std::vector<uint64_t>& shape(const std::string& name) const { return find(name).shape; }

 private:
  struct Entry {
    std::string dtype;
    std::vector<uint64_t> shape;
    uint64_t begin = 0;  // in the file
    uint64_t bytes = 0;
  };

  const Entry& find(const std::string& name) const;
  template <class T>
  std::vector<T> read(const Entry& entry) const;

  std::filesystem::path path_;
  mutable std::ifstream file_;
  std::map<std::string, Entry> entries_;
};

}  // namespace tiny_model
