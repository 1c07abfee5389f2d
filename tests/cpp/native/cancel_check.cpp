// A prompt that is cancelled while it is read: what was read of it counts.
#include "native/check.hpp"
#include "native/engine.hpp"

namespace specrt::checks {

namespace {

// An engine that is told, in its second pass, that nobody wants more.
class Interrupted : public native::Engine {
 public:
  native::Output forward(const Token*, std::size_t width, std::size_t start,
                         std::size_t rows) override {
    held = start + width;
    cancelled = ++passes == 2;
    return {&argmax, nullptr, nullptr, rows, 1};
  }
  const native::Geometry& geometry() const override { return shape; }
  std::size_t max_length() const override { return 100; }
  std::size_t max_width() const override { return 4; }

  std::size_t held = 0;
  int passes = 0;
  std::atomic<bool> cancelled{false};
  Token argmax = 0;
  native::Geometry shape;
};

int cancel(const native::Json&) {
  Interrupted engine;
  native::CachedTokens cache(engine);
  cache.cancelled = &engine.cancelled;
  const std::vector<Token> prompt(10, 1);
  try {
    cache.feed(prompt, 1);
    return differs("cancelled", "a whole prompt read", "two passes");
  } catch (const native::Cancelled&) {
  }
  const std::string found = std::to_string(cache.length) + " of " + std::to_string(engine.held);
  return found == "8 of 8" ? 0 : differs("cancelled", found, "8 of 8");
}

const Registered registered("cancel", cancel);

}  // namespace

}  // namespace specrt::checks
