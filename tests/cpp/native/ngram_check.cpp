#include <memory>

#include "native/check.hpp"
#include "native/drafting.hpp"
#include "native/numbers.hpp"
#include "native/speculation/ngram.hpp"

namespace specrt::checks {

using native::DraftDecision;
using native::Json;

namespace {

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

static int check_suffixes(const Json& fields) {
  native::Suffixes suffixes(size_of(fields.at("least")), size_of(fields.at("most")));
  const auto tokens = tokens_of(fields.at("tokens"));
  int wrong = 0;
  for (std::size_t i = 0; i < tokens.size() && wrong == 0; ++i) {
    suffixes.append(tokens[i]);
    std::vector<Token> found;
    if (const auto& match = suffixes.longest()) {
      found = {static_cast<Token>(match->length), static_cast<Token>(match->end)};
    }
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
    const std::string& source = step.at("source").text();
    if (made.source != source) wrong += differs("source", made.source, source);
    if (wrong > 0) break;
    const auto kept = static_cast<std::ptrdiff_t>(size_of(step.at("kept")));
    tokens.insert(tokens.end(), made.tokens.begin(), made.tokens.begin() + kept);
  }
  return wrong;
}

int check_ngram(const Json& vectors) {
  int wrong = 0;
  for (const Json& fields : vectors.at("suffixes").items()) wrong += check_suffixes(fields);
  for (const Json& fields : vectors.at("drafts").items()) wrong += check_copies(fields);
  return wrong;
}

static const Registered kRegistered("ngram", check_ngram);

}  // namespace specrt::checks
