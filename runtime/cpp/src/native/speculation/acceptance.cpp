#include "native/speculation/acceptance.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace specrt::native {

// How easy the text may be, as log odds of the first drafted token: from 2 % to 98 %.
constexpr double kLevelOdds[] = {-4.0, -2.4, -1.2, -0.2, 0.7, 1.6, 2.6, 3.9};
// Before any round: most pairs are worth something, and the rest should be found out soon.
constexpr double kFirstBelief[] = {0.25, 0.1, 0.05, 0.05, 0.1, 0.2, 0.15, 0.1};
// How likely the text is to turn, per round.
constexpr double kChange = 0.01;
// Share of the belief that goes, at each refit, into what texts are usually like.
constexpr double kHabit = 0.2;
// The least share of each level in what texts are usually like: nothing is ruled out.
constexpr double kEver = 0.01;

// Where bands of confidence meet; finer where drafts are sure, for there most tokens are.
constexpr double kEdges[] = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.985};
// The band of confidence 1, which is what a drafter says that has none to give.
constexpr std::size_t kUntold = std::size(kEdges) + 1;
// Log odds of the bands, about half those of the confidence itself: drafts exaggerate.
constexpr double kFirstBands[] = {-2.2, -1.7, -1.3, -1.0, -0.8, -0.5, -0.3,
                                  0.0,  0.4,  0.8,  1.3,  1.8,  0.0};
// Share of the counts kept at each refit.
constexpr double kFade = 0.85;
// What one token tells about an offset: p (1 - p), as it mostly is.
constexpr double kWorth = 0.15;
// Tokens judged before confidence is thought to tell anything.
constexpr double kEnough = 4.0;
// What an offset's prior weighs, in the same unit.
constexpr double kBandPrior = 1.0;
constexpr double kPlacePrior = 2.0;

static double chance_of(double odds) {
  // A compiler that knows the odds would round exp(odds) better than the library does.
  const volatile double told = odds;
  return 1.0 / (1.0 + std::exp(-told));
}

template <typename Numbers>
static double sum(const Numbers& numbers) {
  return std::accumulate(std::begin(numbers), std::end(numbers), 0.0);
}

template <typename Numbers, typename Others>
static double product(const Numbers& numbers, const Others& others) {
  return std::inner_product(std::begin(numbers), std::end(numbers), std::begin(others), 0.0);
}

Acceptance::Acceptance(int most)
    : places_(static_cast<std::size_t>(most)),
      place_gaps_(places_.size()),
      depths_(places_.size()) {
  static_assert(std::size(kLevelOdds) == kLevels && std::size(kFirstBands) == kBands);
  std::copy(std::begin(kFirstBands), std::end(kFirstBands), bands_.begin());
  std::copy(std::begin(kFirstBelief), std::end(kFirstBelief), belief_.begin());
  usual_ = belief_;
  for (std::size_t i = 0; i < kUntold; ++i) seen_[i] = static_cast<double>(i + 1) / 80;
  seen_[kUntold] = 0.0;
  for (std::size_t i = 0; i < kLevels; ++i) {
    change_[i] = kChange * usual_[i];
    chances_[i] = chance_of(kLevelOdds[i]);
  }
  for (std::size_t i = 0; i < kFine; ++i) {
    const double confidence = static_cast<double>(i) / kFine;
    const auto above = std::upper_bound(std::begin(kEdges), std::end(kEdges), confidence);
    table_[i] = static_cast<std::size_t>(above - std::begin(kEdges));
  }
  summarise();
}

double Acceptance::expect(std::size_t place, double confidence) {
  const bool told = confidence >= 0.0 && confidence < 1.0;
  const std::size_t band = told ? table_[static_cast<std::size_t>(confidence * kFine)] : kUntold;
  const double chance = chance_of(odds_ + places_.at(place) + bands_[band]);
  tokens_.push_back({band, chance});
  return chance;
}

void Acceptance::judge(std::size_t place, const Expected& token, bool kept) {
  const double gap = kept ? 1.0 - token.chance : -token.chance;
  place_gaps_[place] += gap;
  band_gaps_[token.band] += gap;
  seen_[token.band] += 1.0;
}

void Acceptance::learn(std::size_t accepted, std::size_t evaluated) {
  while (tokens_.size() < evaluated) expect(tokens_.size(), 1.0);
  depths_.at(evaluated - 1) += 1.0;
  const auto correct = [this](const Levels& likely) {
    for (std::size_t i = 0; i < kLevels; ++i) belief_[i] *= likely[i];
  };
  double offset = 0.0;
  for (std::size_t place = 0; place < accepted; ++place) {
    offset += places_[place] + bands_[tokens_[place].band];
    judge(place, tokens_[place], true);
  }
  if (accepted > 0) correct(likelihood(accepted, offset / static_cast<double>(accepted)));
  if (evaluated > accepted) {
    judge(accepted, tokens_[accepted], false);
    correct(likelihood(0, places_[accepted] + bands_[tokens_[accepted].band]));
  }
  const double scale = (1.0 - kChange) / sum(belief_);
  for (std::size_t i = 0; i < kLevels; ++i) belief_[i] = belief_[i] * scale + change_[i];
  summarise();
}

std::vector<double> Acceptance::chances(double odds, double offset) const {
  std::vector<double> chances;
  for (const double place : places_) chances.push_back(chance_of(odds + place + offset));
  return chances;
}

std::pair<double, double> Acceptance::surest(double share) const {
  const double all = sum(seen_);
  if (all < kEnough) return {0.0, 1.0};
  std::array<std::size_t, kBands> order;
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [this](std::size_t a, std::size_t b) { return bands_[a] > bands_[b]; });
  double count = 0.0, total = 0.0;
  for (const std::size_t band : order) {
    count += seen_[band];
    total += seen_[band] * bands_[band];
    if (count >= share * all) break;
  }
  return {total / count, count / all};
}

void Acceptance::refit() {
  const double rest = 1.0 - kEver * kLevels;
  for (std::size_t i = 0; i < kLevels; ++i) {
    usual_[i] = rest * (usual_[i] + kHabit * (belief_[i] - usual_[i])) + kEver;
    change_[i] = kChange * usual_[i];
  }
  refit_places();
  refit_bands();
}

void Acceptance::refit_places() {
  double judged = sum(depths_), before = 0.0;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const double pull = kPlacePrior * (before - places_[i]);
    before = places_[i] + (place_gaps_[i] + pull) / (kWorth * judged + kPlacePrior);
    places_[i] = before;
    judged -= depths_[i];
    place_gaps_[i] = 0.0;
    depths_[i] = kFade * depths_[i];
  }
  const double first = places_.empty() ? 0.0 : places_[0];
  for (double& place : places_) place -= first;
}

void Acceptance::refit_bands() {
  const double middle = product(kFirstBands, seen_) / sum(seen_);
  Bands fitted;
  for (std::size_t i = 0; i < kBands; ++i) {
    const double pull = kBandPrior * (kFirstBands[i] - middle - bands_[i]);
    fitted[i] = bands_[i] + (band_gaps_[i] + pull) / (kWorth * seen_[i] + kBandPrior);
  }
  const double centre = product(fitted, seen_) / sum(seen_);
  double highest = fitted[0];
  for (std::size_t i = 0; i < kUntold; ++i) {
    highest = std::max(highest, fitted[i]);
    bands_[i] = highest - centre;
  }
  bands_[kUntold] = fitted[kUntold] - centre;
  band_gaps_.fill(0.0);
  for (double& count : seen_) count = kFade * count;
}

void Acceptance::summarise() {
  mean_ = product(belief_, chances_);
  odds_ = std::log(mean_ / (1.0 - mean_));
}

// Per level, the chance of so many tokens kept in a row, or of one refused. Their mean offset is
// taken in quarters: coarse enough to be looked up.
const Acceptance::Levels& Acceptance::likelihood(std::size_t accepted, double offset) {
  const long quarters = std::lrint(offset * 4);
  const auto [at, made] = likelihoods_.try_emplace({accepted, quarters});
  for (std::size_t i = 0; made && i < kLevels; ++i) {
    const double chance = chance_of(kLevelOdds[i] + static_cast<double>(quarters) / 4);
    at->second[i] = accepted > 0 ? std::pow(chance, static_cast<double>(accepted)) : 1.0 - chance;
  }
  return at->second;
}

}  // namespace specrt::native
