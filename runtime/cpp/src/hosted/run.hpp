// A generation of the Python runtime.
#pragma once

#include <memory>

#include "hosted/object.hpp"
#include "implementation.hpp"

namespace specrt::hosted {

class HostedRun : public Run {
 public:
  // With the Gil held; `run` is a `specrt.embedded.Run`.
  explicit HostedRun(const Object& run);
  ~HostedRun() override;

  bool next(Chunk& chunk) override;
  void cancel() noexcept override;
  Stats stats() override;
  std::string json() override;

 private:
  Kept next_;
  Kept cancel_;
  Kept stats_;
  Kept json_;
};

}  // namespace specrt::hosted
