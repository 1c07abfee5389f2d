#include "native/generation.hpp"

#include <algorithm>
#include <random>

#include "native/clock.hpp"

namespace specrt::native {

namespace {

// A seed of 48 bits, which every JSON reader holds exactly.
std::int64_t drawn_seed() {
  std::random_device device;
  const std::uint64_t bits = static_cast<std::uint64_t>(device()) << 32 | device();
  return static_cast<std::int64_t>(bits & 0xFFFFFFFFFFFFU);
}

std::unique_ptr<Rules> rules_for(const Params& params, const Opened& opened) {
  const auto spell = [&](const std::string& word) { return opened.tokenizer.encode(word, false); };
  return rules_of(params, spell, opened.bundle.manifest.eos_token_ids,
                  static_cast<std::size_t>(opened.bundle.manifest.target.geometry.vocab_size));
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
      rules_(rules_for(params, *session.opened_)),
      target_(session.target_, params_, noise_, rules_.get()),
      reader_(completion_, params_, session.opened_->bundle.manifest.eos_token_ids,
              session.opened_->tokenizer) {
  const Opened& opened = *session.opened_;
  require_text(params_, opened.tokenizer);
  completion_.began_ns = now_ns();
  completion_.gamma = opened.gamma_of(params_);
  completion_.drafter = opened.drafter_of(params_);
  if (params_.drafter.empty()) {
    completion_.fallback = opened.models.absent;
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

std::string Generation::json() {
  note_cancelled();
  return completion_.json(session_.opened_->tokenizer);
}

void Generation::note_cancelled() {
  if (is_cancelled() && completion_.finish_reason.empty()) {
    completion_.finish_reason = "cancelled";
  }
}

std::unique_ptr<Drafter> Generation::drafter() {
  Drafting asked;
  asked.drafter = completion_.drafter;
  asked.gamma = completion_.gamma;
  asked.params = &params_;
  asked.noise = &noise_;
  asked.rules = rules_.get();
  asked.draft = session_.draft_.get();
  const auto known = [](const Engine& engine) {
    return static_cast<std::size_t>(engine.geometry().vocab_size);
  };
  asked.vocabulary = known(*session_.target_engine_);
  if (session_.draft_engine_) {
    asked.vocabulary = std::min(asked.vocabulary, known(*session_.draft_engine_));
  }
  return session_.drafters_.make(asked);
}

bool Generation::next(Chunk& chunk) {
  try {
    while (chunks_.empty() && rounds_) {
      session_.target_.check_wanted();
      completion_.cached_tokens = cached_;
      Round round = rounds_->next();
      session_.target_.check_wanted();  // what a pass brought meanwhile is nobody's
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
  chunks_.push_back(reader_.take(round, now_ns()));
  if (completion_.finish_reason.empty() && tokens_.size() >= limit_) {
    std::optional<Chunk> rest = reader_.finish();
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
    completion_.fallback =
        session_.drafters_
            .fallback(completion_.drafter, completion_.gamma, params_, rules_ != nullptr)
            .value_or("");
  }
}

}  // namespace specrt::native
