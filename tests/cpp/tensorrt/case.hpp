// What a check is to open, and on what machine: `case.json` in a folder that a test wrote.
#pragma once

#include <string>

#include "native/engine/backends.hpp"
#include "native/text/json.hpp"

namespace specrt::checks {

struct Case {
  explicit Case(const std::string& folder);

  native::Bundle bundle;
  native::Json json;
  std::size_t vocabulary;

  const native::ModelRecord& model() const { return bundle.manifest.target; }
  std::shared_ptr<native::Model> open() const { return native::open_tensorrt(bundle, model()); }
};

// Make the machine what an object of `case.json` says.
void become(const native::Json& machine);

}  // namespace specrt::checks
