#include "native/measure.hpp"

#include <algorithm>
#include <map>

#include "native/speculation/round.hpp"

namespace specrt::native {

namespace {

constexpr std::int64_t kBudgetNs = 500'000'000;
constexpr std::size_t kContext = 200, kRoom = 64;  // positions filled, and kept free
constexpr int kFewestLaps = 3, kMostLaps = 40;

struct RoundTimes {
  int drafted;
  double draft_ns, verify_ns, outside_ns;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 != 0 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// Runs short bursts of rounds from the same place in the KV buffers, over and over. What a pass
// costs depends on how many positions it reads, not on what they hold.
class PassTimer {
 public:
  PassTimer(Engine& target, Engine* draft, int most) : target_(target), draft_(draft) {
    vocabulary_ = target.geometry().vocab_size;
    length_ = target.max_length();
    if (draft != nullptr) {
      vocabulary_ = std::min<Token>(vocabulary_, draft->geometry().vocab_size);
      length_ = std::min(length_, draft->max_length());
    }
    const std::size_t free = std::max(kRoom, 4 * (static_cast<std::size_t>(most) + 1));
    context_ = length_ > free ? std::min(kContext, length_ - free) : 0;
  }

  // Write keys up to the context, in ever wider passes, for as long as there is time.
  void fill(std::int64_t deadline) {
    for (Engine* engine : {&target_, draft_}) {
      if (engine == nullptr) continue;
      for (std::size_t start = 0; start < context_ && now_ns() < deadline;) {
        const std::size_t width =
            std::min({std::max<std::size_t>(1, start), context_ - start, engine->max_width()});
        std::vector<Token> tokens(width);
        for (std::size_t i = 0; i < width; ++i)
          tokens[i] = static_cast<Token>((start + i) * 37) % vocabulary_;
        engine->forward(tokens.data(), width, start, 1);
        start += width;
      }
    }
  }

  // Time so many rounds, after one that is not counted. They draft less where there is no room.
  std::vector<RoundTimes> run_rounds(int most, int rounds) {
    const auto room = static_cast<int>(std::min<std::size_t>(length_ - context_ - 1, 1 << 30));
    const int gamma = std::min(most, room);
    tokens_.assign(1, vocabulary_ / 2);
    held_ = 0;
    std::vector<RoundTimes> timed;
    std::int64_t before = now_ns();
    for (int i = 0; i <= rounds; ++i) {
      const std::size_t end = context_ + tokens_.size() + static_cast<std::size_t>(gamma);
      if (i > 0 && end > length_) break;
      RoundTimes round = run(gamma);
      const std::int64_t after = now_ns();
      round.outside_ns = static_cast<double>(after - before) - round.draft_ns - round.verify_ns;
      before = after;
      if (i == 1) timed.clear();
      timed.push_back(round);
    }
    return timed;
  }

 private:
  Token known(Token token) const { return token < 0 || token >= vocabulary_ ? 0 : token; }

  std::vector<Token> drafted(int gamma) {
    std::vector<Token> result;
    if (draft_ == nullptr) result.assign(static_cast<std::size_t>(gamma), tokens_.back());
    if (draft_ == nullptr || gamma == 0) return result;
    std::vector<Token> pending(tokens_.begin() + static_cast<std::ptrdiff_t>(held_), tokens_.end());
    while (static_cast<int>(result.size()) < gamma) {
      const std::size_t start = context_ + held_;
      const Output output = draft_->forward(pending.data(), pending.size(), start, 1);
      held_ += pending.size();
      result.push_back(known(output.argmax[0]));
      pending.assign(1, result.back());
    }
    return result;
  }

  RoundTimes run(int gamma) {
    const std::int64_t began = now_ns();
    const std::vector<Token> proposed = drafted(gamma);
    const std::int64_t proposed_at = now_ns();
    std::vector<Token> fed(1, tokens_.back());
    fed.insert(fed.end(), proposed.begin(), proposed.end());
    const std::size_t start = context_ + tokens_.size() - 1;
    const Output output = target_.forward(fed.data(), fed.size(), start, fed.size());
    std::size_t accepted = 0;
    while (accepted < proposed.size() && output.argmax[accepted] == proposed[accepted]) ++accepted;
    const Token next = known(output.argmax[accepted]);
    const std::int64_t verified_at = now_ns();
    tokens_.insert(tokens_.end(), proposed.begin(),
                   proposed.begin() + static_cast<std::ptrdiff_t>(accepted));
    tokens_.push_back(next);
    held_ = std::min(held_, tokens_.size() - 1);
    return {gamma, static_cast<double>(proposed_at - began),
            static_cast<double>(verified_at - proposed_at), 0};
  }

  Engine& target_;
  Engine* draft_;
  Token vocabulary_ = 0;
  std::size_t length_ = 0;
  std::size_t context_ = 0;
  std::vector<Token> tokens_;  // committed behind the context
  std::size_t held_ = 0;       // of them, in the draft's KV buffers
};

struct Plan {
  std::vector<int> gammas;
  int rounds;

  // A guess: a plain step before each run_rounds, and twice that for a round.
  double price_ns(double plain_ns) const {
    return static_cast<double>(gammas.size()) * (1 + 2 * rounds) * plain_ns;
  }
};

// 0, the powers of two and the largest: close where costs bend.
std::vector<int> thinned(const std::vector<int>& gammas) {
  std::vector<int> result;
  for (const int gamma : gammas)
    if ((gamma & (gamma - 1)) == 0 || gamma == gammas.back()) result.push_back(gamma);
  return result;
}

// The most thorough plan that leaves time for some laps after the warm-up.
Plan plan_of(const std::vector<int>& gammas, double plain_ns) {
  std::vector<int> few = gammas;
  if (few.size() > 3) few = {gammas[0], gammas[1], gammas.back()};
  const std::vector<int> ladder = thinned(gammas);
  for (const Plan& plan : {Plan{gammas, 3}, Plan{ladder, 2}, Plan{ladder, 1}})
    if (plan.price_ns(plain_ns) * (1 + kFewestLaps) <= static_cast<double>(kBudgetNs)) return plan;
  return {few, 1};
}

// The nearest costs that never fall: a wider pass that looks cheaper is noise, which would turn a
// policy's comparison round. Source: pool adjacent violators, Ayer et al. 1955.
void make_rise(std::vector<std::pair<int, double>>& costs) {
  std::vector<std::pair<double, std::size_t>> pools;
  for (const auto& [gamma, cost] : costs) {
    pools.emplace_back(cost, 1);
    while (pools.size() > 1 && pools[pools.size() - 2].first > pools.back().first) {
      const auto [high, many] = pools.back();
      pools.pop_back();
      auto& [low, few] = pools.back();
      const auto all = static_cast<double>(few + many);
      low = (low * static_cast<double>(few) + high * static_cast<double>(many)) / all;
      few += many;
    }
  }
  std::size_t at = 0;
  for (const auto& [mean, count] : pools)
    for (std::size_t i = 0; i < count; ++i) costs[at++].second = mean;
}

Costs medians(const std::vector<RoundTimes>& timed, int most) {
  std::map<int, std::vector<double>> verify, draft;
  std::vector<double> outside;
  for (const RoundTimes& round : timed) {
    verify[round.drafted].push_back(round.verify_ns);
    draft[round.drafted].push_back(round.draft_ns);
    outside.push_back(round.outside_ns);
  }
  std::vector<std::pair<int, double>> verified, drafted;
  for (const auto& [gamma, ns] : verify) verified.emplace_back(gamma, std::max(1.0, median(ns)));
  // What a drafter takes to draft nothing is no cost of drafting.
  for (const auto& [gamma, ns] : draft) drafted.emplace_back(gamma, gamma == 0 ? 0.0 : median(ns));
  make_rise(verified);
  make_rise(drafted);
  Costs costs;
  costs.verify_ns = costs_between(verified, most);
  costs.draft_ns = costs_between(drafted, most);
  costs.outside_ns = std::max(0.0, median(outside));
  return costs;
}

}  // namespace

Costs measure_costs(Engine& target, Engine* draft, const Manifest& manifest) {
  const std::int64_t began = now_ns();
  const int most = manifest.gammas.back();
  PassTimer timer(target, draft, most);
  timer.fill(began + kBudgetNs / 4);
  double plain_ns = 1e18;
  for (const RoundTimes& round : timer.run_rounds(0, 3))
    plain_ns = std::min(plain_ns, round.verify_ns);
  Plan plan = plan_of(manifest.gammas, plain_ns);
  for (const int gamma : plan.gammas) timer.run_rounds(gamma, 1);  // makes bindings
  std::vector<RoundTimes> timed;
  for (int lap = 0; lap < kMostLaps; ++lap) {
    for (const int gamma : plan.gammas) {
      const std::vector<RoundTimes> result = timer.run_rounds(gamma, plan.rounds);
      timed.insert(timed.end(), result.begin(), result.end());
    }
    if (now_ns() - began >= kBudgetNs) break;
    // Each lap begins with another, so that a machine that slows down slows all of them.
    std::rotate(plan.gammas.begin(), plan.gammas.begin() + 1, plan.gammas.end());
  }
  return medians(timed, most);
}

}  // namespace specrt::native
