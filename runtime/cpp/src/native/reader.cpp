#include "native/reader.hpp"

#include <algorithm>

namespace specrt::native {

Reader::Reader(Completion& completion, const Params& params, const std::vector<Token>& eos,
               const Tokenizer& tokenizer)
    : completion_(completion),
      ends_(params.stop_token_ids.begin(), params.stop_token_ids.end()),
      eos_(eos.begin(), eos.end()),
      detokenizer_(tokenizer.detokenizer()),
      stops_(params.stop),
      one_by_one_(!params.stop.empty() || tokenizer.falls_back_to_bytes()) {
  if (!params.ignore_eos) {
    ends_.insert(eos.begin(), eos.end());
  }
}

Chunk Reader::take(const Round& round, std::int64_t time_ns) {
  Chunk chunk;
  const std::size_t kept = cut(round.tokens, chunk.text);
  completion_.count(round, kept, time_ns);
  chunk.ids.assign(round.tokens.begin(), round.tokens.begin() + static_cast<std::ptrdiff_t>(kept));
  chunk.accepted = std::min(round.accepted, kept);
  completion_.ids.insert(completion_.ids.end(), chunk.ids.begin(), chunk.ids.end());
  completion_.text += chunk.text;
  if (completion_.wants_logprobs) {
    completion_.logprobs.insert(completion_.logprobs.end(), round.logprobs.begin(),
                                round.logprobs.begin() + static_cast<std::ptrdiff_t>(kept));
  }
  return chunk;
}

std::optional<Chunk> Reader::finish() {
  completion_.finish_reason = "length";
  Chunk rest;
  show(detokenizer_->finish(), rest.text);
  rest.text += stops_.finish();
  completion_.text += rest.text;
  return rest.text.empty() ? std::nullopt : std::optional<Chunk>(std::move(rest));
}

// Return how many tokens to deliver, and add the text that became certain.
std::size_t Reader::cut(const std::vector<Token>& tokens, std::string& text) {
  const auto end = std::find_if(tokens.begin(), tokens.end(),
                                [this](Token token) { return ends_.count(token) != 0; });
  const auto body = static_cast<std::size_t>(end - tokens.begin());
  const std::size_t step = one_by_one_ ? 1 : std::max<std::size_t>(body, 1);
  for (std::size_t at = 0; at < body; at += step) {
    if (show(detokenizer_->push(tokens.data() + at, step), text)) {
      return at + 1;
    }
  }
  if (end == tokens.end()) {
    return body;
  }
  if (!show(detokenizer_->finish(), text)) {
    text += stops_.finish();
    completion_.finish_reason = "stop";
    if (eos_.count(*end) == 0) {
      completion_.stop_token = *end;
    }
  }
  return body + 1;
}

// Add what may be shown of a text; return whether a stop string ended it.
bool Reader::show(const std::string& text, std::string& shown) {
  StopStrings::Shown found = stops_.push(text);
  shown += found.text;
  if (!found.met) {
    return false;
  }
  completion_.finish_reason = "stop";
  completion_.stop_string = std::move(found.met);
  return true;
}

}  // namespace specrt::native
