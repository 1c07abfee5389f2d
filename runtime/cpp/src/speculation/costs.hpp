// What passes cost on one machine; specrt.speculation.costs has the reasons.
#pragma once

#include <cstddef>
#include <vector>

namespace specrt::speculation {

// Observations that an assumption weighs as much as, and the share of a running mean that the
// latest observation makes up.
constexpr double kTrust = 8.0;
constexpr double kRecent = 1.0 / 16;
// How many times as long as expected a step counts to have taken, at most.
constexpr double kHeldUp = 4.0;

// Nanoseconds: verify_ns[g] of a target pass of width g + 1, draft_ns[g] of drafting g tokens in a
// row, outside_ns per round outside the engines.
struct Costs {
  std::vector<double> verify_ns;
  std::vector<double> draft_ns;
  double outside_ns = 0;
  // Whether nothing was measured; costs are then in steps of the target, and the first timed pass
  // of each engine sets its scale.
  bool assumed = false;
  // Whether a draft of any length is one pass, and costs the same.
  bool one_pass = false;

  // What passes of most engines cost, up to gamma `most`, where nothing was measured here.
  static Costs assume(int most);

  // What verifying or drafting `gamma` tokens costs, measured or interpolated.
  double verify(int gamma) const;
  double draft(int gamma) const;
};

// How much times and lines are off before any is known: a variance, as a share.
constexpr double kFirstNoise = 0.2 * 0.2;

// A cost that grows on a line with what is done: scale x + slope y, from noisy times.
class CostLine {
 public:
  explicit CostLine(double slope) : slope_(slope) {}
  void record(double x, double y, double ns);
  double at(double x, double y) const;

 private:
  double scale_ = 1, slope_, noise_ = kFirstNoise;
  double of_scale_ = kFirstNoise, both_ = 0, of_slope_ = 1;  // variances, by the scale squared
  bool scaled_ = false;  // the first time sets the scale of both
};

// What passes cost now, by the number of drafted tokens: tuned costs, as rounds correct them.
class CostTracker {
 public:
  explicit CostTracker(const std::vector<double>& tuned, bool assumed = false,
                       bool one_pass = false);
  // Take note of what a pass took. Throws std::out_of_range for one of more tokens than were tuned.
  void record(std::size_t drafted, double ns);
  const std::vector<double>& costs() const { return costs_; }

 private:
  void update();

  struct Width {
    double ns;
    int passes = 0, fast = 1, slow = 0;
    double last = 1;  // the latest pass, by what was expected
  };
  std::vector<Width> widths_;
  std::vector<double> costs_;
  double common_ = 1, spread_ = 0, held_up_ = 2;
  double passes_ = 0;
  std::size_t narrowest_;  // the shortest draft whose pass was timed
  bool scaled_, one_pass_;
};

}  // namespace specrt::speculation
