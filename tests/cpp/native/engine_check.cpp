// Passes over an engine: what each leaves behind is what the Python runtime's engine left.
#include <cstdio>
#include <memory>

#include "native/bundle/bundle.hpp"
#include "native/bundle/sha256.hpp"
#include "native/check.hpp"
#include "native/engine/backends.hpp"
#include "native/measure.hpp"
#include "native/text/json.hpp"

namespace specrt::checks {

namespace {

using native::Json;

std::string hash_of(const void* data, std::size_t bytes) {
  native::Sha256 digest;
  digest.update(data, bytes);
  return digest.finish();
}

int compare_pass(native::Engine& engine, const Json& pass, const std::string& name) {
  std::vector<Token> tokens;
  for (const Json& token : pass.at("tokens").items()) tokens.push_back(token.integer());
  const auto start = static_cast<std::size_t>(pass.at("start").integer());
  const auto rows = static_cast<std::size_t>(pass.at("rows").integer());
  const native::Output output = engine.forward(tokens.data(), tokens.size(), start, rows);
  int wrong = 0;
  std::string argmax;
  for (std::size_t i = 0; i < output.rows; ++i)
    argmax += (argmax.empty() ? "" : " ") + std::to_string(output.argmax[i]);
  if (argmax != pass.at("argmax").text())
    wrong += differs(name + " argmax", argmax, pass.at("argmax").text());
  const std::string logits =
      hash_of(output.row(0), output.rows * output.vocabulary * sizeof(float));
  if (logits != pass.at("logits").text())
    wrong += differs(name + " logits", logits, pass.at("logits").text());
  const std::string confidence =
      output.confidence ? hash_of(output.confidence, output.rows * sizeof(float)) : "";
  if (confidence != pass.at("confidence").text())
    wrong += differs(name + " confidence", confidence, pass.at("confidence").text());
  return wrong;
}

int refused(native::Engine& engine, std::size_t width, std::size_t start) {
  try {
    const std::vector<Token> tokens(width);
    engine.forward(tokens.data(), width, start, 1);
  } catch (const Failure& failure) {
    return failure.status() == SPECRT_ENGINE ? 0 : differs("a pass", failure.what(), "refused");
  }
  return differs("a pass out of bounds", "run", "refused");
}

}  // namespace

int check_engine(const Json& vectors) {
  OpenOptions options;
  options.onnxruntime = vectors.at("library").text();
  options.owns_process = vectors.at("owns_process").boolean();
  const auto threads = static_cast<int>(vectors.at("threads").integer());
  const native::Bundle bundle = native::open_folder(vectors.at("bundle").text(), threads, options);
  const native::Models models = native::open_models(bundle, options, threads);
  int wrong = 0;
  for (const char* role : {"target", "draft"}) {
    native::Model* model = role[0] == 't' ? models.target.get() : models.draft.get();
    if (model == nullptr) continue;
    // Two of them: passes of one must not touch what the other holds.
    const auto engine = model->engine(), other = model->engine();
    int number = 0;
    for (const Json& pass : vectors.at(role).items()) {
      const std::string name = role + (" " + std::to_string(number++));
      wrong += compare_pass(*engine, pass, name);
      wrong += compare_pass(*other, pass, name + " again");
    }
    wrong += refused(*engine, engine->max_width() + 1, 0);
    wrong += refused(*engine, 1, engine->max_length());
    wrong += refused(*engine, 0, 0);
  }
  const auto target = models.target->engine();
  const auto draft = models.draft ? models.draft->engine() : nullptr;
  const native::Costs costs = native::measure_costs(*target, draft.get(), bundle.manifest);
  costs.check();
  const auto built = static_cast<std::size_t>(bundle.manifest.gammas.back()) + 1;
  if (costs.verify_ns.size() != built || costs.draft_ns.size() != built)
    wrong += differs("costs", std::to_string(costs.verify_ns.size()), std::to_string(built));
  return wrong;
}

static const Registered kRegistered("engine", check_engine);

}  // namespace specrt::checks
