#include "abi/processor_guard.hpp"

#include <limits>
#include <string>

namespace specrt::abi {

namespace {

// Whether every score is a number, or minus infinity.
bool are_scores(const float* scores, std::size_t count) {
  bool holds = true;
  for (std::size_t i = 0; i < count; ++i) {
    holds &= scores[i] <= std::numeric_limits<float>::max();  // NaN is not
  }
  return holds;
}

thread_local int calls = 0;  // of processors, that run on this thread

// An owner for as long as a call runs.
class Holding {
 public:
  explicit Holding(ProcessorGuard* guard) : guard_(guard) {
    ProcessorGuard::hold(guard_, 1);
    ++calls;
  }
  ~Holding() {
    --calls;
    ProcessorGuard::hold(guard_, -1);
  }
  Holding(const Holding&) = delete;
  Holding& operator=(const Holding&) = delete;

 private:
  ProcessorGuard* guard_;
};

}  // namespace

bool ProcessorGuard::is_within() noexcept { return calls > 0; }

void ProcessorGuard::disarm() noexcept {
  armed_ = false;
  if (is_within()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
}

std::int32_t ProcessorGuard::run(void* self, const std::int64_t* ids, std::size_t count,
                                 float* scores, std::size_t vocabulary) noexcept {
  auto* const guard = static_cast<ProcessorGuard*>(self);
  const Holding held(guard);
  const std::lock_guard<std::mutex> lock(guard->mutex_);
  const Processor& processor = guard->processor_;
  if (!guard->armed_) return 1;  // the generation has ended
  const std::int32_t returned = guarded_call("a logits processor", *guard->error_, [&] {
    return processor.function(processor.user, ids, count, scores, vocabulary);
  });
  if (returned != 0) {  // where it threw, that came first
    guard->error_->set("a logits processor returned " + std::to_string(returned) +
                       "; expected 0 to go on");
    return returned;
  }
  if (are_scores(scores, vocabulary)) return 0;
  guard->error_->set(
      "a logits processor left NaN or infinity among the scores; expected scores, and -inf for "
      "what must not come");
  return 1;
}

void ProcessorGuard::hold(void* self, std::int32_t by) noexcept {
  auto* const guard = static_cast<ProcessorGuard*>(self);
  if (guard->owners_.fetch_add(by) + by == 0) delete guard;
}

}  // namespace specrt::abi
