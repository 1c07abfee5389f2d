#include "native/speculation/drift.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace specrt::native {

// The most by which one pass may differ from what was expected, as a share of it.
constexpr double kSurprise = 0.5;
// Variance of one pass.
constexpr double kNoise = 0.15 * 0.15;
// Variance by which engines become slower, and wider passes in particular, between settlements.
constexpr double kLevelDrift = 0.03 * 0.03;
constexpr double kSlopeDrift = 0.01 * 0.01;
// Variance of the costs as they were measured.
constexpr double kFirstDoubt = 0.1 * 0.1;
constexpr double kSteepest = 4.0;
constexpr double kFurthest = 1000.0;

static double surprise(double ratio) {
  const double found = ratio - 1.0;
  if (found > kSurprise) return kSurprise;
  return found > -kSurprise ? found : -kSurprise;
}

static double within(double factor, double most) {
  return std::max(1.0 / most, std::min(most, factor));
}

Drift::Drift(const Costs& costs, int most)
    : plain_(costs.verify(0)),
      outside_(costs.outside_ns),
      level_doubt_(kFirstDoubt),
      shared_doubt_(0.0),
      slope_doubt_(kFirstDoubt),
      pace_doubt_(kFirstDoubt),
      verified_(static_cast<std::size_t>(most) + 1) {
  for (int g = 0; g <= most; ++g) {
    wider_.push_back(std::max(0.0, costs.verify(g) - plain_));
    steps_.push_back(costs.draft(g));
  }
  price();
}

void Drift::time_verify(std::size_t drafted, std::int64_t ns) {
  if (ns <= 0) return;
  Note& note = verified_.at(drafted);
  note.total += surprise(static_cast<double>(ns) / prices_.verify[drafted]);
  note.count += 1.0;
}

void Drift::time_draft(std::size_t steps, std::int64_t ns, bool warm) {
  const double expected = prices_.draft.at(steps), took = static_cast<double>(ns);
  if (ns > 0 && expected > 0 && (warm || took < expected)) {
    drafted_.total += surprise(took / expected);
    drafted_.count += 1.0;
  }
}

void Drift::settle() {
  double level = 0.0, slope = 0.0;
  double a = level_doubt_ + kLevelDrift, b = shared_doubt_, c = slope_doubt_ + kSlopeDrift;
  for (std::size_t g = 0; g < wider_.size(); ++g) {
    const Note& note = verified_[g];
    if (note.count == 0) continue;
    const double x = slope_ * wider_[g] / (plain_ + slope_ * wider_[g]);
    const double first = a + b * x, second = b + c * x;
    const double doubt = first + second * x + kNoise / note.count;
    const double gap = (note.total / note.count - level - slope * x) / doubt;
    level += first * gap;
    slope += second * gap;
    a -= first * first / doubt;
    b -= first * second / doubt;
    c -= second * second / doubt;
  }
  level_doubt_ = a;
  shared_doubt_ = b;
  slope_doubt_ = c;
  level_ = within(level_ * std::exp(level), kFurthest);
  slope_ = within(slope_ * std::exp(slope), kSteepest);
  settle_draft();
  std::fill(verified_.begin(), verified_.end(), Note{});
  price();
}

void Drift::settle_draft() {
  pace_doubt_ += kLevelDrift;
  if (drafted_.count > 0) {
    const double gain = pace_doubt_ / (pace_doubt_ + kNoise / drafted_.count);
    pace_ = within(pace_ * std::exp(gain * drafted_.total / drafted_.count), kFurthest);
    pace_doubt_ *= 1.0 - gain;
  }
  drafted_ = Note{};
}

void Drift::price() {
  std::vector<double> verify, draft;
  for (const double wider : wider_) verify.push_back(level_ * (plain_ + slope_ * wider));
  for (const double step : steps_) draft.push_back(pace_ * step);
  prices_ = Prices(std::move(verify), std::move(draft), outside_);
}

}  // namespace specrt::native
