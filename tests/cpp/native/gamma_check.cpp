#include <algorithm>
#include <cmath>
#include <memory>

#include "native/check.hpp"
#include "native/drafting.hpp"
#include "native/numbers.hpp"
#include "native/speculation/auto_gamma.hpp"

namespace specrt::checks {

using native::AutoGamma;
using native::DraftDecision;
using native::Json;

constexpr int kLargest = 8;

namespace {

// Chooses one gamma, and ends every draft at one place.
class Script : public native::GammaPolicy {
 public:
  Script(int chosen, int stop, DraftDecision end) : chosen_(chosen), stop_(stop), end_(end) {}
  int choose() override { return chosen_; }
  DraftDecision decide(int drafted, double) override {
    return drafted >= stop_ ? end_ : DraftDecision::kContinue;
  }
  void observe(const native::Round&) override {}

 private:
  int chosen_, stop_;
  DraftDecision end_;
};

// A text of which is known what is drafted along it, and the machine it runs on.
struct Trace {
  explicit Trace(const Json& fields)
      : costs(costs_of(fields.at("costs"))), jitter(numbers_of(fields.at("jitter"))) {
    for (const Token count : tokens_of(fields.at("right")))
      right.push_back(static_cast<int>(count));
    for (const Json& row : fields.at("confidence").items()) confidence.push_back(numbers_of(row));
  }

  std::int64_t timed(double ns, std::size_t pass) const {
    return std::llround(ns * jitter[pass % jitter.size()]);
  }

  native::Costs costs;
  std::vector<double> jitter;
  std::vector<int> right;
  std::vector<std::vector<double>> confidence;
};

}  // namespace

// Tokens per second of a policy on a text; -1 where it breaks the protocol.
static double rate_of(AutoGamma& policy, const Trace& trace) {
  double spent = 0;
  std::size_t position = 0;
  for (std::size_t number = 0; position + kLargest < trace.right.size(); ++number) {
    const auto& proposed = trace.confidence[position];
    const int chosen = policy.choose();
    if (chosen < 0 || chosen > kLargest) return -1;
    const int most = std::min(chosen, static_cast<int>(proposed.size()));
    int steps = 0, kept = 0;
    DraftDecision weight = DraftDecision::kContinue;
    while (steps < most && weight == DraftDecision::kContinue) {
      weight = policy.decide(steps + 1, proposed[static_cast<std::size_t>(steps)]);
      ++steps;
      if (weight != DraftDecision::kDiscard) kept = steps;
    }
    native::Round round;
    round.drafted = static_cast<std::size_t>(kept);
    round.accepted = static_cast<std::size_t>(std::min(kept, trace.right[position]));
    round.tokens.resize(round.accepted + 1);
    const double draft_ns = trace.costs.draft(steps), verify_ns = trace.costs.verify(kept);
    round.draft_ns = trace.timed(draft_ns, 2 * number);
    round.verify_ns = trace.timed(verify_ns, 2 * number + 1);
    policy.observe(round);
    spent += draft_ns + verify_ns + trace.costs.outside_ns;
    position += round.tokens.size();
  }
  return static_cast<double>(position) / spent * 1e9;
}

static int check_built(const Json& fields) {
  std::vector<int> gammas;
  for (const Token gamma : tokens_of(fields.at("gammas")))
    gammas.push_back(static_cast<int>(gamma));
  const auto whole = [&fields](const char* name) {
    return static_cast<int>(fields.at(name).integer());
  };
  const DraftDecision end = whole("discards") ? DraftDecision::kDiscard : DraftDecision::kStop;
  native::BuiltGamma built(std::make_shared<Script>(whole("chosen"), whole("stop"), end), gammas);
  int wrong = same("built: gamma", Token{built.choose()}, fields.at("gamma").integer());
  int drafted = 0;
  for (const Token expected : tokens_of(fields.at("decisions"))) {
    const auto found = static_cast<Token>(built.decide(++drafted, 0.5));
    wrong += same("built: decision " + std::to_string(drafted), found, expected);
  }
  return wrong;
}

int check_gamma(const Json& vectors) {
  int wrong = 0;
  for (const Json& fields : vectors.at("cases").items()) {
    AutoGamma policy(costs_of(fields.at("tuned")), kLargest);
    const double rate = rate_of(policy, Trace(fields)), least = fields.at("least").number();
    if (rate < least) wrong += differs(fields.at("name").text(), shown(rate), shown(least));
  }
  for (const Json& fields : vectors.at("built").items()) wrong += check_built(fields);
  return wrong;
}

static const Registered kRegistered("gamma", check_gamma);

}  // namespace specrt::checks
