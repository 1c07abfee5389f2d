// How far to draft, given costs and chances: an optimal stopping rule.
#pragma once

#include <vector>

namespace specrt::native {

// Where a round stops. The reach of a token is the chance that it and all before it are kept.
struct Plan {
  int gamma = 0;             // the best number of tokens to draft where all look alike
  double rate = 0;           // tokens per nanosecond that this comes to
  std::vector<double> keep;  // at k, the reach the k-th token needs to be verified
  std::vector<double> more;  // at k, the reach needed after k tokens to draft another
};

// What a round costs by the number of its drafted tokens, in nanoseconds.
struct Prices {
  std::vector<double> verify;
  std::vector<double> draft;
  std::vector<double> total;
  std::vector<double> wider;  // at k, what verifying one token more than k adds
  std::vector<double> step;   // at k, what drafting one token more than k adds
  std::vector<int> landings;  // at k, how far a draft that goes beyond k tokens is best planned

  Prices() = default;
  Prices(std::vector<double> verify_ns, std::vector<double> draft_ns, double outside_ns);
};

// For each gamma, the next one on the lower convex hull of the costs. Where widths cost in stairs,
// one more token may cost a whole stair, and only the end of the stair is worth climbing to.
std::vector<int> landings(const std::vector<double>& total);

// Plan a round. `chances` are those of a token at each place, `surest` those of the surest tokens
// there, which are a `share` of all. `rate` is what there is to beat: tokens per nanosecond without
// drafting. A token is worth the time the best round takes to emit one. Drafting another costs a
// draft step and, where it is kept, a wider verify pass; it pays when its chance times the reach so
// far is worth more, either whatever it turns out to be, or if it is kept only when it is sure.
// Since the reach only falls, looking one token ahead is optimal where every width costs as much
// more as the one before (the monotone case); where it does not, the next landing is tried too.
// Source: Chow, Robbins and Siegmund 1971, Great Expectations, chapter 3.
Plan plan(const Prices& prices, const std::vector<double>& chances,
          const std::vector<double>& surest, double share, double rate);

}  // namespace specrt::native
