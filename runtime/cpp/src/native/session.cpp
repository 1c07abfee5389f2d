#include "native/session.hpp"

#include <algorithm>
#include <utility>

#include "native/generation.hpp"

namespace specrt::native {

Session::Session(std::shared_ptr<LoadedBundle> shared)
    : shared_(std::move(shared)),
      target_engine_(shared_->models.target->engine()),
      draft_engine_(shared_->models.draft ? shared_->models.draft->engine_beside(*target_engine_)
                                          : nullptr),
      target_(*target_engine_),
      draft_(draft_engine_ ? std::make_unique<KVCache>(*draft_engine_) : nullptr),
      drafters_(shared_->bundle.manifest.gammas, shared_->costs()) {
  ++shared_->sessions;
}

std::unique_ptr<Run> Session::begin(const Prompt& prompt, const Params& params) {
  return std::make_unique<Generation>(*this, prompt_tokens(prompt, params.parse_special), params);
}

std::vector<Token> Session::prompt_tokens(const Prompt& prompt, bool parse_special) const {
  const auto* const text = std::get_if<std::string>(&prompt);
  std::vector<Token> tokens = text != nullptr
                                  ? shared_->tokenizer.encode(*text, true, parse_special)
                                  : std::get<std::vector<Token>>(prompt);
  const Token vocabulary = target_engine_->geometry().vocab_size;
  if (tokens.empty()) {
    throw Failure(SPECRT_INVALID_ARGUMENT, "the prompt has no tokens; give at least one");
  }
  for (const Token token : tokens) {
    if (token < 0 || token >= vocabulary) {
      throw Failure(SPECRT_INVALID_ARGUMENT, "token id " + std::to_string(token) +
                                                 " is not in the vocabulary of 0 to " +
                                                 std::to_string(vocabulary - 1));
    }
  }
  if (tokens.size() > target_engine_->max_length()) {
    throw Failure(SPECRT_CAPACITY, "the prompt has " + std::to_string(tokens.size()) +
                                       " tokens, and the context of this bundle is " +
                                       std::to_string(target_engine_->max_length()) +
                                       "; shorten the prompt, or build with a larger `max_length`");
  }
  return tokens;
}

std::size_t Session::take(const std::vector<Token>& prompt, bool fresh) {
  const auto parted = std::mismatch(held_.begin(), held_.end(), prompt.begin(), prompt.end());
  const auto common = static_cast<std::size_t>(parted.first - held_.begin());
  const std::size_t most =
      fresh || !shared_->prompt_cache ? 0 : std::min(common, prompt.size() - 1);
  target_.keep(most);
  if (draft_) draft_->keep(most);
  return target_.length;
}

void Session::release(std::vector<Token> tokens, bool sound) noexcept {
  if (sound) {
    held_ = std::move(tokens);
  } else {
    held_.clear();
  }
}

}  // namespace specrt::native
