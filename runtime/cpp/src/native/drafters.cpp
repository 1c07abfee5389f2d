#include <algorithm>
#include <iterator>
#include <utility>

#include "native/gamma.hpp"
#include "native/cascade.hpp"
#include "native/draft.hpp"
#include "native/model_drafter.hpp"
#include "native/ngram.hpp"

namespace specrt::native {

namespace {

// Proposes nothing: plain decoding.
class NoDrafter : public Drafter {
 public:
  Proposal propose(const std::vector<Token>&, std::size_t) override { return {}; }
  void observe(const std::vector<Token>&, const Round&) override {}
};

// How a request chooses tokens: what is accepted differs, and what a round costs.
struct Manner {
  bool greedy;
  bool ruled;  // whether the request's own processors edit scores

  bool operator<(const Manner& other) const {
    return std::pair(greedy, ruled) < std::pair(other.greedy, other.ruled);
  }
};

}  // namespace

// What the policies behind gamma `auto` learned is kept apart for each source and each manner of
// choosing tokens. A source is "model", "ngram", or "lookup", which is an n-gram before the model.
class Drafters::Policies {
 public:
  Policies(std::vector<int> gammas, std::function<Costs()> costs)
      : gammas_(std::move(gammas)), measure_(std::move(costs)) {}

  bool drafts() const { return gammas_.size() > 1; }

  std::shared_ptr<GammaPolicy> policy(const std::string& source, int gamma, Manner manner) {
    if (gamma != kAuto) return std::make_shared<FixedGamma>(gamma);
    auto policy = adaptive(source, manner);
    if (gammas_.size() == static_cast<std::size_t>(gammas_.back()) + 1) return policy;
    return std::make_shared<BuiltGamma>(std::move(policy), gammas_);
  }

  // Why a source drafts nothing; none where it drafts, or was never asked.
  std::optional<std::string> fallback(const std::string& source, Manner manner) const {
    const auto found = known_.find({source, manner});
    return found == known_.end() ? std::nullopt : found->second->fallback();
  }

 private:
  std::shared_ptr<AutoGamma> adaptive(const std::string& source, Manner manner) {
    const auto found = known_.find({source, manner});
    if (found != known_.end()) return found->second;
    if (!costs_) {
      costs_ = measure_();
      costs_->check();
    }
    Costs costs = *costs_;
    std::shared_ptr<const AutoGamma> rival;
    if (source != "model") std::fill(costs.draft_ns.begin(), costs.draft_ns.end(), 0.0);
    if (source == "lookup") rival = adaptive("model", manner);
    auto made = std::make_shared<AutoGamma>(costs, gammas_.back(), std::move(rival));
    known_[{source, manner}] = made;
    return made;
  }

  std::vector<int> gammas_;
  std::function<Costs()> measure_;
  std::optional<Costs> costs_;
  std::map<std::pair<std::string, Manner>, std::shared_ptr<AutoGamma>> known_;
};

Drafters::Drafters(std::vector<int> gammas, std::function<Costs()> costs)
    : policies_(std::make_unique<Policies>(std::move(gammas), std::move(costs))) {}

Drafters::~Drafters() = default;

std::unique_ptr<Drafter> Drafters::make(const Drafting& drafting) {
  const std::string& drafter = drafting.drafter;
  if (drafting.gamma == 0 || drafter == "none" || !policies_->drafts()) {
    return std::make_unique<NoDrafter>();
  }
  const Manner manner{drafting.params->greedy(), drafting.rules != nullptr};
  const auto policy = [&](const char* source) {
    return policies_->policy(source, drafting.gamma, manner);
  };
  if (drafter == "ngram") return std::make_unique<NgramDrafter>(policy("ngram"));
  auto model = std::make_unique<ModelDrafter>(drafting, policy("model"));
  if (drafter == "model") return model;
  return std::make_unique<CascadeDrafter>(std::make_unique<NgramDrafter>(policy("lookup")),
                                          std::move(model));
}

std::optional<std::string> Drafters::fallback(const std::string& drafter, int gamma,
                                              const Params& params, bool has_rules) const {
  if (gamma != kAuto) return std::nullopt;
  const std::vector<std::string> sources = drafter == "cascade"
                                               ? std::vector<std::string>{"lookup", "model"}
                                               : std::vector<std::string>{drafter};
  std::string reasons;
  for (const auto& source : sources) {
    const auto reason = policies_->fallback(source, {params.greedy(), has_rules});
    if (!reason) return std::nullopt;
    reasons += (reasons.empty() ? "" : "; ") + *reason;
  }
  return reasons;
}

}  // namespace specrt::native
