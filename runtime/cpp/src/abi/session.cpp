#include "abi/session.hpp"

#include <utility>

#include "abi/arguments.hpp"
#include "abi/figures.hpp"

namespace specrt::abi {

namespace {

Failure closed() {
  return Failure(SPECRT_CLOSED, "this session was closed, or its generator was; create another");
}

}  // namespace

Session::Turn::Turn(Session& session) : session_(session) {
  if (session.busy_.exchange(true)) {
    throw Failure(SPECRT_BUSY,
                  "another call runs on this session; wait for it, or create a session for each "
                  "thread");
  }
}

Session::Session(std::shared_ptr<Generator> generator)
    : generator_(std::move(generator)), slot_(generator_->host().slot()) {}

Session::~Session() = default;

void Session::require_given_out(std::uint64_t generation) const {
  if (generation <= generation_) return;
  invalid("generation " + std::to_string(generation) +
          " was never begun in this session; pass what specrt_begin gave");
}

void Session::require_current(std::uint64_t generation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (generation_ == 0) require_begun();
  if (generation == SPECRT_ANY_GENERATION) {
    invalid("generation is 0; pass what specrt_begin gave");
  }
  require_given_out(generation);
  if (generation == generation_) return;
  throw Failure(SPECRT_CANCELLED, "generation " + std::to_string(generation) +
                                      " of this session is over, and generation " +
                                      std::to_string(generation_) + " has followed it");
}

void Session::cancel(std::uint64_t generation) {
  std::unique_lock<std::mutex> lock(mutex_);
  require_given_out(generation);
  const bool any = generation == SPECRT_ANY_GENERATION;
  if (!active_ || !(any || generation == generation_)) return;
  cancelled_ = true;
  if (run_ == nullptr) return;  // it is being begun, and will be cancelled then
  // Without the lock: an implementation may wait in there for a pass that calls the application,
  // which may cancel too. The run stays as long as its count is above 0.
  Run* const run = run_.get();
  ++cancelling_;
  lock.unlock();
  run->cancel();
  lock.lock();
  --cancelling_;
  left_.notify_all();
}

void Session::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  cancel();
}

void Session::require_begun() const {
  if (run_ == nullptr) {
    invalid("nothing was generated in this session yet; call specrt_generate or specrt_begin");
  }
}

// Make way for another generation.
void Session::reserve() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_) throw closed();
  if (active_ && !cancelled_) {
    throw Failure(SPECRT_BUSY,
                  "a generation was begun in this session and not read to its end; read it with "
                  "specrt_next, or call specrt_session_cancel");
  }
  left_.wait(lock, [&] { return cancelling_ == 0; });
  const std::unique_ptr<Run> over = std::move(run_);
  ++generation_;
  active_ = true;
  cancelled_ = false;
  lock.unlock();  // `over` ends without it
}

std::uint64_t Session::begin(const Prompt& prompt, const Params& params) {
  check(params);
  const auto* ids = std::get_if<std::vector<Token>>(&prompt);
  if (ids != nullptr && ids->empty()) invalid("the prompt has no tokens; give at least one");
  if (ids != nullptr) require_tokens(generator_->info(), *ids);
  reserve();
  outcome_ = {};
  thrown_ = std::make_shared<CallbackError>();
  text_.clear();
  ids_.clear();
  json_.clear();
  try {
    Params own = params;
    processors_.clear();
    for (Processor& processor : own.processors) {
      processors_.emplace_back(new ProcessorGuard(processor, thrown_));
      processor = processors_.back()->guarded();
    }
    start(slot_->begin(prompt, own));
  } catch (...) {
    disarm();
    const std::lock_guard<std::mutex> lock(mutex_);
    active_ = false;
    if (closed_) throw closed();
    throw;
  }
  return generation_;  // changes in a turn only
}

void Session::start(std::unique_ptr<Run> run) {
  bool late = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    run_ = std::move(run);
    late = cancelled_;
  }
  if (late) run_->cancel();
}

bool Session::stopped() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return closed_ || cancelled_;
}

// Let a cancelled run see that it is, so that what it holds is free.
void Session::settle() noexcept {
  try {
    run_->next(chunk_);
  } catch (...) {  // it is over either way, and how was decided before
  }
}

// The application's processors are not called after the end, nor run at it: a cancelled run ends
// while another session's pass may be in one.
void Session::disarm() noexcept {
  for (const HeldProcessor& processor : processors_) processor->disarm();
}

// Take the end of the run as that of the generation.
void Session::finish() {
  disarm();
  const std::lock_guard<std::mutex> lock(mutex_);
  active_ = false;
  outcome_.ended = true;
  if (closed_) {
    outcome_.status = SPECRT_CLOSED;
    outcome_.message = closed().what();
  } else if (cancelled_) {
    outcome_.status = SPECRT_CANCELLED;
    outcome_.message = "the generation was cancelled; what came before was delivered";
  }
}

void Session::fail(specrt_status status, const std::string& message) {
  disarm();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    active_ = false;
    outcome_ = {true, status, message};
  }
  throw Failure(status, message);
}

void Session::tell_outcome() const {
  if (outcome_.status != SPECRT_OK) throw Failure(outcome_.status, outcome_.message);
}

// Run until there is a chunk; false at the end.
bool Session::step() {
  if (stopped()) {
    settle();
    return false;
  }
  bool more = false;
  try {
    more = run_->next(chunk_);
  } catch (const std::exception& error) {
    if (const auto thrown = thrown_->get()) fail(SPECRT_CALLBACK, *thrown);
    const auto* failure = dynamic_cast<const Failure*>(&error);
    const specrt_status status = failure == nullptr ? SPECRT_INTERNAL : failure->status();
    if (stopped() && (status == SPECRT_CANCELLED || status == SPECRT_CLOSED)) return false;
    fail(status, error.what());
  } catch (...) {
    fail(SPECRT_INTERNAL, "something was thrown that is no std::exception");
  }
  if (const auto thrown = thrown_->get()) fail(SPECRT_CALLBACK, *thrown);
  return more;
}

const specrt_chunk* Session::next() {
  require_begun();
  if (!outcome_.ended && step()) {
    text_ += chunk_.text;
    ids_.insert(ids_.end(), chunk_.ids.begin(), chunk_.ids.end());
    view_ = {chunk_.text.c_str(), chunk_.text.size(), chunk_.ids.data(),
             chunk_.ids.size(),   chunk_.accepted,    generation_};
    return &view_;
  }
  if (!outcome_.ended) finish();
  tell_outcome();
  return nullptr;
}

void Session::read(specrt_callback callback, void* user) {
  while (const specrt_chunk* chunk = next()) {
    if (callback == nullptr || tell(callback, user, *chunk, *thrown_) == 0) continue;
    cancel();
    if (const auto thrown = thrown_->get()) {
      settle();
      fail(SPECRT_CALLBACK, *thrown);
    }
  }
}

const std::string& Session::text() {
  require_begun();
  return text_;
}

const std::vector<Token>& Session::ids() {
  require_begun();
  return ids_;
}

specrt_stats Session::stats() {
  require_begun();
  stats_ = run_->stats();
  if (!outcome_.ended) {
    stats_.finish_reason.clear();
  } else if (outcome_.status == SPECRT_CANCELLED) {
    stats_.finish_reason = "cancelled";
  } else if (outcome_.status != SPECRT_OK) {
    stats_.finish_reason = "error";
  }
  return figures(stats_, ids_.size());
}

const std::string& Session::json() {
  require_begun();
  json_ = run_->json();
  return json_;
}

}  // namespace specrt::abi
