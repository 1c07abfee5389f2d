// Heads: small drafts that read, next to each token, the features that the target left before it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "native/engine/protocol.hpp"

namespace specrt::native {

// A head next to its target, fed with tokens at their own positions as any draft is. A token at
// position t is paired with the target's feature of position t - 1, and the pair stands at position
// t - 1 of the head's own KV buffers. A token that the head drafted itself is paired with what the
// last pass left instead. The first token of a text has no pair. See specrt.engine.head_engine.
//
// Source: EAGLE-3, Li et al. 2025, arXiv:2503.01840.
class HeadEngine : public Engine {
 public:
  // `engine` runs the graph of the head; `target` leaves so many features at each position, and
  // outlives this.
  HeadEngine(std::unique_ptr<Engine> engine, const Engine& target, std::size_t features);

  Output forward(const Token* tokens, std::size_t width, std::size_t start,
                 std::size_t rows) override;
  Output forward_recursive(Token token, std::size_t start) override;
  const Geometry& geometry() const override { return engine_->geometry(); }
  std::size_t max_length() const override { return engine_->max_length(); }
  std::size_t max_width() const override { return engine_->max_width(); }
  bool remembers() const override { return geometry().lent().empty(); }

 private:
  Output pass(const Token* tokens, std::size_t width, std::size_t start, std::size_t rows,
              const float* hidden);

  std::unique_ptr<Engine> engine_;
  const Engine& target_;
  std::size_t features_;
  std::vector<float> state_;
};

}  // namespace specrt::native
