#include "speculation/shared_step.hpp"

#include <algorithm>
#include <utility>

namespace specrt::speculation {

// The Python runtime's constants, and its reasons for them.
constexpr double kMaxDrafting = 200;
constexpr double kMemory = 64.0;
constexpr double kNoise = 25.0;
constexpr double kToken = 0.1;
constexpr double kMargin = 1.03;
constexpr double kReading = 1.0 / 8;
constexpr int kRest = 15;
constexpr double kDoubt = 0.02;

void StepOutcome::record(double made, double expected, int steps) {
  expected = std::max(made / kHeldUp, std::min(kHeldUp * made, expected));
  const double keep = std::pow(1.0 - 1.0 / kMemory, steps);
  made_ = keep * made_ + made;
  expected_ = keep * expected_ + expected;
  const double off = made - ratio * expected;
  squares_ = keep * squares_ + off * off;
  ratio = made_ / expected_;
  variance = squares_ / (expected_ * expected_);
}

void Company::judge(double made, double expected, int steps, bool drafted) {
  (drafted ? drafting : plain).record(made, expected, steps);
  const double less = 1.0 - drafting.ratio / plain.ratio;
  const double doubt = kNoise * (drafting.variance + plain.variance);
  worth = 1.0 - std::max(0.0, less) * less * less / (less * less + doubt);
}

Company::Company(const Costs& costs, int rows, int most) : line_(0) {
  for (int drafted = 0; drafted <= rows * most; ++drafted) {
    verify.push_back(costs.verify(rows - 1 + drafted));
    places_.push_back({verify.back(), kToken * costs.verify(0) * drafted});
  }
}

void Company::record(std::size_t drafted, double ns) {
  Place& place = places_.at(drafted);
  line_.record(place.pass, place.tokens, ns);
  ++place.times;
  const double ratio = ns / line_.at(place.pass, place.tokens);
  const double off = std::max(1 / kHeldUp, std::min(kHeldUp, ratio)) - place.off;
  place.off += off / (kTrust + place.times);
  for (std::size_t i = 0; i < verify.size(); ++i) {
    verify[i] = line_.at(places_[i].pass, places_[i].tokens) * places_[i].off;
  }
}

SharedStep::SharedStep(Costs costs, int most, bool padded)
    : costs_(std::move(costs)),
      most_(static_cast<std::size_t>(most)),
      padded_(padded),
      line_(costs_.verify(1) / costs_.verify(0) - 1.0) {
  for (int passes = 0; passes <= most; ++passes) drafts_.push_back(costs_.draft(passes));
  begin(1, {});
}

void SharedStep::begin(int number, const std::vector<DraftingRow>& rows_drafting) {
  rows = number;
  probing = false;
  rest = 0;
  auto found = companies_.find(rows);
  if (found == companies_.end()) {
    found = companies_.emplace(rows, Company(costs_, rows, static_cast<int>(most_))).first;
  }
  company_ = &found->second;
  if (rows == 1) {
    const bool may_draft = !rows_drafting.empty();
    unread_ns = may_draft ? reading_ns(rows_drafting[0].lacks) : 0;
    room = may_draft ? rows_drafting[0].room : 0;
    return;
  }
  ++company_->plans;
  floor = rate = price = rows / company_->verify[0];
  std::vector<DraftingRow> ranked = rows_drafting;
  std::stable_sort(ranked.begin(), ranked.end(), [](const auto& one, const auto& other) {
    return one.acceptance->tokens().at(1) > other.acceptance->tokens().at(1);
  });
  chosen_ = choose(ranked);
  if (chosen_.empty()) chosen_ = probe(ranked);
  const bool plain = chosen_.empty() && rate == floor;
  company_->plain_plans = plain ? company_->plain_plans + 1 : 0;
  share();
}

// The rows that draft because it pays; it sets the price of time.
SharedStep::Ranked SharedStep::choose(const std::vector<DraftingRow>& ranked) {
  Ranked worthy;
  for (const DraftingRow& row : ranked) {
    if (pays_to_read(row)) worthy.push_back(row.acceptance);
  }
  const Plan found = best(worthy);
  if (!worthy.empty()) company_->gain = found.fair_rate / floor - kMargin;
  if (found.fair_rate <= floor * kMargin) return {};
  rate = found.rate;
  price = rows / found.ns;
  gamma = static_cast<int>(found.gamma);
  company_->probe_loss = 0;
  worthy.resize(plain_due() ? 0 : found.number);
  return worthy;
}

// The rows that draft to see what it comes to, where that is due.
SharedStep::Ranked SharedStep::probe(const std::vector<DraftingRow>& ranked) {
  Ranked rows_probing;
  for (const DraftingRow& row : ranked) rows_probing.push_back(row.acceptance);
  const Plan found = best(rows_probing);
  gamma = static_cast<int>(found.gamma);
  double reading = 0;
  for (std::size_t i = 0; i < found.number; ++i) reading += reading_ns(ranked[i].lacks);
  const double ns = found.ns + reading, least = kLeastProbeLoss * rows;
  const double loss = std::max({least, ns * (floor - found.rate), company_->probe_loss});
  const double due = std::min(kMaxProbeLoss * rows, loss) / (kProbing * rows) -
                     static_cast<double>(company_->steps_idle);
  probing = found.number > 0 && due <= 0;
  const double still = std::min(kRest, company_->plain_plans);
  rest = static_cast<int>(std::max(0.0, found.number > 0 ? std::min(still, due) : still));
  rows_probing.resize(probing ? found.number : 0);
  return rows_probing;
}

// The plan that makes the most of all rows, each by its own share.
SharedStep::Plan SharedStep::best(const Ranked& ranked) const {
  const std::vector<double>& costs = company_->verify;
  Plan found;
  std::vector<double> products(most_ + 1, 1), sums(most_ + 1, rows);
  for (std::size_t number = 1; number <= ranked.size(); ++number) {
    const std::vector<double>& tokens = ranked[number - 1]->tokens();
    for (std::size_t g = 1; g <= most_; ++g) {
      products[g] *= tokens[g];
      sums[g] += tokens[g] - 1.0;
      const double ns = (costs[width(number, g)] + draft_ns(number, g)) / company_->worth;
      const double fair = rows * std::pow(products[g], 1.0 / rows);
      found = std::max(found, Plan{fair / ns, sums[g] / ns, ns, number, g});
    }
  }
  return found;
}

// Whether what a row gains in the rest of its text is worth what its draft lacks.
bool SharedStep::pays_to_read(const DraftingRow& row) const {
  const double share = 1.0 - 1.0 / (1.0 + std::max(0.0, company_->gain));
  return row.room / floor * share >= reading_ns(row.lacks);
}

// What a draft takes to read what it lacks, beyond what a round leaves it.
double SharedStep::reading_ns(int lacks) const {
  return lacks <= static_cast<int>(most_) ? 0.0 : lacks * kReading * draft_ns(1, 1);
}

// Set what a row is charged.
void SharedStep::share() {
  const std::vector<double>& costs = company_->verify;
  const std::size_t count = chosen_.empty() ? static_cast<std::size_t>(rows) : chosen_.size();
  verify.clear();
  copying.clear();
  for (std::size_t g = 0; g <= most_; ++g) {
    verify.push_back((costs[width(count, g)] - costs[0]) / static_cast<double>(count));
    copying.push_back(costs[0] / rows + verify[g] / company_->worth);
  }
  going_on_.assign(most_ + 1, 0);
  going_on_[0] = chosen_.size();
  by_passes_.clear();
}

const std::vector<double>& SharedStep::drafting(std::size_t drafted) {
  const std::size_t many = std::max<std::size_t>(1, going_on_.at(drafted > 0 ? drafted - 1 : 0));
  std::vector<double>& table = by_passes_[many];
  const double share = static_cast<double>(many) * company_->worth;
  for (std::size_t g = table.size(); g <= most_; ++g) {
    table.push_back(copying[g] + draft_ns(many, g) / share);
  }
  return table;
}

// The place of a step in the table of costs.
std::size_t SharedStep::width(std::size_t number, std::size_t g) const {
  return g * (padded_ ? static_cast<std::size_t>(rows) : number);
}

// What drafting takes where so many rows do.
double SharedStep::draft_ns(std::size_t number, std::size_t passes) const {
  return line_.at(drafts_.at(passes), static_cast<double>(number - 1) * drafts_[passes]);
}

bool SharedStep::plain_due() const {
  const double loss = rate / floor - 1.0, counted = loss * (1.0 + loss / kDoubt);
  return first() ||
         static_cast<double>(company_->steps_drafted) >= std::min(kMaxDrafting, counted / kProbing);
}

bool SharedStep::first() const {
  return rows > 1 && company_->plain_times() == 0 && company_->plans <= kTrust;
}

bool SharedStep::drafts(const Acceptance& row) const {
  return std::find(chosen_.begin(), chosen_.end(), &row) != chosen_.end();
}

void SharedStep::settle(const StepTimes& step) {
  const int drafted = padded_ ? step.widest * rows : step.drafted;
  const auto ns = static_cast<double>(step.draft_ns + step.verify_ns);
  const double promised = rate > floor ? rate / company_->worth : floor;
  const bool measured = step.verify_ns > 0;
  if (measured) {
    company_->judge(step.made, ns * (drafted > 0 ? promised : floor), step.steps, drafted > 0);
  }
  if (measured && rows > 1) {
    const double verify_ns = static_cast<double>(step.verify_ns) / step.steps;
    company_->record(static_cast<std::size_t>(drafted), verify_ns);
    if (step.passes > 0) {
      const double ns_alone = drafts_.at(static_cast<std::size_t>(step.passes));
      line_.record(ns_alone, (step.drafting - 1) * ns_alone, static_cast<double>(step.draft_ns));
    }
  }
  const bool counts = drafted > 0 && !probing;
  company_->steps_drafted = counts ? company_->steps_drafted + 1 : 0;
  company_->steps_idle = counts || probing ? 0 : company_->steps_idle + step.steps;
  if (probing) company_->probe_loss = std::min(kMaxProbeLoss * rows, ns * floor - step.made);
}

}  // namespace specrt::speculation
