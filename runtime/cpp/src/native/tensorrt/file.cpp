#include "native/tensorrt/file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "failure.hpp"
#include "native/json.hpp"
#include "native/tensorrt/library.hpp"
#include "native/tensorrt/record.hpp"

namespace specrt::native::tensorrt {

namespace {

// Where a plan of TensorRT for RTX keeps its own length; seen in plans of 1.7.1.
constexpr std::size_t kRtxSize = 16;

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw Failure(SPECRT_ENGINE, path + " " + what + "; " + kAgain);
}

std::string backend_of(const std::string& mark) {
  if (mark == "ptrt" || mark == "ftrt") return "tensorrt";
  return mark == "vtrt" ? "tensorrt-rtx" : "";
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat found{};
  if (file < 0 || fstat(file, &found) != 0 || !S_ISREG(found.st_mode)) {
    const std::string why = file < 0 ? std::strerror(errno) : "it is no file";
    if (file >= 0) close(file);
    refuse(path, "cannot be read (" + why + ")");
  }
  size_ = static_cast<std::size_t>(found.st_size);
  if (size_ != 0) data_ = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
  const std::string why = data_ == MAP_FAILED ? std::strerror(errno) : "";
  close(file);
  if (!why.empty()) refuse(path, "cannot be read (" + why + ")");
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

void check_header(const std::string& path, const MappedFile& file) {
  const Library& ours = library();
  const std::string mark(file.data() ? file.data() : "", std::min<std::size_t>(file.size(), 4));
  const std::string backend = backend_of(mark);
  if (backend.empty())
    refuse(path, "is damaged or no TensorRT plan: it " +
                     (mark.empty() ? "is empty" : "begins with " + quoted(mark)));
  if (backend != ours.backend)
    refuse(path,
           "is a plan of " + title_of(backend) + "; this libspecrt was built with " + ours.name());
  if (backend != "tensorrt-rtx" || file.size() < kRtxSize + sizeof(std::uint64_t)) return;
  std::uint64_t told = 0;  // least byte first, as every machine that has such a GPU
  std::memcpy(&told, file.data() + kRtxSize, sizeof told);
  if (file.size() < told)
    refuse(path, "is damaged: " + std::to_string(file.size()) + " bytes of " +
                     std::to_string(told) + " are there");
}

}  // namespace specrt::native::tensorrt
