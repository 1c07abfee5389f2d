// A file mapped into memory: a plan is as large as its weights, and pages can be dropped again.
#pragma once

#include <cstddef>
#include <string>

namespace specrt::native::tensorrt {

class MappedFile {
 public:
  // Throws Failure(SPECRT_ENGINE) where it cannot be read.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const char* data() const { return static_cast<const char*>(data_); }
  std::size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// Refuse a file that is no plan of the library that is linked in, before TensorRT sees it.
void check_header(const std::string& path, const MappedFile& file);

}  // namespace specrt::native::tensorrt
