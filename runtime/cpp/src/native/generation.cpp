#include "native/generation.hpp"

#include <algorithm>
#include <random>

#include "native/speculation/round.hpp"

namespace specrt::native {

OutputProcessor::OutputProcessor(Completion& completion, const Params& params,
                                 const std::vector<Token>& eos, const Tokenizer& tokenizer,
                                 const std::vector<Token>& prompt)
    : completion_(completion),
      ends_(params.stop_token_ids.begin(), params.stop_token_ids.end()),
      eos_(eos.begin(), eos.end()),
      detokenizer_(tokenizer.detokenizer(prompt)),
      stops_(params.stop),
      one_by_one_(!params.stop.empty()) {
  if (!params.ignore_eos) {
    ends_.insert(eos.begin(), eos.end());
  }
}

Chunk OutputProcessor::take(const Round& round, std::int64_t time_ns) {
  Chunk chunk;
  const std::size_t delivered = cut(round.tokens, chunk.text);
  completion_.count(round, delivered, time_ns);
  chunk.ids.assign(round.tokens.begin(),
                   round.tokens.begin() + static_cast<std::ptrdiff_t>(delivered));
  chunk.accepted = std::min(round.accepted, delivered);
  completion_.ids.insert(completion_.ids.end(), chunk.ids.begin(), chunk.ids.end());
  completion_.text += chunk.text;
  if (completion_.wants_logprobs) {
    completion_.logprobs.insert(completion_.logprobs.end(), round.logprobs.begin(),
                                round.logprobs.begin() + static_cast<std::ptrdiff_t>(delivered));
  }
  return chunk;
}

std::optional<Chunk> OutputProcessor::finish() {
  completion_.finish_reason = "length";
  Chunk rest;
  show(detokenizer_->finish(), rest.text);
  rest.text += stops_.finish();
  completion_.text += rest.text;
  return rest.text.empty() ? std::nullopt : std::optional<Chunk>(std::move(rest));
}

// Return how many tokens to deliver, and add the text that became certain.
std::size_t OutputProcessor::cut(const std::vector<Token>& tokens, std::string& text) {
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
bool OutputProcessor::show(const std::string& text, std::string& shown) {
  StopStrings::Shown result = stops_.push(text);
  shown += result.text;
  if (!result.met) {
    return false;
  }
  completion_.finish_reason = "stop";
  completion_.stop_string = std::move(result.met);
  return true;
}

namespace {

// A seed of 48 bits, which every JSON reader holds exactly.
std::int64_t drawn_seed() {
  std::random_device device;
  const std::uint64_t bits = static_cast<std::uint64_t>(device()) << 32 | device();
  return static_cast<std::int64_t>(bits & 0xFFFFFFFFFFFFU);
}

std::unique_ptr<LogitsProcessors> processors_for(const Params& params, const LoadedBundle& shared) {
  const auto spell = [&](const std::string& word, bool middle) {
    return middle ? shared.tokenizer.encode_middle(word) : shared.tokenizer.encode(word, false);
  };
  return build_processors(
      params, spell, shared.bundle.manifest.eos_token_ids,
      static_cast<std::size_t>(shared.bundle.manifest.target.geometry.vocab_size));
}

void require_text(const Params& params, const Tokenizer& tokenizer) {
  if (!params.stop.empty() && !tokenizer.decodes()) {
    throw Failure(SPECRT_UNSUPPORTED,
                  "stop strings were given, and this library makes no text of this bundle's "
                  "tokens: open with the path of a tokenizer library, or give stop_token_ids");
  }
}

}  // namespace

Generation::Generation(Session& session, std::vector<Token> prompt, const Params& params)
    : session_(session),
      params_(params),
      tokens_(std::move(prompt)),
      noise_(0),
      processors_(processors_for(params, *session.shared_)),
      target_(session.target_, params_, noise_, processors_.get()),
      output_(completion_, params_, session.shared_->bundle.manifest.eos_token_ids,
              session.shared_->tokenizer, tokens_) {
  const LoadedBundle& shared = *session.shared_;
  require_text(params_, shared.tokenizer);
  completion_.began_ns = now_ns();
  completion_.gamma = shared.gamma_of(params_);
  completion_.drafter = shared.drafter_of(params_);
  if (params_.drafter.empty()) {
    completion_.fallback = shared.models.absent;
  }
  completion_.seed = params_.seed ? *params_.seed : drawn_seed();
  noise_ = Noise(static_cast<std::uint64_t>(completion_.seed));
  completion_.prompt_tokens = tokens_.size();
  completion_.wants_logprobs = params_.logprobs.has_value();
  drafter_ = drafter();
  cached_ = session.take(tokens_, params_.prompt_logprobs.has_value());
  // The last token is never fed, so one more than fits the buffers can be committed.
  limit_ = std::min(tokens_.size() + static_cast<std::size_t>(params_.max_tokens),
                    session.target_engine_->max_length() + 1);
  rounds_ = std::make_unique<Speculation>(target_, *drafter_, tokens_, limit_,
                                          params_.prompt_logprobs.has_value());
  session.target_.cancelled = &cancelled_;
  if (session.draft_) {
    session.draft_->cancelled = &cancelled_;
  }
}

Generation::~Generation() { let_go(true); }

std::vector<Logprobs> Generation::logprobs(bool of_prompt) {
  return of_prompt ? told(completion_.prompt_logprobs.value_or(std::vector<Ranked>()))
                   : told(completion_.logprobs);
}

std::string Generation::json() {
  note_cancelled();
  return completion_.json(session_.shared_->tokenizer);
}

void Generation::note_cancelled() {
  if (is_cancelled() && completion_.finish_reason.empty()) {
    completion_.finish_reason = "cancelled";
  }
}

std::unique_ptr<Drafter> Generation::drafter() {
  Drafting drafting;
  drafting.drafter = completion_.drafter;
  drafting.gamma = completion_.gamma;
  drafting.params = &params_;
  drafting.noise = &noise_;
  drafting.processors = processors_.get();
  drafting.draft = session_.draft_.get();
  const auto known = [](const Engine& engine) {
    return static_cast<std::size_t>(engine.geometry().vocab_size);
  };
  const Manifest& manifest = session_.shared_->bundle.manifest;
  drafting.head = manifest.draft && !manifest.draft->kind.empty();
  drafting.max_gamma = static_cast<std::size_t>(manifest.gammas.back());
  drafting.vocabulary = known(*session_.target_engine_);
  if (session_.draft_engine_) {
    drafting.vocabulary = std::min(drafting.vocabulary, known(*session_.draft_engine_));
  }
  return session_.drafters_.make(drafting);
}

bool Generation::next(Chunk& chunk) {
  try {
    while (chunks_.empty() && rounds_) {
      session_.target_.check_wanted();
      completion_.cached_tokens = cached_;
      Round round = rounds_->next();
      session_.target_.check_wanted();  // results of a cancelled pass are dropped
      deliver(std::move(round));
    }
  } catch (const Cancelled&) {
    note_cancelled();
    end(true);
    return false;
  } catch (...) {
    end(false);
    throw;
  }
  if (chunks_.empty()) {
    return false;
  }
  chunk = std::move(chunks_.front());
  chunks_.pop_front();
  return true;
}

void Generation::deliver(Round round) {
  const bool first = completion_.arrivals.empty();
  if (first && params_.prompt_logprobs) {
    completion_.prompt_logprobs = std::move(round.prompt_logprobs);
  }
  chunks_.push_back(output_.take(round, now_ns()));
  if (completion_.finish_reason.empty() && tokens_.size() >= limit_) {
    std::optional<Chunk> rest = output_.finish();
    if (rest) {
      chunks_.push_back(std::move(*rest));
    }
  }
  if (!completion_.finish_reason.empty()) {
    end(true);
  }
}

// Leave the session to the next generation.
void Generation::let_go(bool sound) noexcept {
  if (!rounds_) {
    return;
  }
  rounds_.reset();
  session_.target_.cancelled = nullptr;
  if (session_.draft_) {
    session_.draft_->cancelled = nullptr;
  }
  session_.release(std::move(tokens_), sound);
}

void Generation::end(bool sound) {
  let_go(sound);
  if (completion_.fallback.empty()) {
    completion_.fallback = session_.drafters_
                               .fallback(completion_.drafter, completion_.gamma, params_,
                                         processors_ != nullptr, completion_.drafted > 0)
                               .value_or("");
  }
}

}  // namespace specrt::native
