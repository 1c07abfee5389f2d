// A policy among the gammas that were built.
#include <memory>

#include "native/answers.hpp"
#include "native/speculation/gamma.hpp"

namespace specrt::checks {

namespace {

using native::DraftDecision;

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

// The gamma that a policy comes to among those built, and what becomes of each drafted token.
std::string built(const Json& call) {
  native::BuiltGamma policy(std::make_shared<Cautious>(call),
                            get<std::vector<int>>(call, "gammas"));
  std::vector<int> answer{policy.choose()};
  int drafted = 0;
  for (const double confidence : get<std::vector<double>>(call, "confidences"))
    answer.push_back(static_cast<int>(policy.decide(++drafted, confidence)));
  return json(answer);
}

const Registered kDrafting({{"built", built}});

}  // namespace

}  // namespace specrt::checks
