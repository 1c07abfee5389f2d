// How likely a drafted token is to be kept; specrt.speculation.acceptance has the reasons.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace specrt::speculation {

// How likely the text is to become easier or harder from one round to the next.
constexpr double kSwitchChance = 0.01;

// The chance of each drafted token, given its place and its drafter's confidence: a belief over how
// easy the text is, and weights of being surer than usual, of being less sure, and of the place.
class Acceptance {
 public:
  explicit Acceptance(std::size_t most);
  void begin() { drafted_.clear(); }
  double expect(std::size_t place, double confidence);      // chance of the next drafted token
  void learn(std::size_t accepted, std::size_t evaluated);  // what became of the draft
  void mix_with_usual(double chance);                       // the text may be another one now
  // Whether the drafter ever told how sure it is.
  bool has_confidence() const { return has_confidence_; }
  // By number of tokens of usual confidence, the chance that all of them are kept, and how many a
  // round that drafts them is expected to emit.
  const std::vector<double>& reach() const { return reach_; }
  const std::vector<double>& tokens() const { return tokens_; }

 private:
  static constexpr std::size_t kLevels = 9;
  using Belief = std::array<double, kLevels>;
  using Features = std::array<double, 3>;
  double times(const Features& features) const;
  void judge(const Features& features, double ease, bool right);

  Belief odds_, belief_, usual_;  // odds of a drafted token, by level: e^-4 to e^4
  std::vector<Belief> powers_;    // the chance that so many tokens are kept, by level
  Features weights_, seen_;       // `seen_`: how much evidence each weight rests on
  std::vector<Features> drafted_;
  std::vector<double> ease_;  // odds at each place, given that the tokens before it are kept
  std::vector<double> reach_, tokens_;
  double mean_ = 1;  // log odds of the drafter's confidence; 73 % before any is known
  bool has_confidence_ = false;
};

}  // namespace specrt::speculation
