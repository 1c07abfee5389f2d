// Passes over an engine: what each leaves behind is what the Python runtime's engine left.
#include <atomic>
#include <memory>

#include "native/bundle/bundle.hpp"
#include "native/bundle/sha256.hpp"
#include "native/check.hpp"
#include "native/engine/backends.hpp"
#include "native/measure.hpp"
#include "native/numbers.hpp"
#include "native/speculation/kv_cache.hpp"

namespace specrt::checks {

namespace {

using native::Json;

std::string hash_of(const float* data, std::size_t count) {
  native::Sha256 digest;
  digest.update(data, count * sizeof(float));
  return digest.finish();
}

int compare_pass(native::Engine& engine, const Json& pass, const std::string& name) {
  const std::vector<Token> tokens = tokens_of(pass.at("tokens"));
  const native::Output output = engine.forward(tokens.data(), tokens.size(),
                                               size_of(pass.at("start")), size_of(pass.at("rows")));
  const std::vector<Token> argmax(output.argmax, output.argmax + output.rows);
  const std::string confidence =
      output.confidence ? hash_of(output.confidence, output.rows) : std::string();
  return same(name + " argmax", argmax, tokens_of(pass.at("argmax"))) +
         same(name + " logits", hash_of(output.row(0), output.rows * output.vocabulary),
              pass.at("logits").text()) +
         same(name + " confidence", confidence, pass.at("confidence").text());
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
      wrong += compare_pass(*engine, pass, name) + compare_pass(*other, pass, name + " again");
    }
    wrong += refused(*engine, engine->max_width() + 1, 0) +
             refused(*engine, 1, engine->max_length()) + refused(*engine, 0, 0);
  }
  const auto target = models.target->engine();
  const auto draft = models.draft ? models.draft->engine() : nullptr;
  const native::Costs costs = native::measure_costs(*target, draft.get(), bundle.manifest);
  costs.check();
  const auto built = static_cast<std::size_t>(bundle.manifest.gammas.back()) + 1;
  return wrong + same("verify costs", costs.verify_ns.size(), built) +
         same("draft costs", costs.draft_ns.size(), built);
}

// Cancelled by another thread in its second pass.
class Interrupted : public native::Engine {
 public:
  native::Output forward(const Token*, std::size_t width, std::size_t start,
                         std::size_t rows) override {
    length = start + width;
    cancelled = ++passes == 2;
    return {&argmax, nullptr, nullptr, rows, 1};
  }
  const native::Geometry& geometry() const override { return shape; }
  std::size_t max_length() const override { return 100; }
  std::size_t max_width() const override { return 4; }

  std::size_t length = 0;
  int passes = 0;
  std::atomic<bool> cancelled{false};
  Token argmax = 0;
  native::Geometry shape;
};

// The part of a cancelled prompt that was read counts.
int check_cancel(const Json&) {
  Interrupted engine;
  native::KVCache cache(engine);
  cache.cancelled = &engine.cancelled;
  try {
    cache.feed(std::vector<Token>(10, 1), 1);
    return differs("cancelled", "a whole prompt read", "two passes");
  } catch (const native::Cancelled&) {
    return same("cancelled", std::uint64_t{cache.length}, std::uint64_t{8});
  }
}

const Registered kEngine("engine", check_engine);
const Registered kCancel("cancel", check_cancel);

}  // namespace

}  // namespace specrt::checks
