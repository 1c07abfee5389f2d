// Passes over the engines of a bundle.
#include "failure.hpp"
#include "native/answers.hpp"
#include "native/bundle/bundle.hpp"
#include "native/bundle/sha256.hpp"
#include "native/engine/backends.hpp"

namespace specrt::checks {

namespace {

std::string hash_of(const float* data, std::size_t count) {
  native::Sha256 digest;
  digest.update(data, count * sizeof(float));
  return digest.finish();
}

// What a pass left, or the status where it was refused.
std::string pass(native::Engine& engine, const Json& fields) {
  const std::vector<Token> tokens = tokens_of(fields, "tokens");
  try {
    const native::Output output =
        engine.forward(tokens.data(), tokens.size(), get<std::size_t>(fields, "start"),
                       get<std::size_t>(fields, "rows"));
    const float* const sure = output.confidence;
    return object({{"argmax", json(std::vector<Token>(output.argmax, output.argmax + output.rows))},
                   {"logits", json(hash_of(output.row(0), output.rows * output.vocabulary))},
                   {"confidence", sure ? json(hash_of(sure, output.rows)) : "null"}});
  } catch (const Failure& failure) {
    return json(failure.status());
  }
}

std::string passes(const Json& call) {
  OpenOptions options;
  options.onnxruntime = get<std::string>(call, "library");
  options.owns_process = get<bool>(call, "owns_process");
  const native::Bundle bundle = native::open_folder(get<std::string>(call, "bundle"), 1, options);
  const native::Models models = native::open_models(bundle, options, 1);
  std::vector<std::string> answers;
  for (const bool is_target : {true, false}) {
    native::Model& model = is_target ? *models.target : *models.draft;
    // Two of them: passes of one must not touch what the other holds.
    const auto engine = model.engine(), other = model.engine();
    for (const Json& fields : call.at(is_target ? "target" : "draft").items())
      for (native::Engine* const each : {engine.get(), other.get()})
        answers.push_back(pass(*each, fields));
  }
  return list(answers);
}

const Registered kEngine({{"passes", passes}});

}  // namespace

}  // namespace specrt::checks
