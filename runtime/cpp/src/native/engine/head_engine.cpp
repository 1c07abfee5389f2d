#include "native/engine/head_engine.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "failure.hpp"

namespace specrt::native {

Output Engine::forward_recursive(Token, std::size_t) {
  throw Failure(SPECRT_ENGINE, "an engine that is not a head was to go on from a state of its own");
}

HeadEngine::HeadEngine(std::unique_ptr<Engine> engine, const Engine& target, std::size_t features)
    : engine_(std::move(engine)), target_(target), features_(features), state_(features) {}

Output HeadEngine::forward(const Token* tokens, std::size_t width, std::size_t start,
                           std::size_t rows) {
  if (start == 0 && width > 1) {
    ++tokens;
    --width;
    start = 1;
  }
  // A first token that comes alone stands where the second one will, until that is fed.
  const std::size_t first = std::max<std::size_t>(start, 1) - 1;
  return pass(tokens, width, first, std::min(rows, width), target_.features() + first * features_);
}

Output HeadEngine::forward_recursive(Token token, std::size_t start) {
  return pass(&token, 1, start - 1, 1, state_.data());
}

Output HeadEngine::pass(const Token* tokens, std::size_t width, std::size_t start, std::size_t rows,
                        const float* hidden) {
  if (width <= max_width() && start <= max_length() && width <= max_length() - start)
    std::copy(hidden, hidden + width * features_, engine_->hidden());  // else it is refused below
  const Output output = engine_->forward(tokens, width, start, rows);
  const float* const last = output.state + (output.rows - 1) * features_;
  state_.assign(last, last + features_);
  return output;
}

}  // namespace specrt::native
