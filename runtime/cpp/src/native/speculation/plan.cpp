#include "native/speculation/plan.hpp"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

namespace specrt::native {

// A reach that no token has.
constexpr double kNever = 2.0;

static std::vector<double> rises(const std::vector<double>& costs) {
  std::vector<double> rise;
  for (std::size_t k = 1; k < costs.size(); ++k) rise.push_back(costs[k] - costs[k - 1]);
  return rise;
}

Prices::Prices(std::vector<double> verify_ns, std::vector<double> draft_ns, double outside_ns)
    : verify(std::move(verify_ns)),
      draft(std::move(draft_ns)),
      wider(rises(verify)),
      step(rises(draft)) {
  for (std::size_t k = 0; k < verify.size(); ++k) {
    total.push_back(verify[k] + draft[k] + outside_ns);
  }
  landings = native::landings(total);
}

std::vector<int> landings(const std::vector<double>& total) {
  std::vector<int> hull;
  const auto cost = [&total](int k) { return total[static_cast<std::size_t>(k)]; };
  for (int i = 0; i < static_cast<int>(total.size()); ++i) {
    while (hull.size() > 1) {
      const int low = hull[hull.size() - 2], high = hull.back();
      const double before = (cost(high) - cost(low)) * (i - low);
      if (before < (cost(i) - cost(low)) * (high - low)) break;
      hull.pop_back();
    }
    hull.push_back(i);
  }
  std::vector<int> found;
  for (std::size_t k = 1; k < hull.size(); ++k) {
    found.insert(found.end(), static_cast<std::size_t>(hull[k] - hull[k - 1]), hull[k]);
  }
  return found;
}

// The gamma that emits most tokens per nanosecond, and how many it does.
static std::pair<int, double> best(const std::vector<double>& total,
                                   const std::vector<double>& chances, double rate) {
  int gamma = 0;
  double tokens = 1.0, reach = 1.0;
  for (std::size_t k = 1; k <= chances.size(); ++k) {
    reach *= chances[k - 1];
    tokens += reach;
    if (tokens > rate * total[k]) {
      gamma = static_cast<int>(k);
      rate = tokens / total[k];
    }
  }
  return {gamma, rate};
}

static bool beyond(const std::vector<int>& ends, std::size_t k) {
  return ends[k] > static_cast<int>(k) + 1;
}

// At k, the tokens expected between k and its landing, given k are kept.
static std::vector<double> spans_of(const std::vector<int>& ends,
                                    const std::vector<double>& chances) {
  std::vector<double> spans = chances;
  for (std::size_t k = chances.size(); k-- > 0;) {
    if (k + 1 < chances.size() && beyond(ends, k)) spans[k] *= 1.0 + spans[k + 1];
  }
  return spans;
}

Plan plan(const Prices& prices, const std::vector<double>& chances,
          const std::vector<double>& surest, double share, double rate) {
  Plan made;
  std::tie(made.gamma, made.rate) = best(prices.total, chances, rate);
  made.keep.push_back(0.0);
  const auto spans = spans_of(prices.landings, chances);
  for (std::size_t k = 0; k < chances.size(); ++k) {
    const double wider = prices.wider[k], step = prices.step[k], chance = chances[k];
    double least = wider;
    double enough = std::min((wider + step) / chance, (wider + step / share) / surest[k]);
    if (beyond(prices.landings, k)) {
      const auto end = static_cast<std::size_t>(prices.landings[k]);
      const double climb = prices.total[end] - prices.total[k];
      enough = std::min(enough, climb / spans[k]);
      least = std::min(least, (climb - step) * chance / spans[k]);
    }
    made.more.push_back(enough * made.rate);
    made.keep.push_back(least * made.rate);
  }
  made.more.push_back(kNever);
  return made;
}

}  // namespace specrt::native
