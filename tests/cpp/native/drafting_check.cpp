#include <algorithm>
#include <limits>
#include <optional>

#include "native/check.hpp"
#include "native/drafting.hpp"
#include "native/numbers.hpp"
#include "native/speculation/ngram.hpp"
#include "native/speculation/pool.hpp"

namespace specrt::checks {

using native::DraftDecision;
using native::Json;

namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;
constexpr std::size_t kTarget = 29;  // how many ids the target knows

// Scores by the latest three tokens that its buffer holds; the one in tests/cpp/drafting.py.
class HashEngine : public native::Engine {
 public:
  explicit HashEngine(const Json& fields)
      : width_(size_of(fields.at("width"))),
        sure_(fields.at("sure").boolean()),
        broken_(fields.at("broken").boolean()),
        buffer_(512) {
    geometry_.vocab_size = static_cast<int>(fields.at("vocabulary").integer());
    row_.resize(static_cast<std::size_t>(geometry_.vocab_size));
  }

  native::Output forward(const Token* tokens, std::size_t width, std::size_t start,
                         std::size_t rows) override {
    for (const std::size_t asked : {start, width, rows}) calls.push_back(static_cast<Token>(asked));
    for (std::size_t i = 0; i < width; ++i) buffer_.at(start + i) = tokens[i];
    const std::size_t end = start + width;
    std::uint64_t key = 7;
    for (std::size_t i = end > 3 ? end - 3 : 0; i < end; ++i)
      key = mix(key + kGolden * (static_cast<std::uint64_t>(buffer_[i]) + 1));
    score(key);
    return {&best_, row_.data(), sure_ ? &confidence_ : nullptr, 1, row_.size()};
  }

  const native::Geometry& geometry() const override { return geometry_; }
  std::size_t max_length() const override { return buffer_.size(); }
  std::size_t max_width() const override { return width_; }
  std::size_t vocabulary() const { return row_.size(); }

  std::vector<Token> calls;  // start, width and rows of every pass

 private:
  void score(std::uint64_t key) {
    best_ = 0;
    for (std::size_t i = 0; i < row_.size(); ++i) {
      row_[i] = static_cast<float>(mix(key + kGolden * (i + 1)) >> 52) / 512.0f;
      if (row_[i] > row_[static_cast<std::size_t>(best_)]) best_ = static_cast<Token>(i);
    }
    if (broken_ && key % 13 == 0) {
      row_[key % row_.size()] = std::numeric_limits<float>::quiet_NaN();
      best_ = -1;
    }
    confidence_ = static_cast<float>((key >> 40) + 1) / 16777216.0f;
  }

  native::Geometry geometry_;
  std::size_t width_;
  bool sure_, broken_;
  std::vector<Token> buffer_;
  std::vector<float> row_;
  Token best_ = 0;
  float confidence_ = 0;
};

// Drafts so far, and leaves out what follows too little; the one in tests/cpp/drafting.py.
class Cautious : public native::GammaPolicy {
 public:
  Cautious(int most, double drop, double last) : most_(most), drop_(drop), last_(last) {}
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

}  // namespace

static int check_costs(const Json& vectors) {
  int wrong = 0;
  for (const Json& fields : vectors.at("cases").items()) {
    std::vector<std::pair<int, double>> measured;
    for (const Json& pair : fields.at("measured").items())
      measured.emplace_back(static_cast<int>(pair.items()[0].integer()), pair.items()[1].number());
    const int most = static_cast<int>(fields.at("most").integer());
    wrong += equal("costs between", native::costs_between(measured, most), fields.at("costs"));
  }
  return wrong;
}

static int check_suffixes(const Json& fields) {
  native::Suffixes suffixes(size_of(fields.at("least")), size_of(fields.at("most")));
  const auto tokens = tokens_of(fields.at("tokens"));
  int wrong = 0;
  for (std::size_t i = 0; i < tokens.size() && wrong == 0; ++i) {
    suffixes.append(tokens[i]);
    std::vector<Token> found;
    if (const auto& match = suffixes.longest())
      found = {static_cast<Token>(match->length), static_cast<Token>(match->end)};
    wrong += same("match after " + std::to_string(i + 1), found,
                  tokens_of(fields.at("matches").items()[i]));
  }
  return wrong;
}

static int check_copies(const Json& fields) {
  native::NgramDrafter drafter(
      std::make_shared<Cautious>(static_cast<int>(fields.at("most").integer()),
                                 fields.at("drop").number(), fields.at("last").number()));
  std::vector<Token> tokens;
  int wrong = 0;
  for (const Json& step : fields.at("steps").items()) {
    tokens.resize(size_of(step.at("keep")));
    for (const Token token : tokens_of(step.at("add"))) tokens.push_back(token);
    const auto made = drafter.propose(tokens, size_of(step.at("room")));
    wrong += same("copied", made.tokens, tokens_of(step.at("tokens"))) +
             equal("confidence", made.confidences, step.at("confidences"));
    wrong += same("source", made.source, step.at("source").text());
    if (wrong > 0) break;
    const auto kept = static_cast<std::ptrdiff_t>(size_of(step.at("kept")));
    tokens.insert(tokens.end(), made.tokens.begin(), made.tokens.begin() + kept);
  }
  return wrong;
}

static int check_ngram(const Json& vectors) {
  int wrong = 0;
  for (const Json& fields : vectors.at("suffixes").items()) wrong += check_suffixes(fields);
  for (const Json& fields : vectors.at("drafts").items()) wrong += check_copies(fields);
  return wrong;
}

static int check_proposal(const std::string& name, const native::Proposal& made, const Json& step) {
  int wrong = same(name + ": tokens", made.tokens, tokens_of(step.at("tokens"))) +
              same(name + ": caught up", Token{made.caught_up}, step.at("caught_up").boolean());
  wrong += same(name + ": source", made.source, step.at("source").text());
  const auto confidences = numbers_of(step.at("confidences"));
  wrong += same(name + ": confidences", made.confidences.size(), confidences.size());
  const auto& drawn_from = step.at("drawn_from").items();
  wrong += same(name + ": distributions", made.distributions.size(), drawn_from.size());
  if (wrong > 0) return wrong;
  for (std::size_t i = 0; i < confidences.size(); ++i)
    wrong += close(name + ": confidence", made.confidences[i], confidences[i]);
  for (std::size_t i = 0; i < drawn_from.size(); ++i) {
    const auto& found = made.distributions[i];
    const auto expected = distribution_of(drawn_from[i]);
    const int differ = same(name + ": may come", found.ids, expected.ids);
    for (std::size_t k = 0; differ == 0 && k < expected.ids.size(); ++k)
      wrong += close(name + ": how likely", found.probs[k], expected.probs[k]);
    wrong += differ;
  }
  return wrong;
}

static int check_step(const std::string& name, native::Drafter& drafter,
                      const native::KVCache& cache, std::vector<Token>& tokens, const Json& step) {
  if (const Json* add = step.find("add")) {  // a round that the drafter has no part in
    for (const Token token : tokens_of(*add)) tokens.push_back(token);
    return 0;
  }
  const auto made = drafter.propose(tokens, size_of(step.at("room")));
  const int wrong = check_proposal(name, made, step);
  if (wrong > 0) return wrong;
  native::Round round;
  round.drafted = made.tokens.size();
  round.accepted = size_of(step.at("accepted"));
  const auto kept = made.tokens.begin() + static_cast<std::ptrdiff_t>(round.accepted);
  round.tokens.assign(made.tokens.begin(), kept);
  round.tokens.push_back(step.at("next").integer());
  tokens.insert(tokens.end(), round.tokens.begin(), round.tokens.end());
  const auto times = tokens_of(step.at("times"));
  round.draft_ns = times[0];
  round.verify_ns = times[1];
  round.source = made.source;
  round.confidences = made.confidences;
  round.caught_up = made.caught_up;
  drafter.observe(tokens, round);
  return same(name + ": held", cache.length, size_of(step.at("held")));
}

static int check_generation(const std::string& name, native::DrafterPool& drafters,
                            native::Drafting drafting, const Json& generation) {
  native::KVCache cache(*drafting.draft);
  const auto rules = native::build_processors(*drafting.params, nullptr, {}, kTarget);
  drafting.draft = &cache;
  drafting.processors = rules.get();
  const auto drafter = drafters.make(drafting);
  std::vector<Token> tokens = tokens_of(generation.at("prompt"));
  for (const Json& step : generation.at("steps").items()) {
    const int wrong = check_step(name, *drafter, cache, tokens, step);
    if (wrong > 0) return wrong;  // what follows differs too
  }
  return 0;
}

static int check_session(const Json& fields) {
  HashEngine engine(fields.at("engine"));
  native::KVCache empty(engine);
  native::DrafterPool drafters(ints_of(fields.at("gammas")),
                               [&fields] { return costs_of(fields); });
  const Params params = params_of(fields.at("params"));
  const auto seed = static_cast<std::uint64_t>(fields.at("seed").integer());
  std::uint64_t number = 0;
  for (const Json& generation : fields.at("generations").items()) {
    const std::string name = fields.at("name").text() + ", generation " + std::to_string(number);
    const native::Noise noise(seed, number++);
    native::Drafting drafting;
    drafting.drafter = fields.at("drafter").text();
    drafting.gamma = static_cast<int>(fields.at("gamma").integer());
    drafting.params = &params;
    drafting.noise = &noise;
    drafting.draft = &empty;
    drafting.vocabulary = std::min(kTarget, engine.vocabulary());
    const int wrong = check_generation(name, drafters, drafting, generation);
    if (wrong > 0) return wrong;
  }
  std::vector<Token> calls;
  for (const Json& call : fields.at("calls").items())
    for (const Token part : tokens_of(call)) calls.push_back(part);
  return same(fields.at("name").text() + ": passes", engine.calls, calls);
}

static int check_draft(const Json& vectors) {
  int wrong = 0;
  for (const Json& fields : vectors.at("cases").items()) wrong += check_session(fields);
  return wrong;
}

static const Registered kCosts("costs", check_costs);
static const Registered kNgram("ngram", check_ngram);
static const Registered kDraft("draft", check_draft);

}  // namespace specrt::checks
