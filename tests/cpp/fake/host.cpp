#include <new>
#include <stdexcept>

#include "fake.hpp"
#include "implementation.hpp"
#include "run.hpp"

namespace specrt {

namespace fake {

Alive& alive() {
  static Alive counts;
  return counts;
}

namespace {

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
    if (slots_made_ > 0 && alive().slots > 0 && alive().hosts == 1) ++alive().misuses;
    --alive().hosts;
  }

  Info info() override {
    Info info;
    info.name = name_;
    info.backend = "fake";
    info.precision = "fp32";
    info.max_length = 64;
    info.vocabulary = 100;
    info.rows = 2;
    info.max_gamma = 8;
    info.has_draft = true;
    info.has_tokenizer = name_ != "blind";
    return info;
  }
  std::unique_ptr<Slot> slot() override {
    ++slots_made_;
    return std::make_unique<FakeSlot>();
  }
  std::vector<Token> encode(const std::string& text) override {
    if (name_ == "blind") throw Failure(SPECRT_UNSUPPORTED, "no tokenizer is here");
    return {text.begin(), text.end()};
  }
  std::string decode(const std::vector<Token>& ids) override {
    std::string text;
    for (const Token id : ids) text += id == 0 ? "\xC3\xA9" : std::string(1, static_cast<char>(id));
    return text;
  }

 private:
  std::string name_;
  std::atomic<int> slots_made_{0};
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
