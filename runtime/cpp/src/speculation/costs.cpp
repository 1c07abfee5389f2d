#include "speculation/costs.hpp"

#include <algorithm>
#include <cmath>

namespace specrt::speculation {

// By what share a target pass of a token more costs more, at least, where it was never timed.
constexpr double kWidening = 0.03;
// How much lines drift from one time to the next: a variance.
constexpr double kDrift = 0.01 * 0.01;

// An entry of a table, continued beyond its end along its mean slope.
static double along(const std::vector<double>& table, int gamma) {
  const int last = static_cast<int>(table.size()) - 1;
  if (gamma <= last) return table.at(static_cast<std::size_t>(gamma));
  const double slope = last > 0 ? std::max(0.0, (table.back() - table.front()) / last) : 0.0;
  return table.back() + slope * (gamma - last);
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

double Costs::verify(int gamma) const { return along(verify_ns, gamma); }

double Costs::draft(int gamma) const { return along(draft_ns, gamma); }

void CostLine::record(double x, double y, double ns) {
  if (ns <= 0 || x <= 0) return;
  if (!scaled_) {
    scale_ *= ns / (scale_ * x + slope_ * y);
    slope_ *= scale_;
    scaled_ = true;
  }
  const double expected = at(x, y);
  ns = std::max(expected / kHeldUp, std::min(kHeldUp * expected, ns));
  const double surprise = ns / expected - 1.0;
  noise_ += kRecent * (std::min(1.0, surprise * surprise) - noise_);
  of_scale_ += kDrift;
  of_slope_ += kDrift;
  const double share_x = scale_ * x / expected, share_y = scale_ * y / expected;
  const double gain_x = of_scale_ * share_x + both_ * share_y;
  const double gain_y = both_ * share_x + of_slope_ * share_y;
  const double certainty = 1.0 / (gain_x * share_x + gain_y * share_y + std::max(noise_, kDrift));
  of_scale_ -= gain_x * gain_x * certainty;
  both_ -= gain_x * gain_y * certainty;
  of_slope_ -= gain_y * gain_y * certainty;
  const double step = scale_ * surprise * certainty;
  scale_ = std::max(0.1 * scale_, scale_ + gain_x * step);
  slope_ += gain_y * step;
}

double CostLine::at(double x, double y) const {
  return std::max(scale_ * x + slope_ * y, 0.1 * scale_ * x);
}

CostTracker::CostTracker(const std::vector<double>& tuned, bool assumed, bool one_pass)
    : narrowest_(tuned.size()), scaled_(!assumed), one_pass_(one_pass) {
  for (const double ns : tuned) widths_.push_back({ns});
  update();
}

void CostTracker::record(std::size_t drafted, double ns) {
  if (one_pass_) drafted = std::min<std::size_t>(drafted, 1);
  Width& width = widths_.at(drafted);
  if (ns <= 0 || width.ns <= 0) return;
  if (!scaled_) {
    common_ = ns / width.ns;
    scaled_ = true;
  }
  const double ratio = ns / (width.ns * common_);
  width.fast = ratio < 0.5 ? width.fast + 1 : 0;
  width.slow = ratio > held_up_ ? width.slow + 1 : 0;
  if (width.fast == 2 || width.slow == 4) {
    width.ns *= ratio;
    width.fast = width.slow = 0;
  } else if (ratio >= 0.5 && ratio <= 2.0) {
    const double surprise = std::min(0.5, ratio - 1.0);
    common_ *= 1.0 + surprise * std::max(1.0 / (1.0 + passes_), kRecent);
    width.ns *= 1.0 + surprise / (2 * kTrust + std::min<double>(width.passes, 8 * kTrust));
  }
  spread_ += kRecent * (std::min(std::abs(ratio - width.last), 4.0) - spread_);
  width.last = ratio;
  held_up_ = std::max(2.0, 1.0 + 6.0 * spread_);
  ++width.passes;
  ++passes_;
  narrowest_ = std::min(drafted, narrowest_);
  update();
}

// Set the costs by what was timed.
void CostTracker::update() {
  const bool each_a_pass = widths_[0].ns == 0;
  double most = narrowest_ < widths_.size() ? widths_[narrowest_].ns : INFINITY;
  costs_.clear();
  for (const Width& width : widths_) {
    const std::size_t drafted = costs_.size();
    if (width.passes > 0) {
      most = width.ns;
    } else if (drafted > narrowest_) {
      const double tokens = static_cast<double>(drafted);
      most *= each_a_pass ? tokens / (tokens - 1) : 1.0 + kWidening;
    }
    costs_.push_back(common_ * std::min(width.ns, most));
  }
  if (one_pass_) std::fill(costs_.begin() + 1, costs_.end(), costs_.at(1));
}

}  // namespace specrt::speculation
