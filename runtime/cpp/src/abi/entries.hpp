// From handles to what they stand for.
#pragma once

#include <memory>

#include "abi/generator.hpp"
#include "abi/handles.hpp"
#include "abi/session.hpp"
#include "params.hpp"

namespace specrt::abi {

// Parameters behind their handle. The lock is held while they are read or changed.
struct Parameters : Object {
  std::mutex mutex;
  Params values;
};

inline std::shared_ptr<Generator> find(specrt_generator* handle) {
  return std::static_pointer_cast<Generator>(handles().find(Kind::kGenerator, handle_of(handle)));
}

inline std::shared_ptr<Session> find(specrt_session* handle) {
  return std::static_pointer_cast<Session>(handles().find(Kind::kSession, handle_of(handle)));
}

inline std::shared_ptr<Parameters> find(specrt_params* handle) {
  return std::static_pointer_cast<Parameters>(handles().find(Kind::kParams, handle_of(handle)));
}

}  // namespace specrt::abi
