#include "native/speculation/pool.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "native/speculation/drafters.hpp"
#include "native/speculation/ngram.hpp"

namespace specrt::native {

namespace {

// Proposes nothing: plain decoding.
class NoDrafter : public Drafter {
 public:
  Proposal propose(const std::vector<Token>&, std::size_t) override { return {}; }
  void observe(const std::vector<Token>&, const Round&) override {}
};

}  // namespace

// The policies of gamma `auto`, one for each source and each mode of
// choosing tokens. A source is "model", "ngram", or "lookup", which is an n-gram before the model.
class DrafterPool::Policies {
 public:
  Policies(std::vector<int> gammas, Costs costs)
      : gammas_(std::move(gammas)), costs_(std::move(costs)) {}

  bool drafts() const { return gammas_.size() > 1; }

  std::shared_ptr<GammaPolicy> policy(const std::string& source, int gamma, DecodingMode mode) {
    if (gamma != kAuto) return std::make_shared<FixedGamma>(gamma);
    auto policy = std::make_shared<AdaptiveGamma>(adaptive(source, mode));
    if (gammas_.size() == static_cast<std::size_t>(gammas_.back()) + 1) return policy;
    return std::make_shared<BuiltGamma>(std::move(policy), gammas_);
  }

  // Why a source drafts nothing; none where it drafts, or never ran.
  std::optional<std::string> fallback(const std::string& source, DecodingMode mode,
                                      std::size_t after) const {
    const auto entry = known_.find({source, mode});
    return entry == known_.end() ? std::nullopt : entry->second->fallback(after);
  }

 private:
  std::shared_ptr<AutoGamma> adaptive(const std::string& source, DecodingMode mode) {
    const auto entry = known_.find({source, mode});
    if (entry != known_.end()) return entry->second;
    Costs costs = costs_;
    std::shared_ptr<const AutoGamma> rival;
    if (source != "model") std::fill(costs.draft_ns.begin(), costs.draft_ns.end(), 0.0);
    if (source == "lookup") rival = adaptive("model", mode);
    auto policy = std::make_shared<AutoGamma>(costs, gammas_.back(), std::move(rival));
    known_[{source, mode}] = policy;
    return policy;
  }

  std::vector<int> gammas_;
  Costs costs_;
  std::map<std::pair<std::string, DecodingMode>, std::shared_ptr<AutoGamma>> known_;
};

DrafterPool::DrafterPool(std::vector<int> gammas, Costs costs)
    : policies_(std::make_unique<Policies>(std::move(gammas), std::move(costs))) {}

DrafterPool::~DrafterPool() = default;

std::unique_ptr<Drafter> DrafterPool::make(const Drafting& drafting) {
  const std::string& drafter = drafting.drafter;
  if (drafting.gamma == 0 || drafter == "none" || !policies_->drafts()) {
    return std::make_unique<NoDrafter>();
  }
  const DecodingMode mode{drafting.params->greedy(), drafting.processors != nullptr};
  const auto policy = [&](const char* source) {
    return policies_->policy(source, drafting.gamma, mode);
  };
  if (drafter == "ngram") return std::make_unique<NgramDrafter>(policy("ngram"));
  auto model = std::make_unique<ModelDrafter>(drafting, policy("model"));
  if (drafter == "model") return model;
  return std::make_unique<CascadeDrafter>(std::make_unique<NgramDrafter>(policy("lookup")),
                                          std::move(model));
}

std::optional<std::string> DrafterPool::fallback(const std::string& drafter, int gamma,
                                                 const Params& params, bool has_processors,
                                                 bool drafted) const {
  if (gamma != kAuto) return std::nullopt;
  const std::vector<std::string> sources = drafter == "cascade"
                                               ? std::vector<std::string>{"lookup", "model"}
                                               : std::vector<std::string>{drafter};
  std::string reasons;
  for (const auto& source : sources) {
    const auto reason = policies_->fallback(source, {params.greedy(), has_processors},
                                            drafted ? speculation::kFallbackAfter : 1);
    if (!reason) return std::nullopt;
    if (reasons != *reason) reasons += (reasons.empty() ? "" : "; ") + *reason;
  }
  return reasons;
}

}  // namespace specrt::native
