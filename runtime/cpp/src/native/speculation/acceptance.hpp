// How likely drafted tokens are to be kept: a running estimate that follows the text.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

namespace specrt::native {

// The chance of each drafted token, given its place and its drafter's confidence.
//
// The log odds are a sum: how easy the text is now, an offset of the place in the draft, an offset
// of the band its confidence is in. How easy the text is now is a belief over a few levels,
// corrected by every token judged, and mixed each round with what texts are usually like, in case
// it has turned. A steady text so gives a steady estimate, and one that alternates is followed
// within two or three rounds. The offsets are refitted every few rounds by a damped Newton step of
// a logistic regression on discounted counts. A place is drawn to the place before it, a band to
// what its confidence says, and surer bands are never held less likely. Sums run from the first
// to the last, as the Python runtime's do: both come to the same decisions.
// Source: the forward algorithm of a hidden Markov model, Rabiner 1989, section III.A.
class Acceptance {
 public:
  explicit Acceptance(int most);

  // Expect a new draft.
  void begin() { tokens_.clear(); }
  // The chance of the next drafted token, given that those before it are kept. `place` is counted
  // from 0. A confidence that is no probability tells nothing.
  double expect(std::size_t place, double confidence);
  // Learn what became of the draft: how many tokens were judged, how many of them kept.
  void learn(std::size_t accepted, std::size_t evaluated);
  // The chance of a token at each place, in a text of given ease.
  std::vector<double> chances(double odds, double offset = 0.0) const;
  // The mean offset of the surest tokens, and what share of all tokens they are. `share` is the
  // least they should be; a band is taken as a whole. While hardly any token was judged they are
  // all alike.
  std::pair<double, double> surest(double share) const;
  // Correct the offsets by what was judged since, and forget some of what was before.
  void refit();

  // The chance of the first token, whatever its confidence.
  double mean() const { return mean_; }

 private:
  static constexpr std::size_t kLevels = 8;
  static constexpr std::size_t kBands = 13;
  static constexpr std::size_t kFine = 128;
  using Levels = std::array<double, kLevels>;
  using Bands = std::array<double, kBands>;
  struct Expected {
    std::size_t band;
    double chance;
  };

  void judge(std::size_t place, const Expected& token, bool kept);
  void refit_places();
  void refit_bands();
  void summarise();
  const Levels& likelihood(std::size_t accepted, double offset);

  std::vector<double> places_;  // offset of each place, that of the first being 0
  Bands bands_;                 // offset of each band of confidence, 0 on average
  Bands seen_;                  // how many tokens of each band were judged lately
  Levels belief_, usual_, change_, chances_;
  std::map<std::pair<std::size_t, long>, Levels> likelihoods_;
  std::array<std::size_t, kFine> table_;  // the band of a confidence
  std::vector<Expected> tokens_;
  Bands band_gaps_{};
  std::vector<double> place_gaps_;
  std::vector<double> depths_;
  double mean_ = 0.0, odds_ = 0.0;
};

}  // namespace specrt::native
