// Policies, and drafters over an engine that answers as Python's did.
#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>

#include "native/answers.hpp"
#include "native/speculation/gamma.hpp"
#include "native/speculation/ngram.hpp"
#include "native/speculation/pool.hpp"

namespace specrt::checks {

namespace {

using native::DraftDecision;
using Numbers = std::vector<double>;

// Leaves what the passes of a draft in Python left, where it is asked the same.
class Recorded : public native::Engine {
 public:
  explicit Recorded(const Json& fields)
      : passes_(fields.at("passes").items()), width_(get<std::size_t>(fields, "width")) {
    geometry_.vocab_size = get<int>(fields, "vocabulary");
  }

  native::Output forward(const Token* tokens, std::size_t width, std::size_t start,
                         std::size_t rows) override {
    const Json& pass = passes_.at(count++);
    cancelled = count == 2;
    if (tokens_of(pass, "tokens") != std::vector<Token>(tokens, tokens + width) ||
        get<std::size_t>(pass, "start") != start || rows != 1)
      throw std::runtime_error("pass " + std::to_string(count) + " is another than in Python");
    row_ = get<std::vector<float>>(pass, "scores");
    best_ = get<Token>(pass, "best");
    confidence_ = get<std::vector<float>>(pass, "confidence");
    return {&best_, row_.data(), confidence_.empty() ? nullptr : confidence_.data(), 1,
            row_.size()};
  }

  const native::Geometry& geometry() const override { return geometry_; }
  std::size_t max_length() const override { return 512; }
  std::size_t max_width() const override { return width_; }

  std::size_t count = 0;               // of passes so far
  std::atomic<bool> cancelled{false};  // by another thread, in the second pass

 private:
  const std::vector<Json>& passes_;
  std::size_t width_;
  native::Geometry geometry_;
  std::vector<float> row_, confidence_;
  Token best_ = 0;
};

// Drafts so far, and leaves out what follows too little; the one in tests/cpp/drafting.py.
class Cautious : public native::GammaPolicy {
 public:
  explicit Cautious(const Json& call)
      : most_(get<int>(call, "most")),
        drop_(get<double>(call, "drop")),
        last_(get<double>(call, "last")) {}
  int choose() override { return most_; }
  DraftDecision decide(int, double confidence) override {
    if (confidence < drop_) return DraftDecision::kDiscard;
    return confidence < last_ ? DraftDecision::kStop : DraftDecision::kContinue;
  }
  void observe(const native::Round&) override {}

 private:
  int most_;
  double drop_, last_;
};

native::Costs costs_of(const Json& fields) {
  return {get<Numbers>(fields, "verify"), get<Numbers>(fields, "draft"),
          get<double>(fields, "outside"), get<bool>(fields, "assumed"), false};
}

// The gamma that a policy comes to among those built, and what becomes of each drafted token.
std::string built(const Json& call) {
  native::BuiltGamma policy(std::make_shared<Cautious>(call),
                            get<std::vector<int>>(call, "gammas"));
  std::vector<int> answer{policy.choose()};
  int drafted = 0;
  for (const double confidence : get<Numbers>(call, "confidences"))
    answer.push_back(static_cast<int>(policy.decide(++drafted, confidence)));
  return json(answer);
}

std::string told(const native::Proposal& made, std::size_t held) {
  std::vector<std::string> drawn_from;
  for (const auto& [ids, probs] : made.distributions)
    drawn_from.push_back(object({{"ids", json(ids)}, {"probs", json(probs)}}));
  return object({{"tokens", json(made.tokens)},
                 {"confidences", json(made.confidences)},
                 {"source", json(made.source)},
                 {"caught_up", json(made.caught_up)},
                 {"drawn_from", list(drawn_from)},
                 {"held", json(held)}});
}

// What lookup copies of a text that grows, and now and then is another one.
std::string copies(const Json& call) {
  native::NgramDrafter drafter(std::make_shared<Cautious>(call));
  std::vector<std::string> answers;
  for (const Json& step : call.at("steps").items())
    answers.push_back(
        told(drafter.propose(tokens_of(step, "text"), get<std::size_t>(step, "room")), 0));
  return list(answers);
}

// A round of a drafter, of which what became of it is known.
std::string round(native::Drafter& drafter, const native::KVCache& cache,
                  std::vector<Token>& tokens, const Json& step) {
  const auto made = drafter.propose(tokens, get<std::size_t>(step, "room"));
  native::Round round;
  round.drafted = made.tokens.size();
  round.accepted = std::min(get<std::size_t>(step, "accepted"), round.drafted);
  const auto kept = made.tokens.begin() + static_cast<std::ptrdiff_t>(round.accepted);
  round.tokens.assign(made.tokens.begin(), kept);
  round.tokens.push_back(get<Token>(step, "next"));
  tokens.insert(tokens.end(), round.tokens.begin(), round.tokens.end());
  round.draft_ns = get<std::int64_t>(step, "draft_ns");
  round.verify_ns = get<std::int64_t>(step, "verify_ns");
  round.source = made.source;
  round.confidences = made.confidences;
  round.caught_up = made.caught_up;
  drafter.observe(tokens, round);
  return told(made, cache.length);
}

// The generations of one session: what every round proposes, and how many passes the draft made.
std::string session(const Json& call) {
  Recorded engine(call.at("engine"));
  native::DrafterPool drafters(get<std::vector<int>>(call, "gammas"), costs_of(call.at("costs")));
  const Params params = params_of(call.at("params"));
  const auto vocabulary = get<std::size_t>(call, "vocabulary");
  std::vector<std::string> answers;
  std::uint64_t number = 0;
  for (const Json& generation : call.at("generations").items()) {
    const native::Noise noise(get<std::uint64_t>(call, "seed"), number++);
    const auto rules = native::build_processors(params, nullptr, {}, vocabulary);
    native::KVCache cache(engine);
    native::Drafting drafting;
    drafting.drafter = get<std::string>(call, "drafter");
    drafting.gamma = get<int>(call, "gamma");
    drafting.params = &params;
    drafting.noise = &noise;
    drafting.processors = rules.get();
    drafting.draft = &cache;
    drafting.vocabulary = std::min(vocabulary, get<std::size_t>(call.at("engine"), "vocabulary"));
    const auto drafter = drafters.make(drafting);
    std::vector<Token> tokens = tokens_of(generation, "prompt");
    for (const Json& step : generation.at("steps").items()) {
      const auto add = tokens_of(step, "add");  // of rounds that the drafter has no part in
      tokens.insert(tokens.end(), add.begin(), add.end());
      if (add.empty()) answers.push_back(round(*drafter, cache, tokens, step));
    }
  }
  return object({{"rounds", list(answers)}, {"passes", json(engine.count)}});
}

// How much of a prompt counts that was cancelled in its second pass.
std::string cancelled(const Json& call) {
  Recorded engine(call.at("engine"));
  native::KVCache cache(engine);
  cache.cancelled = &engine.cancelled;
  try {
    cache.feed(tokens_of(call, "tokens"), 1);
    return "null";
  } catch (const native::Cancelled&) {
    return json(cache.length);
  }
}

const Registered kDrafting(
    {{"built", built}, {"copies", copies}, {"session", session}, {"cancelled", cancelled}});

}  // namespace

}  // namespace specrt::checks
