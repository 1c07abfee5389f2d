#include "run.hpp"

#include <limits>
#include <stdexcept>

#include "fake.hpp"

namespace specrt::fake {

FakeRun::FakeRun(const Prompt& prompt, const Params& params, std::atomic<int>& occupied)
    : params_(params), occupied_(occupied) {
  ++alive().runs;
  if (++occupied_ > 1) ++alive().misuses;  // a slot has one run
  if (const auto* ids = std::get_if<std::vector<Token>>(&prompt)) {
    order_ = "count";
    ids_ = *ids;
    chunks_ = ids_.size();
    return;
  }
  const std::string& text = std::get<std::string>(prompt);
  order_ = text.substr(0, text.find_first_of(" \n"));
  if (order_ == "count") chunks_ = std::stoul(text.substr(6));
  if (order_ == "forever") chunks_ = std::numeric_limits<std::size_t>::max();
  if (order_ == "process") chunks_ = 1;
}

FakeRun::~FakeRun() {
  --occupied_;
  --alive().runs;
}

bool FakeRun::next(Chunk& chunk) {
  if (inside_.exchange(true) || over_) ++alive().misuses;  // two at once, or after the end
  struct Leave {
    std::atomic<bool>& inside;
    ~Leave() { inside = false; }
  } leave{inside_};
  over_ = true;  // but for what goes on below
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (cancelled_) return false;
  }
  const bool scripted = order_ == "count" || order_ == "forever" || order_ == "process";
  if (told_ > 0 && !scripted) return second(chunk);
  if (scripted && told_ == chunks_) return false;
  if (order_ == "process") process();
  chunk.text = "ab ";
  chunk.ids = {ids_.empty() ? static_cast<Token>(told_ % 100) : ids_[told_]};
  chunk.accepted = told_ == 0 ? 0 : 1;
  ++told_;
  over_ = false;
  return true;
}

bool FakeRun::second(Chunk&) {
  if (order_ == "block") return block();
  if (order_ == "fail") throw Failure(SPECRT_ENGINE, "the pass\nfailed");
  if (order_ == "bug") throw std::logic_error("a bug");
  if (order_ == "odd") throw 42;
  return false;
}

bool FakeRun::block() {
  std::unique_lock<std::mutex> lock(mutex_);
  ++alive().blocked;
  changed_.wait(lock, [&] { return cancelled_; });
  --alive().blocked;
  return false;
}

void FakeRun::process() {
  std::vector<float> scores(8, 0.0f);
  const Token ids[] = {1, 2, 3};
  for (const Processor& processor : params_.processors) {
    if (processor.function(processor.user, ids, 3, scores.data(), scores.size()) != 0) {
      throw Failure(SPECRT_CALLBACK, "a processor stopped");
    }
  }
}

void FakeRun::cancel() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  cancelled_ = true;
  changed_.notify_all();
}

Stats FakeRun::stats() {
  if (inside_) ++alive().misuses;
  Stats stats;
  stats.prompt_tokens = 7;
  stats.cached_tokens = 3;
  stats.rounds = told_ == 0 ? 0 : told_ - 1;
  stats.drafted = 8;
  stats.evaluated = 4;
  stats.accepted = 2;
  stats.emitted = stats.rounds * 3;
  stats.seed = params_.seed.value_or(11);
  stats.gamma = params_.gamma.value_or(kAuto);
  stats.drafter = params_.drafter.empty() ? "model" : params_.drafter;
  stats.finish_reason = "length";  // also before its end, as one that runs ahead has it
  return stats;
}

std::string FakeRun::json() { return "{\"chunks\": " + std::to_string(told_) + "}"; }

}  // namespace specrt::fake
