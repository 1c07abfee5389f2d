// A compiled model as the rest of the native runtime sees it: one verb over KV buffers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "params.hpp"

namespace specrt::native {

// One thing that a layer keeps of a row from one pass to the next: keys and values; nothing where
// it reads those of an earlier layer, or in a head those of its target; past inputs of a
// convolution, of key_width numbers; or a state that each token changes, and what the latest tokens
// add to it.
struct LayerMemory {
  enum class Kind { attention, shared, conv, recurrent, lent };
  Kind kind = Kind::attention;
  int kv_heads = 0;  // or heads of a state
  int key_width = 0;
  int value_width = 0;
  int window = 0;     // latest positions that a token sees; 0: all
  int key_heads = 0;  // of a recurrent layer
  int owner = 0;      // whose keys and values are read: an earlier layer, or the target's

  // Whether it keeps the keys and values that a head reads.
  bool lends(const LayerMemory& lent) const {
    return kind == Kind::attention && kv_heads == lent.kv_heads && key_width == lent.key_width &&
           value_width == lent.value_width && window == lent.window;
  }
};

// Latest positions of a row that are not part of its states yet, at most.
constexpr int kTakenBack = 32;

// One tensor of a layer's memory, [batch, heads, positions, width], as "key.0".
struct MemoryBuffer {
  std::string name;
  int heads;
  int width;
  int seen;       // latest positions that a token reads, its own included; 0: all
  int fixed = 0;  // of a state: the width of its keys, in the place of positions
  int ring = 0;   // positions of a ring that does not go by what is seen

  // How many positions it has: all, or whole groups of 16 in a ring of those that a token reads and
  // a pass of `ring_width` tokens writes first, where these are fewer: position p lies at p modulo
  // so many. With a width of 0 an engine keeps no rings.
  std::size_t positions(std::size_t max_length, std::size_t ring_width) const {
    if (fixed > 0) return static_cast<std::size_t>(fixed);
    if (seen == 0 || ring_width == 0) return max_length;
    if (ring > 0) return static_cast<std::size_t>(ring);
    const std::size_t least = static_cast<std::size_t>(seen) + ring_width;
    return std::min((least + 15) / 16 * 16, max_length);
  }
};

struct Geometry {
  int heads = 0;
  int vocab_size = 0;
  int max_positions = 0;
  std::vector<LayerMemory> memories;

  // The tensors of all memories, in the order of the graph contract.
  std::vector<MemoryBuffer> buffers() const {
    std::vector<MemoryBuffer> found;
    const bool recurs = std::any_of(memories.begin(), memories.end(), [](const LayerMemory& one) {
      return one.kind == LayerMemory::Kind::recurrent;
    });
    for (std::size_t index = 0; index < memories.size(); index++) {
      const LayerMemory& own = memories[index];
      const std::string number = std::to_string(index);
      if (own.kind == LayerMemory::Kind::conv) {
        // Next to states, which go back no further, it holds no whole pass.
        const int ring = recurs ? (own.window - 1 + kTakenBack + 15) / 16 * 16 : 0;
        found.push_back({"conv." + number, 1, own.key_width, own.window, 0, ring});
      }
      if (own.kind == LayerMemory::Kind::recurrent) {
        const std::int64_t added = own.kv_heads * (std::int64_t{1} + own.value_width) +
                                   std::int64_t{own.key_heads} * own.key_width;
        constexpr std::int64_t kMost = std::numeric_limits<int>::max();  // of damaged sizes
        const int width = static_cast<int>(std::min(added, kMost));
        found.push_back({"state." + number, own.kv_heads, own.value_width, 0, own.key_width});
        found.push_back({"factors." + number, 1, width, kTakenBack, 0, kTakenBack});
      }
      if (own.kind != LayerMemory::Kind::attention) continue;
      found.push_back({"key." + number, own.kv_heads, own.key_width, own.window});
      found.push_back({"value." + number, own.kv_heads, own.value_width, own.window});
    }
    return found;
  }

  // The tensors that a head reads of its target, by name, and their names there.
  std::vector<std::pair<std::string, std::string>> lent() const {
    std::vector<std::pair<std::string, std::string>> found;
    for (std::size_t index = 0; index < memories.size(); index++) {
      if (memories[index].kind != LayerMemory::Kind::lent) continue;
      for (const std::string kind : {"key.", "value."})
        found.emplace_back(kind + std::to_string(index),
                           kind + std::to_string(memories[index].owner));
    }
    return found;
  }
};

// What a target remembers under a name, where a head can read it in place.
struct LentBuffer {
  void* data = nullptr;  // none where there is nothing
  std::vector<std::int64_t> shape;
};

// Scores that are not there as rows of the vocabulary, as those on a device: all rows are made at
// once, when one is read.
class DeferredScores {
 public:
  virtual ~DeferredScores() = default;
  virtual float* read() = 0;
};

// What a forward pass left: views that the next pass of the same engine overwrites.
struct Output {
  const Token* argmax;      // [rows]; -1 where a logit is NaN or the best one infinite
  float* logits;            // [rows, vocabulary]; a caller may edit them in place
  const float* confidence;  // [rows], probability of the likeliest; nullptr where not computed
  std::size_t rows;
  std::size_t vocabulary;
  DeferredScores* late = nullptr;  // where there is one, `logits` is nullptr, and `row` asks it
  const float* state = nullptr;    // of a head: what it goes on from, [rows, features]

  float* row(std::size_t i) const { return (late ? late->read() : logits) + i * vocabulary; }
};

// One compiled model over KV buffers of its own. Stateless about length: going back is feeding
// again from a smaller start. One thread at a time.
class Engine {
 public:
  virtual ~Engine() = default;
  // Write keys at start .. start + width, attend to all before and within, and score the last
  // `rows` positions. Throws Failure(SPECRT_ENGINE) where the pass is too wide or out of bounds.
  virtual Output forward(const Token* tokens, std::size_t width, std::size_t start,
                         std::size_t rows) = 0;
  // Feed one token that a head drafted itself: it goes on from what its last pass left, and not
  // from the target's features. Throws Failure(SPECRT_ENGINE) where the engine is not a head.
  virtual Output forward_recursive(Token token, std::size_t start);
  // The least position that it can go on from, but for 0, from which every text can: layers that
  // see the latest positions only have forgotten what they no longer see.
  virtual std::size_t rewind() const { return 0; }
  virtual const Geometry& geometry() const = 0;
  virtual std::size_t max_length() const = 0;
  virtual std::size_t max_width() const = 0;
  // What a target leaves at each position for a head, [max_length, features]; nullptr for none.
  virtual const float* features() const { return nullptr; }
  // What the graph of a head reads next to each token of the next pass, [max_width, features], to
  // be filled in before it; nullptr where it reads nothing.
  virtual float* hidden() { return nullptr; }
  virtual LentBuffer lent(const std::string&) const { return {}; }
  // Whether it keeps what it is fed; a head that reads its target's keys keeps nothing.
  virtual bool remembers() const { return true; }
};

// A compiled model whose weights are loaded once, for any number of engines. Any thread.
class Model {
 public:
  virtual ~Model() = default;
  virtual std::unique_ptr<Engine> engine() = 0;
  // The engine of a draft, for the texts of a target's engine, which outlives it.
  virtual std::unique_ptr<Engine> engine_beside(const Engine&) { return engine(); }
};

}  // namespace specrt::native
