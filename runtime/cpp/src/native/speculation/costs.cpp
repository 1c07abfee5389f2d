#include "native/speculation/costs.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>

#include "failure.hpp"
#include "native/text/json.hpp"

namespace specrt::native {

// An entry of a table, continued beyond its end along its mean slope.
static double along(const std::vector<double>& table, int gamma) {
  const int last = static_cast<int>(table.size()) - 1;
  if (gamma <= last) return table.at(static_cast<std::size_t>(gamma));
  const double slope = last > 0 ? std::max(0.0, (table.back() - table.front()) / last) : 0.0;
  return table.back() + slope * (gamma - last);
}

static std::string listed(const std::vector<double>& costs) {
  std::string text = "(";
  for (const double cost : costs) text += (text.size() > 1 ? ", " : "") + decimal(cost);
  return text + ")";
}

static bool sound(const std::vector<double>& costs, bool positive) {
  return std::all_of(costs.begin(), costs.end(), [positive](double cost) {
    return std::isfinite(cost) && (positive ? cost > 0 : cost >= 0);
  });
}

Costs Costs::assume(int most) {
  Costs costs;
  costs.assumed = true;
  for (int gamma = 0; gamma <= most; ++gamma) {
    costs.draft_ns.push_back(0.1 * gamma);
    costs.verify_ns.push_back(1.0 + 0.1 * gamma);
  }
  return costs;
}

void Costs::check() const {
  const bool known = !verify_ns.empty() && !draft_ns.empty() && sound(verify_ns, true) &&
                     sound(draft_ns, false) && sound({outside_ns}, false);
  if (known && draft_ns[0] == 0) return;
  throw Failure(SPECRT_BUNDLE,
                "the costs are verify " + listed(verify_ns) + ", draft " + listed(draft_ns) +
                    ", outside " + listed({outside_ns}) +
                    "; expected nanoseconds from gamma 0 on, drafting none of which costs "
                    "nothing; run `specrt tune` again");
}

double Costs::verify(int gamma) const { return along(verify_ns, gamma); }

double Costs::draft(int gamma) const { return along(draft_ns, gamma); }

CostTracker::CostTracker(const std::vector<double>& tuned, bool assumed) : scaled_(!assumed) {
  for (const double ns : tuned) widths_.push_back({ns});
  update();
}

void CostTracker::record(std::size_t drafted, double ns) {
  Width& width = widths_.at(drafted);
  if (ns <= 0 || width.ns <= 0) return;
  if (!scaled_) {
    common_ = ns / width.ns;
    scaled_ = true;
  }
  const double ratio = ns / (width.ns * common_);
  width.fast = ratio < 0.5 ? width.fast + 1 : 0;
  width.slow = ratio > 2.0 ? width.slow + 1 : 0;
  if (width.fast == 2 || width.slow == 4) {
    width.ns *= ratio;
    width.fast = width.slow = 0;
  } else if (ratio >= 0.5 && ratio <= 2.0) {
    const double surprise = std::min(0.5, ratio - 1.0);
    common_ *= 1.0 + surprise * std::max(1.0 / (1.0 + passes_), kRecent);
    width.ns *= 1.0 + surprise / (2 * kTrust + std::min<double>(width.passes, 8 * kTrust));
  }
  ++width.passes;
  ++passes_;
  update();
}

// Set the costs by what was timed.
void CostTracker::update() {
  costs_.clear();
  const auto timed = std::find_if(widths_.begin(), widths_.end(),
                                  [](const Width& width) { return width.passes > 0; });
  const auto narrowest = static_cast<std::size_t>(timed - widths_.begin());
  double most = timed == widths_.end() ? INFINITY : timed->ns;
  const bool each_a_pass = widths_.at(0).ns == 0;
  for (std::size_t drafted = 0; drafted < widths_.size(); ++drafted) {
    const Width& width = widths_[drafted];
    if (width.passes > 0) {
      most = width.ns;
    } else if (drafted > narrowest) {
      const double tokens = static_cast<double>(drafted);
      most *= each_a_pass ? tokens / (tokens - 1) : 1 + kWidening;
    }
    costs_.push_back(common_ * std::min(width.ns, most));
  }
}

}  // namespace specrt::native
