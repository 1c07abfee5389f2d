// What the rows of a step draft; specrt.speculation.shared_step has the reasons.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "speculation/acceptance.hpp"
#include "speculation/costs.hpp"

namespace specrt::speculation {

constexpr double kProbing = 0.01;  // share of the tokens that probes may cost
// The most and the least that one probe counts, in tokens of a row.
constexpr double kMaxProbeLoss = 8.0;
constexpr double kLeastProbeLoss = 0.1;

// A row that may draft by passes of the draft model: what it expects of its drafts, how many tokens
// the draft has not read, and how many may follow.
struct DraftingRow {
  const Acceptance* acceptance;
  int lacks;
  int room;
};

// Tokens that steps made, by those that their time was expected to make.
class StepOutcome {
 public:
  explicit StepOutcome(double first) : variance(first), squares_(first * kTrust * kTrust) {}
  void record(double made, double expected, int steps);
  double ratio = 1, variance;  // the variance is the ratio's

 private:
  double made_ = kTrust, expected_ = kTrust, squares_;
};

// What is known of steps of one number of rows.
class Company {
 public:
  Company(const Costs& costs, int rows, int most);
  // Take note of what a step took besides drafting. Throws std::out_of_range.
  void record(std::size_t drafted, double ns);
  // Hold what was expected to what steps made.
  void judge(double made, double expected, int steps, bool drafted);
  // How often a step that drafts nothing was timed.
  int plain_times() const { return places_.front().times; }

  std::vector<double> verify;  // by drafted tokens of all rows, what a step takes besides drafting
  StepOutcome plain{0.05 * 0.05}, drafting{1 / kTrust};
  double worth = 1;  // tokens that drafts were worth, of those expected
  std::int64_t steps_drafted = 0, steps_idle = 0;  // in a row
  int plans = 0;
  int plain_plans = 0;  // in a row, by which it pays to draft nothing
  double probe_loss = 0;
  double gain = INFINITY;  // by how many times plain steps' tokens the best plan makes more

 private:
  struct Place {
    double pass, tokens;  // what the line is along
    double off = 1;       // by how many times it is off that line
    int times = 0;        // how often it was timed
  };
  std::vector<Place> places_;
  CostLine line_;
};

// What a step took, or plain `steps`: tokens made, those drafted by all rows and by the one that
// drafted most, and how many rows ran the first of so many draft passes; none where that is not a
// measure. Where `verify_ns` is 0 the step is none either: a draft read a prompt. A probe still
// pays.
struct StepTimes {
  int made, drafted, widest;
  std::int64_t draft_ns, verify_ns;
  int passes = 0, drafting = 0, steps = 1;
};

// Decides for all rows of a step how many draft, and how far. Sources: Kelly 1997 (rows that
// draft), Dinkelbach 1967 (rows that copy).
class SharedStep {
 public:
  SharedStep(Costs costs, int most, bool padded = false);
  // Plan a step of so many rows, some of which may draft by passes.
  void begin(int rows, const std::vector<DraftingRow>& drafting);
  // Learn from a step. Throws std::out_of_range where more was drafted than may be.
  void settle(const StepTimes& step);
  // Whether to see again what a plain step comes to, where drafting pays.
  bool plain_due() const;
  // Whether no plain step of so many rows was timed yet, though some may have been.
  bool first() const;
  // Whether a row drafts by passes in this step.
  bool drafts(const Acceptance& row) const;
  Company& company() const { return *company_; }

  int rows = 1;
  double floor = 1, rate = 1;  // tokens a nanosecond of a plain step, and of what pays best
  double price = 1;  // of a nanosecond for a row that drafts, by the tokens it makes in a step
  bool probing = false;
  int gamma = 0;  // how far the plan drafts
  int rest = 0;   // how many more steps of the same rows the plan is good for
  // Where there is one row, what its draft takes to read what it lacks, and how many tokens follow.
  double unread_ns = 0;
  int room = 0;
  // What a row is charged, by its drafted tokens, of verifying them, and of a step that it copies
  // tokens for.
  std::vector<double> verify, copying;
  // What a row is charged that has drafted so many tokens, by how many it drafts.
  const std::vector<double>& drafting(std::size_t drafted);
  // Note that a row drafts further.
  void go_on(std::size_t drafted) { ++going_on_.at(drafted); }

 private:
  using Ranked = std::vector<const Acceptance*>;
  // What a step may draft: tokens a nanosecond as they count, by the geometric mean over rows, and
  // as they are; how many rows draft, and how far.
  struct Plan {
    double fair_rate = 0, rate = 0, ns = 0;
    std::size_t number = 0, gamma = 0;
    bool operator<(const Plan& other) const {
      return std::tie(fair_rate, rate, ns, number, gamma) <
             std::tie(other.fair_rate, other.rate, other.ns, other.number, other.gamma);
    }
  };
  Ranked choose(const std::vector<DraftingRow>& ranked);
  Ranked probe(const std::vector<DraftingRow>& ranked);
  Plan best(const Ranked& ranked) const;
  bool pays_to_read(const DraftingRow& row) const;
  double reading_ns(int lacks) const;
  void share();
  std::size_t width(std::size_t drafting, std::size_t gamma) const;
  double draft_ns(std::size_t rows, std::size_t passes) const;

  Costs costs_;
  std::size_t most_;
  bool padded_;
  std::map<int, Company> companies_;
  Company* company_ = nullptr;
  std::vector<double> drafts_;  // what one row's drafts take, by passes
  CostLine line_;
  Ranked chosen_;
  std::vector<std::size_t> going_on_;  // how many rows draft further than so many tokens
  std::map<std::size_t, std::vector<double>> by_passes_;
};

}  // namespace specrt::speculation
