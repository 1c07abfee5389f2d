#include "speculation/shared_step.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

namespace specrt::speculation {

// The Python runtime's constants, and its reasons for them.
constexpr double kMaxDrafting = 200;
constexpr double kMemory = 64.0;
constexpr double kSurprise = 0.05 * 0.05;
constexpr double kHeldUp = 4.0;
constexpr double kMargin = 1.03;
constexpr double kReading = 1.0 / 8;
constexpr double kDoubt = 0.02;

void Outcome::record(double made, double expected) {
  expected = std::max(made / kHeldUp, std::min(kHeldUp * made, expected));
  constexpr double keep = 1.0 - 1.0 / kMemory;
  made_ = keep * made_ + made;
  expected_ = keep * expected_ + expected;
  squares_ = keep * squares_ + (made - expected) * (made - expected);
  ratio = made_ / expected_;
  variance = squares_ / (expected_ * expected_);
}

void Company::judge(double made, double expected, bool drafted) {
  (drafted ? drafting : plain).record(made, expected);
  const double ratio = drafting.ratio / plain.ratio, noise = drafting.variance + plain.variance;
  worth = std::min(1.0, 1.0 + (ratio - 1.0) * kSurprise / (kSurprise + noise));
}

SharedStep::SharedStep(Costs costs, int most, bool padded)
    : costs_(std::move(costs)), most_(static_cast<std::size_t>(most)), padded_(padded) {
  begin(1, {});
}

static Company company_of(const Costs& costs, int rows, int most) {
  std::vector<double> table;
  for (int width = rows - 1; width < rows * (most + 1); ++width) {
    table.push_back(costs.verify(width));
  }
  return {CostTracker(table, costs.assumed), {}, {}};
}

void SharedStep::begin(int number, const std::vector<DraftingRow>& rows_drafting) {
  rows = number;
  probing = false;
  auto found = companies_.find(rows);
  if (found == companies_.end()) {
    found = companies_.emplace(rows, company_of(costs_, rows, static_cast<int>(most_))).first;
  }
  company_ = &found->second;
  if (rows == 1) return;
  floor = rate = rows / company_->verify.costs()[0];
  std::vector<DraftingRow> sorted = rows_drafting;
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& one, const auto& other) {
    return one.acceptance->tokens().at(1) > other.acceptance->tokens().at(1);
  });
  Ranked ranked, reading;
  for (const DraftingRow& row : sorted) {
    ranked.push_back(row.acceptance);
    if (pays_to_read(row)) reading.push_back(row.acceptance);
  }
  chosen_ = choose(reading);
  if (chosen_.empty()) chosen_ = probe(ranked);
  share(chosen_.size());
}

static auto first(const std::vector<const Acceptance*>& ranked, std::size_t number) {
  return std::vector(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(number));
}

// The rows that draft because it pays; it sets the price of time.
SharedStep::Ranked SharedStep::choose(const Ranked& ranked) {
  const Best found = best(ranked);
  if (!ranked.empty()) company_->gain = found.rate / floor - kMargin;
  if (found.rate <= floor * kMargin) return {};
  rate = found.rate;
  company_->probe_loss = 0;
  return plain_due() ? Ranked{} : first(ranked, found.number);
}

// The rows that draft to see what it comes to, where that is due.
SharedStep::Ranked SharedStep::probe(const Ranked& ranked) {
  const Best found = best(ranked);
  gamma = static_cast<int>(found.gamma);
  const double expected = std::max(found.ns * (floor - found.rate), company_->probe_loss);
  const double loss = std::min(kMaxProbeLoss * rows, expected);
  const double due = static_cast<double>(company_->steps_idle) * kProbing * rows;
  probing = found.number > 0 && due >= loss;
  return probing ? first(ranked, found.number) : Ranked{};
}

// The best rate, its time, how many rows draft, and how far.
SharedStep::Best SharedStep::best(const Ranked& ranked) {
  const std::vector<double>& costs = company_->verify.costs();
  std::tuple<double, double, std::size_t, std::size_t> found{};
  std::vector<double> gains(most_ + 1, rows);
  for (std::size_t number = 1; number <= ranked.size(); ++number) {
    const std::vector<double>& tokens = ranked[number - 1]->tokens();
    const std::vector<double>& drafts = draft_costs(number).costs();
    for (std::size_t g = 1; g <= most_; ++g) {
      gains[g] += tokens[g] - 1.0;
      const double ns = (costs[width(number, g)] + drafts[g]) / company_->worth;
      found = std::max(found, {gains[g] / ns, ns, number, g});
    }
  }
  return {std::get<0>(found), std::get<1>(found), std::get<2>(found), std::get<3>(found)};
}

// Whether what a row gains in the rest of its text is worth what its draft lacks.
bool SharedStep::pays_to_read(const DraftingRow& row) {
  if (row.lacks <= static_cast<int>(most_)) return true;
  const double read_ns = kReading * draft_costs(1).costs().at(1);
  const double share = 1.0 - 1.0 / (1.0 + std::max(0.0, company_->gain));
  return row.room / floor * share >= row.lacks * read_ns;
}

// Set a row's share of the time, by its drafted tokens: with passes, and without.
void SharedStep::share(std::size_t number) {
  const std::vector<double>& costs = company_->verify.costs();
  const std::size_t count = number > 0 ? number : static_cast<std::size_t>(rows);
  const double many = static_cast<double>(count), plain = costs[0] / rows;
  const std::vector<double>& drafts = draft_costs(count).costs();
  verify.clear();
  copying.clear();
  drafting.clear();
  for (std::size_t g = 0; g <= most_; ++g) {
    verify.push_back((costs[width(count, g)] - costs[0]) / many);
    copying.push_back(plain + verify[g] / company_->worth);
    drafting.push_back(copying[g] + drafts[g] / many / company_->worth);
  }
}

// The place of a step in the table of costs.
std::size_t SharedStep::width(std::size_t number, std::size_t g) const {
  return g * (padded_ ? static_cast<std::size_t>(rows) : number);
}

// What drafting takes where so many rows do.
CostTracker& SharedStep::draft_costs(std::size_t number) {
  const auto found = drafts_.find(number);
  if (found != drafts_.end()) return found->second;
  const double wider = costs_.verify(static_cast<int>(number) - 1) / costs_.verify(0);
  std::vector<double> table;
  for (std::size_t g = 0; g <= most_; ++g) {
    table.push_back(costs_.draft(static_cast<int>(g)) * wider);
  }
  const CostTracker tracker(table, costs_.assumed, costs_.one_pass);
  return drafts_.emplace(number, tracker).first->second;
}

bool SharedStep::plain_due() const {
  const double loss = rate / floor - 1.0, counted = loss * (1.0 + loss / kDoubt);
  return static_cast<double>(company_->steps_drafted) >= std::min(kMaxDrafting, counted / kProbing);
}

bool SharedStep::drafts(const Acceptance& row) const {
  return std::find(chosen_.begin(), chosen_.end(), &row) != chosen_.end();
}

void SharedStep::settle(const StepTimes& step) {
  const int drafted = padded_ ? step.widest * rows : step.drafted;
  const auto ns = static_cast<double>(step.draft_ns + step.verify_ns);
  company_->judge(step.made, ns * (drafted > 0 ? rate : floor), drafted > 0);
  if (rows > 1) {
    company_->verify.record(static_cast<std::size_t>(drafted), static_cast<double>(step.verify_ns));
    if (step.passes > 0) {
      draft_costs(static_cast<std::size_t>(step.drafting))
          .record(static_cast<std::size_t>(step.passes), static_cast<double>(step.draft_ns));
    }
  }
  const bool counts = drafted > 0 && !probing;
  company_->steps_drafted = counts ? company_->steps_drafted + 1 : 0;
  company_->steps_idle = counts || probing ? 0 : company_->steps_idle + 1;
  if (probing) company_->probe_loss = std::min(kMaxProbeLoss * rows, ns * floor - step.made);
}

}  // namespace specrt::speculation
