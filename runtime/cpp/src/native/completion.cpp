#include "native/completion.hpp"

#include <algorithm>

namespace specrt::native {

namespace {

// The median gap between deliveries, each gap shared by the tokens that came with it.
double median_gap_ms(const std::vector<std::pair<std::int64_t, std::size_t>>& arrivals) {
  std::vector<double> gaps;
  for (std::size_t i = 1; i < arrivals.size(); ++i) {
    const auto [time, count] = arrivals[i];
    const auto gap = static_cast<double>(time - arrivals[i - 1].first);
    gaps.insert(gaps.end(), count, gap / static_cast<double>(std::max<std::size_t>(count, 1)));
  }
  if (gaps.empty()) {
    return 0.0;
  }
  std::sort(gaps.begin(), gaps.end());
  const std::size_t middle = gaps.size() / 2;
  const double median = gaps.size() % 2 != 0 ? gaps[middle] : (gaps[middle - 1] + gaps[middle]) / 2;
  return median / 1e6;
}

}  // namespace

void Completion::count(const Round& round, std::size_t kept, std::int64_t time_ns) {
  if (!arrivals.empty()) {
    ++rounds;
    drafted += round.drafted;
    evaluated += round.evaluated();
    accepted += round.accepted;
    emitted += kept;
    if (round.drafted > 0) {
      auto& [its_drafted, its_accepted] = sources[round.source];
      its_drafted += round.drafted;
      its_accepted += round.accepted;
    }
  }
  arrivals.emplace_back(time_ns, kept);
}

Stats Completion::stats() const {
  Stats s;
  s.prompt_tokens = prompt_tokens;
  s.cached_tokens = cached_tokens;
  s.rounds = rounds;
  s.drafted = drafted;
  s.evaluated = evaluated;
  s.accepted = accepted;
  s.emitted = emitted;
  s.seed = seed;
  s.gamma = gamma;
  s.drafter = drafter;
  s.finish_reason = finish_reason;
  s.fallback = fallback;
  if (!arrivals.empty()) {
    s.ttft_ms = static_cast<double>(arrivals.front().first - began_ns) / 1e6;
  }
  s.itl_ms = median_gap_ms(arrivals);
  if (arrivals.size() > 1) {
    const auto took = static_cast<double>(arrivals.back().first - arrivals.front().first);
    const std::size_t tokens = ids.size() - std::min(ids.size(), arrivals.front().second);
    s.tokens_per_second = took > 0 ? static_cast<double>(tokens) / (took / 1e9) : 0.0;
  }
  return s;
}

}  // namespace specrt::native
