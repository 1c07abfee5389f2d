// The JSON contract between a build machine and a device.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "native/bundle/bundle.hpp"
#include "native/bundle/sha256.hpp"

namespace specrt::native {

// What a bundle says of its files and its origin, which nothing needs once it is open.
struct Record {
  Manifest manifest;
  std::map<std::string, HashedFile> files;
  std::map<std::string, std::string> versions;
  std::map<std::string, std::string> device;
};

// Read a bundle's manifest. Throws Failure(SPECRT_BUNDLE) when it is missing, of a newer format, or
// not a manifest.
Record read_manifest(const std::string& folder);

// Refuse what does not fit together between fields that are fine by themselves: gammas as they are
// written, and sizes of each model. Throws std::runtime_error.
void check_manifest(const Record& record, const std::vector<std::int64_t>& gammas);

// The text of a file that may be anything. Throws std::runtime_error for what is not a file, or has
// more than so many bytes.
std::string read_text(const std::string& path, std::uint64_t most);

}  // namespace specrt::native
