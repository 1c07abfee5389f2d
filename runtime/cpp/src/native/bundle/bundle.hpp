// A built bundle on disk: its manifest and tuning, checked against its files and this machine.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "implementation.hpp"
#include "native/bundle/sha256.hpp"
#include "native/engine/protocol.hpp"
#include "speculation/costs.hpp"

namespace specrt::native {

using speculation::Costs;

struct ModelRecord {
  std::string engine;
  std::string backend;
  std::string precision;
  Geometry geometry;
  std::uint64_t weight_bytes = 0;
  int kv_item_bytes = 4;
  std::string kind;       // "eagle3", "dflash" or "mtp" for a head that reads features; else empty
  int features = 0;       // width of the features that a target leaves at each position
  std::string vocab_map;  // the file with the target's id of each entry that a draft scores, or ""
};

struct Manifest {
  std::string name;
  std::string backend;
  std::string precision;
  int batch = 1;
  int max_length = 0;
  int prefill = 0;
  std::vector<int> gammas;
  std::optional<int> gamma;  // the recipe's; without one, what tuning found best, else auto
  std::string drafter;       // the recipe's, where tuning found none
  std::vector<Token> eos_token_ids;
  std::optional<Token> bos_token_id;
  ModelRecord target;
  std::optional<ModelRecord> draft;
  std::string source;  // hash of what the bundle was built from

  std::size_t max_width() const;
};

// What `specrt tune` measured, where it holds for this bundle and machine.
struct Tuning {
  Costs costs;
  int gamma = kAuto;
  std::string drafter;
};

struct Bundle {
  std::string path;
  Manifest manifest;
  std::optional<Tuning> tuning;
  std::vector<std::string> notices;
  std::map<std::string, FileState> files;  // that the manifest lists, as they were when hashed

  // The path of a file. Throws Failure(SPECRT_BUNDLE) for one that the manifest does not list.
  std::string file(const std::string& name) const;
  // Call it once everything was read. Throws Failure(SPECRT_BUNDLE) where a file is not the one
  // that was hashed any more.
  void check_unchanged() const;
};

// Open a bundle after checking format, machine, files (size and sha256) and what its fields say.
// Throws Failure(SPECRT_BUNDLE) naming what is wrong and what to run. A tuning that does not hold
// here is left out with a notice. `threads` is the number of cores in use. A bundle of ONNX Runtime
// needs the library, whose version is checked: Failure(SPECRT_ENGINE) where it cannot be loaded.
Bundle open_folder(const std::string& path, int threads, const OpenOptions& options = {});

}  // namespace specrt::native
