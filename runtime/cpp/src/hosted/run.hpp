// A generation of the Python runtime.
#pragma once

#include <memory>
#include <vector>

#include "hosted/object.hpp"
#include "implementation.hpp"

namespace specrt::hosted {

class HostedRun : public Run {
 public:
  // With the Gil held; `run` is a `Run` of the Python module.
  explicit HostedRun(const Object& run);
  ~HostedRun() override;

  bool next(Chunk& chunk) override;
  void cancel() noexcept override;
  Stats stats() override;
  std::vector<Logprobs> logprobs(bool of_prompt) override;
  std::string json() override;

 private:
  SharedObject next_;
  SharedObject cancel_;
  SharedObject stats_;
  SharedObject logprobs_;
  SharedObject json_;
};

}  // namespace specrt::hosted
