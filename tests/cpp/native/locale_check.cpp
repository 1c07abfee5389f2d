// JSON in an application whose numbers have commas.
#include <clocale>
#include <stdexcept>

#include "native/check.hpp"
#include "specrt/specrt.h"

namespace specrt::checks {

namespace {

void require(specrt_status status) {
  if (status != SPECRT_OK) throw std::runtime_error(specrt_last_error());
}

int locale(const native::Json& vectors) {
  if (std::setlocale(LC_ALL, "") == nullptr || std::localeconv()->decimal_point[0] != ',') {
    return differs("locale", "another", "one with commas");
  }
  specrt_open_options options{};
  options.size = sizeof options;
  options.onnxruntime = vectors.at("library").text().c_str();
  specrt_generator* generator = nullptr;
  specrt_session* session = nullptr;
  specrt_params* params = nullptr;
  require(specrt_open(vectors.at("bundle").text().c_str(), &options, &generator));
  require(specrt_session_create(generator, &session));
  require(specrt_params_create(&params));
  require(specrt_params_set_integer(params, "logprobs", 1));
  require(specrt_params_set_integer(params, "max_tokens", 3));
  const std::int64_t prompt[] = {57, 58};
  require(specrt_generate_ids(session, prompt, 2, params, nullptr, nullptr));
  const char* json = nullptr;
  std::size_t bytes = 0;
  require(specrt_session_json(session, &json, &bytes));
  const std::string written(json, bytes);
  const native::Json told = native::Json::parse(written);
  const bool fine = told.at("logprobs").items().size() == 3 && told.at("ttft_ms").number() > 0;
  require(specrt_params_close(params));
  require(specrt_generator_close(generator));
  return fine ? 0 : differs("locale", written, "logprobs and times");
}

const Registered registered("locale", locale);

}  // namespace

}  // namespace specrt::checks
