// An implementation whose generations do what their prompt says:
//
//   count N   N chunks, each of the text "ab " and one token
//   forever   chunks until it is cancelled
//   block     one chunk, then a pass that goes on until it is cancelled
//   fail      one chunk, then a pass that fails
//   bug       one chunk, then an exception that is not a Failure
//   odd       one chunk, then something thrown that is not an exception
//   refuse    not even begun
//   process   one chunk for each processor, called on the way; ends with their sum of scores
//
// A prompt of token ids comes back, a chunk for each. Bundles: "missing", "memory" and "bug" fail
// to open, "blind" has no tokenizer, every other name opens.
#pragma once

#include <atomic>

namespace specrt::fake {

// What is alive, to see that nothing outlives what it came from.
struct Alive {
  std::atomic<int> hosts{0};
  std::atomic<int> slots{0};
  std::atomic<int> runs{0};
  std::atomic<int> blocked{0};  // passes that wait to be cancelled
  std::atomic<int> misuses{0};  // calls that the contract of implementation.hpp rules out
  std::atomic<int> shutdowns{0};
};

Alive& alive();

}  // namespace specrt::fake
