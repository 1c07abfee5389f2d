// A completion as JSON.
#include "native/completion.hpp"

#include <algorithm>

#include "native/text/json.hpp"
#include "native/text/tokenizer.hpp"

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

void Completion::count(const Round& round, std::size_t delivered, std::int64_t time_ns) {
  if (!arrivals.empty()) {
    ++rounds;
    drafted += round.drafted;
    evaluated += round.evaluated();
    accepted += round.accepted;
    emitted += delivered;
    if (round.drafted > 0) {
      auto& [its_drafted, its_accepted] = sources[round.source];
      its_drafted += round.drafted;
      its_accepted += round.accepted;
    }
  }
  arrivals.emplace_back(time_ns, delivered);
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

namespace {

// What JSON, which knows no infinity, says of a token that the model rules out.
constexpr double kLeast = -9999.0;

double share(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

// Items one after the other, `between` brackets.
template <typename Items, typename Write>
std::string listed(const Items& items, const char* brackets, Write write) {
  std::string text(1, brackets[0]);
  for (const auto& item : items) {
    text += (text.size() > 1 ? ", " : "") + write(item);
  }
  return text + brackets[1];
}

Logprobs told(const Ranked& ranked) {
  Logprobs all = {{ranked.token, ranked.logprob, ranked.rank}};
  for (std::size_t i = 0; i < ranked.ids.size(); ++i) {
    if (ranked.ids[i] != ranked.token) all.push_back({ranked.ids[i], ranked.logprobs[i], i + 1});
  }
  return all;
}

std::string entry(const Ranked& ranked, const Tokenizer& tokenizer) {
  return listed(told(ranked), "{}", [&](const specrt_logprob& one) {
    return quoted(std::to_string(one.token)) +
           ": {\"logprob\": " + decimal(std::max(one.logprob, kLeast)) +
           ", \"rank\": " + std::to_string(one.rank) +
           ", \"decoded_token\": " + quoted(tokenizer.piece(one.token)) + "}";
  });
}

std::string or_null(const std::string& text) { return text.empty() ? "null" : quoted(text); }

std::string speculation(const Completion& done) {
  const auto source = [](const auto& item) {
    return quoted(item.first) + ": {\"drafted\": " + std::to_string(item.second.first) +
           ", \"accepted\": " + std::to_string(item.second.second) + "}";
  };
  return "{\"gamma\": " + (done.gamma == kAuto ? "\"auto\"" : std::to_string(done.gamma)) +
         ", \"drafter\": " + quoted(done.drafter) + ", \"fallback\": " + or_null(done.fallback) +
         ", \"rounds\": " + std::to_string(done.rounds) +
         ", \"drafted\": " + std::to_string(done.drafted) +
         ", \"evaluated\": " + std::to_string(done.evaluated) +
         ", \"accepted\": " + std::to_string(done.accepted) +
         ", \"emitted\": " + std::to_string(done.emitted) +
         ", \"acceptance_rate\": " + decimal(share(done.accepted, done.evaluated), 4) +
         ", \"draft_yield\": " + decimal(share(done.accepted, done.drafted), 4) +
         ", \"tokens_per_round\": " + decimal(share(done.emitted, done.rounds), 4) +
         ", \"sources\": " + listed(done.sources, "{}", source) + "}";
}

std::string stop_reason(const Completion& done) {
  if (done.stop_token) {
    return std::to_string(*done.stop_token);
  }
  return done.stop_string ? quoted(*done.stop_string) : "null";
}

}  // namespace

std::vector<Logprobs> told(const std::vector<Ranked>& positions) {
  std::vector<Logprobs> all;
  for (const Ranked& ranked : positions) all.push_back(told(ranked));
  return all;
}

std::string Completion::json(const Tokenizer& tokenizer) const {
  const Stats times = stats();
  const auto written = [&](const Ranked& ranked) { return entry(ranked, tokenizer); };
  std::string object =
      "{\"text\": " + quoted(text) +
      ", \"token_ids\": " + listed(ids, "[]", [](Token token) { return std::to_string(token); }) +
      ", \"prompt_tokens\": " + std::to_string(prompt_tokens) +
      ", \"cached_tokens\": " + std::to_string(cached_tokens) +
      ", \"finish_reason\": " + or_null(finish_reason) +
      ", \"stop_reason\": " + stop_reason(*this) + ", \"seed\": " + std::to_string(seed) +
      ", \"queue_ms\": " + decimal(times.queue_ms, 3) +
      ", \"ttft_ms\": " + decimal(times.ttft_ms, 3) + ", \"itl_ms\": " + decimal(times.itl_ms, 3) +
      ", \"tokens_per_second\": " + decimal(times.tokens_per_second, 2) +
      ", \"speculation\": " + speculation(*this);
  if (wants_logprobs) {
    object += ", \"logprobs\": " + listed(logprobs, "[]", written);
  }
  if (prompt_logprobs) {
    const std::string entries = listed(*prompt_logprobs, "[]", written).substr(1);
    object += ", \"prompt_logprobs\": [null" +
              (entries == "]" ? "" : ", " + entries.substr(0, entries.size() - 1)) + "]";
  }
  return object + "}";
}

}  // namespace specrt::native
