#include "fake.hpp"

#include <chrono>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>

#include "implementation.hpp"

namespace specrt {

namespace fake {

Alive& alive() {
  static Alive counts;
  return counts;
}

namespace {

class FakeRun : public Run {
 public:
  FakeRun(const Prompt& prompt, const Params& params, std::atomic<int>& occupied)
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
  ~FakeRun() override {
    --occupied_;
    --alive().runs;
  }

  bool next(Chunk& chunk) override {
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
    if (given_ > 0 && !scripted) return second();
    if (scripted && given_ == chunks_) return false;
    if (order_ == "process") process();
    chunk.text = "ab ";
    chunk.ids = {ids_.empty() ? static_cast<Token>(given_ % 100) : ids_[given_]};
    chunk.accepted = given_ == 0 ? 0 : 1;
    ++given_;
    over_ = false;
    return true;
  }

  void cancel() noexcept override {
    const std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = true;
    changed_.notify_all();
  }

  Stats stats() override {
    if (inside_) ++alive().misuses;
    Stats stats;
    stats.prompt_tokens = 7;
    stats.cached_tokens = 3;
    stats.rounds = given_ == 0 ? 0 : given_ - 1;
    stats.drafted = 8;
    stats.evaluated = 4;
    stats.accepted = 2;
    stats.emitted = stats.rounds * 3;
    stats.queue_ms = 1.5;
    stats.ttft_ms = 2.5;
    stats.seed = params_.seed.value_or(11);
    stats.gamma = params_.gamma.value_or(kAuto);
    stats.drafter = params_.drafter.empty() ? "model" : params_.drafter;
    stats.finish_reason = "length";  // also before its end, as one that runs ahead has it
    return stats;
  }

  std::vector<Logprobs> logprobs(bool of_prompt) override {
    if (of_prompt) return {};
    const Logprobs one = {{5, -0.5, 2}, {6, -0.25, 1}};
    return std::vector<Logprobs>(params_.logprobs ? given_ : 0, one);
  }

  std::string json() override {
    std::this_thread::sleep_for(std::chrono::microseconds(100));  // as it takes a while
    return "{\"chunks\": " + std::to_string(given_) + "}";
  }

 private:
  bool second() {
    if (order_ == "fail") throw Failure(SPECRT_ENGINE, "the pass\nfailed");
    if (order_ == "bug") throw std::logic_error("a bug");
    if (order_ == "odd") throw 42;
    if (order_ != "block") return false;
    std::unique_lock<std::mutex> lock(mutex_);
    ++alive().blocked;
    changed_.wait(lock, [&] { return cancelled_; });
    --alive().blocked;
    return false;
  }

  void process() {
    std::vector<float> scores(8, 0.0f);
    const Token ids[] = {1, 2, 3};
    for (const Processor& processor : params_.processors)
      if (processor.function(processor.user, ids, 3, scores.data(), scores.size()) != 0)
        throw Failure(SPECRT_CALLBACK, "a processor stopped");
  }

  Params params_;
  std::string order_;
  std::vector<Token> ids_;
  std::size_t chunks_ = 0;  // how many there will be
  std::size_t given_ = 0;
  bool over_ = false;
  std::atomic<int>& occupied_;
  std::atomic<bool> inside_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool cancelled_ = false;
};

class FakeSlot : public Slot {
 public:
  FakeSlot() { ++alive().slots; }
  ~FakeSlot() override {
    if (runs_ != 0) ++alive().misuses;
    --alive().slots;
  }
  std::unique_ptr<Run> begin(const Prompt& prompt, const Params& params) override {
    const auto* text = std::get_if<std::string>(&prompt);
    if (text != nullptr && *text == "refuse") throw Failure(SPECRT_CAPACITY, "the prompt is long");
    return std::make_unique<FakeRun>(prompt, params, runs_);
  }

 private:
  std::atomic<int> runs_{0};
};

class FakeHost : public Host {
 public:
  explicit FakeHost(std::string name) : name_(std::move(name)) { ++alive().hosts; }
  ~FakeHost() override {
    if (slots_ > 0 && alive().slots > 0 && alive().hosts == 1) ++alive().misuses;
    --alive().hosts;
  }

  Info info() override {
    const std::string notices = name_ == "noted" ? "one\ntwo\n" : "";
    return {name_, "fake", "fp32", 64, 100, 2, 8, true, !blind(), notices, 1, {2, 3}};
  }
  std::string token_bytes(Token token) override { return std::string(2, static_cast<char>(token)); }
  Memory memory() override { return {64, 32}; }
  std::unique_ptr<Slot> slot() override {
    ++slots_;
    return std::make_unique<FakeSlot>();
  }
  std::vector<Token> encode(const std::string& text) override {
    if (blind()) throw Failure(SPECRT_UNSUPPORTED, "no tokenizer is here");
    return {text.begin(), text.end()};
  }
  std::string decode(const std::vector<Token>& ids) override {
    std::string text;
    for (const Token id : ids) text += id == 0 ? "\xC3\xA9" : std::string(1, static_cast<char>(id));
    return text;
  }

 private:
  bool blind() const { return name_ == "blind"; }

  std::string name_;
  std::atomic<int> slots_{0};
};

}  // namespace
}  // namespace fake

std::unique_ptr<Host> open_bundle(const std::string& path, const OpenOptions& options) {
  if (path == "missing") throw Failure(SPECRT_BUNDLE, "no bundle is at missing");
  if (path == "memory") throw std::bad_alloc();
  if (path == "bug") throw std::runtime_error("a bug in opening");
  if (options.threads == 77) throw Failure(SPECRT_OK, "a failure that is none");
  return std::make_unique<fake::FakeHost>(path);
}

// No lock is here.
LockRelease::LockRelease() noexcept = default;
LockRelease::~LockRelease() = default;

std::string implementation_name() { return "fake"; }

void shut_down() {
  ++fake::alive().shutdowns;
  if (fake::alive().hosts != 0 || fake::alive().runs != 0) ++fake::alive().misuses;
}

}  // namespace specrt
