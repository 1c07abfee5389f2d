#include "abi/suggestion.hpp"

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace specrt::abi {

namespace {

constexpr double kNear = 0.6;
constexpr std::size_t kLongestCompared = 100;  // no option has a name as long

struct Common {
  std::size_t in_a = 0;
  std::size_t in_b = 0;
  std::size_t size = 0;
};

// The longest text that both hold; of several the first.
Common longest_common(std::string_view a, std::string_view b) {
  Common best;
  std::vector<std::size_t> ending(b.size() + 1, 0);  // of the common text before each place of b
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t j = b.size(); j-- > 0;) {
      ending[j + 1] = a[i] == b[j] ? ending[j] + 1 : 0;
    }
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t size = ending[j + 1];
      if (size > best.size) best = {i + 1 - size, j + 1 - size, size};
    }
  }
  return best;
}

// Characters in common, in order: of the longest common text, and of what is left and right of it.
std::size_t matching(std::string_view a, std::string_view b) {
  const Common common = longest_common(a, b);
  if (common.size == 0) return 0;
  return common.size + matching(a.substr(0, common.in_a), b.substr(0, common.in_b)) +
         matching(a.substr(common.in_a + common.size), b.substr(common.in_b + common.size));
}

double likeness(std::string_view a, std::string_view b) {
  const std::size_t both = a.size() + b.size();
  return both == 0 ? 1.0 : 2.0 * static_cast<double>(matching(a, b)) / static_cast<double>(both);
}

}  // namespace

std::string did_you_mean(const std::string& word, std::vector<std::string> known) {
  std::sort(known.begin(), known.end());
  std::string nearest;
  double best = kNear;
  for (const std::string& candidate : known) {
    const double near = word.size() > kLongestCompared ? 0.0 : likeness(candidate, word);
    if (near >= best) {
      best = near;
      nearest = candidate;
    }
  }
  if (!nearest.empty()) return "; did you mean '" + nearest + "'?";
  std::string list = "; known: ";
  for (std::size_t i = 0; i < known.size(); ++i) list += (i == 0 ? "" : ", ") + known[i];
  return list;
}

}  // namespace specrt::abi
