// What passes cost now: costs measured before, corrected by what rounds take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "native/speculation/costs.hpp"
#include "native/speculation/plan.hpp"

namespace specrt::native {

// Three factors on measured costs: of every target pass, of what width adds, of the draft.
//
// A busy machine slows all passes; contexts that grow, or cores that are taken away, change what a
// wider pass costs beside a plain one. Passes of every width tell about both, as far as they can be
// told apart. One pass that took a hundred times too long counts as half as long again.
// Source: a Kalman filter of two states, on means of many passes.
class Drift {
 public:
  Drift(const Costs& costs, int most);

  // Take note of what a target pass took.
  void time_verify(std::size_t drafted, std::int64_t ns);
  // Take note of what so many draft steps took; where they cost nothing, it is ignored. A draft
  // that is not warm had tokens to catch up with: it tells only that it is no slower.
  void time_draft(std::size_t steps, std::int64_t ns, bool warm);
  // Correct the prices by what was noted since.
  void settle();

  const Prices& prices() const { return prices_; }

 private:
  struct Note {
    double total = 0;
    double count = 0;
  };

  void settle_draft();
  void price();

  double plain_;
  std::vector<double> wider_;
  std::vector<double> steps_;
  double outside_;
  double level_ = 1.0, slope_ = 1.0, pace_ = 1.0;
  double level_doubt_, shared_doubt_, slope_doubt_, pace_doubt_;
  std::vector<Note> verified_;
  Note drafted_;
  Prices prices_;
};

}  // namespace specrt::native
