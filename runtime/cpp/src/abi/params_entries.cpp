// The functions of specrt.h that are about parameters.
#include <string>

#include "abi/arguments.hpp"
#include "abi/call.hpp"
#include "abi/entries.hpp"
#include "abi/text.hpp"

using namespace specrt::abi;

namespace {

// Change parameters; a refused change leaves them as they were.
template <typename Change>
specrt_status changed(specrt_params* params, Change&& change) noexcept {
  return guarded([&] {
    const auto entry = find(params);
    const std::lock_guard<std::mutex> lock(entry->mutex);
    change(entry->values);
  });
}

}  // namespace

specrt_status specrt_params_create(specrt_params** params) {
  return guarded([&] {
    require(params, "params");
    *params = nullptr;
    const Handle handle = handles().add(Kind::kParams, std::make_shared<Parameters>());
    *params = reinterpret_cast<specrt_params*>(handle);
  });
}

specrt_status specrt_params_copy(specrt_params* params, specrt_params** copy) {
  return guarded([&] {
    require(copy, "copy");
    *copy = nullptr;
    const auto entry = find(params);
    const auto made = std::make_shared<Parameters>();
    {
      const std::lock_guard<std::mutex> lock(entry->mutex);
      made->values = entry->values;
    }
    *copy = reinterpret_cast<specrt_params*>(handles().add(Kind::kParams, made));
  });
}

specrt_status specrt_params_set_integer(specrt_params* params, const char* name, int64_t value) {
  return changed(params, [&](specrt::Params& values) {
    set_integer(values, checked_text("name", name), value);
  });
}

specrt_status specrt_params_set_number(specrt_params* params, const char* name, double value) {
  return changed(params, [&](specrt::Params& values) {
    set_number(values, checked_text("name", name), value);
  });
}

specrt_status specrt_params_set_text(specrt_params* params, const char* name, const char* text,
                                     size_t bytes) {
  return changed(params, [&](specrt::Params& values) {
    const std::string option = checked_text("name", name);
    set_text(values, option, checked_text(option.c_str(), text, bytes));
  });
}

specrt_status specrt_params_add_text(specrt_params* params, const char* name, const char* text,
                                     size_t bytes) {
  return changed(params, [&](specrt::Params& values) {
    const std::string option = checked_text("name", name);
    add_text(values, option, checked_text(option.c_str(), text, bytes));
  });
}

specrt_status specrt_params_add_tokens(specrt_params* params, const char* name, const int64_t* ids,
                                       size_t count) {
  return changed(params, [&](specrt::Params& values) {
    const std::string option = checked_text("name", name);
    if (count > 0) require(ids, "ids");
    require_count("ids", count, sizeof *ids);
    add_tokens(values, option, ids, count);
  });
}

specrt_status specrt_params_add_bias(specrt_params* params, int64_t token, double bias) {
  return changed(params, [&](specrt::Params& values) { add_bias(values, token, bias); });
}

specrt_status specrt_params_add_processor(specrt_params* params, specrt_processor processor,
                                          void* user) {
  return changed(params, [&](specrt::Params& values) {
    require_function(processor, "processor");
    values.processors.push_back({processor, user});
  });
}

specrt_status specrt_params_clear(specrt_params* params, const char* name) {
  return changed(params, [&](specrt::Params& values) {
    if (name == nullptr) {
      values = {};
    } else {
      clear(values, checked_text("name", name));
    }
  });
}

specrt_status specrt_params_close(specrt_params* params) {
  return guarded([&] {
    if (params != nullptr) handles().take(Kind::kParams, handle_of(params));
  });
}
