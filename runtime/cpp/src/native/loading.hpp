// An open bundle: what its sessions share.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "implementation.hpp"
#include "native/bundle/bundle.hpp"
#include "native/engine/backends.hpp"
#include "native/text/tokenizer.hpp"

namespace specrt::native {

class LoadedBundle {
 public:
  LoadedBundle(const std::string& path, const OpenOptions& options);

  // The gamma and the drafter to use: those of the request, or the bundle's defaults. Throw
  // Failure(SPECRT_INVALID_ARGUMENT) for what was not built or cannot be had.
  int gamma_of(const Params& params) const;
  std::string drafter_of(const Params& params) const;

  // What passes cost here: as tuned, else assumed.
  Costs costs() const;

  Info info() const;
  Memory memory() const;

  const int threads;
  const bool prompt_cache;
  const Bundle bundle;
  const Models models;
  const Tokenizer tokenizer;
  std::atomic<std::uint64_t> sessions{0};  // open ones

 private:
  void check_vocabulary() const;
};

}  // namespace specrt::native
