#include "abi/session.hpp"

#include <utility>

#include "abi/arguments.hpp"
#include "abi/figures.hpp"
#include "abi/log.hpp"

namespace specrt::abi {

namespace {

Failure closed() {
  return Failure(SPECRT_CLOSED, "this session was closed, or its generator was; create another");
}

const auto kNobody = std::thread::id();

}  // namespace

Session::Turn::Turn(Session& session, bool reads) : session_(session) {
  const std::lock_guard<std::mutex> lock(session.mutex_);
  is_first_ = session.owner_ == kNobody;
  const auto caller = std::this_thread::get_id();
  if (is_first_) {
    session.owner_ = caller;
  } else if (!reads || session.owner_ != caller || !session.is_telling_) {
    throw Failure(SPECRT_BUSY,
                  "another call runs on this session; wait for it, or create a session for each "
                  "thread");
  }
}

Session::Turn::~Turn() {
  if (!is_first_) return;
  const std::lock_guard<std::mutex> lock(session_.mutex_);
  session_.owner_ = kNobody;
  session_.changed_.notify_all();
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
  changed_.notify_all();
}

void Session::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  cancel();
  disarm();  // another thread may have the turn, and hold this session beyond its close
}

// Wait for the turn; false where the generation is over before.
bool Session::take_turn(std::uint64_t generation) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (generation == SPECRT_ANY_GENERATION) generation = generation_;
  const auto is_over = [&] { return generation != generation_ || !active_; };
  const auto caller = std::this_thread::get_id();
  const bool is_inside = ProcessorGuard::is_within() || owner_ == caller;
  changed_.wait(lock, [&] { return is_inside || owner_ == kNobody || is_over(); });
  if (is_over()) return false;
  if (is_inside) {
    lock.unlock();
    disarm();
    throw Failure(SPECRT_BUSY,
                  "within a callback or a processor no generation can end; it is cancelled, and "
                  "ends when that has returned");
  }
  owner_ = caller;
  return true;
}

void Session::end(std::uint64_t generation) {
  cancel(generation);
  if (!take_turn(generation)) return;
  const Turn turn(*this, std::adopt_lock);
  settle();
  finish();
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
  changed_.wait(lock, [&] { return cancelling_ == 0; });
  const std::unique_ptr<Run> over = std::move(run_);
  if (active_) {  // Cancelled and not read on: who waits for its end frees its processors then.
    lock.unlock();
    disarm();
    lock.lock();
    active_ = false;
    if (closed_) throw closed();
  }
  ++generation_;
  active_ = true;
  cancelled_ = false;
  changed_.notify_all();
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
  try {
    Params own = params;
    std::vector<HeldProcessor> processors;
    for (Processor& processor : own.processors) {
      processors.emplace_back(new ProcessorGuard(processor, thrown_), LetGo());
      processor = processors.back()->guarded();
    }
    arm(std::move(processors));
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

// Have processors of its own; none is called where it was ended meanwhile.
void Session::arm(std::vector<HeldProcessor> processors) {
  auto own = std::make_shared<const std::vector<HeldProcessor>>(std::move(processors));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    processors_.swap(own);
  }
  if (stopped()) disarm();
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
  std::unique_lock<std::mutex> lock(mutex_);
  const auto processors = processors_;
  lock.unlock();  // a processor may cancel and close
  if (processors == nullptr) return;
  for (const HeldProcessor& processor : *processors) processor->disarm();
}

// Take the end of the run as that of the generation.
void Session::finish() {
  disarm();
  log_fallback();
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

// Tell why speculation went off. To ask for it takes a call into the implementation.
void Session::log_fallback() noexcept {
  if (!has_log()) return;
  try {
    const std::string fallback = run_->stats().fallback;
    if (!fallback.empty()) log(SPECRT_LOG_WARNING, ("speculation is off: " + fallback).c_str());
  } catch (...) {  // of a generation that is over there is nothing to tell
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
    // A disarmed processor fails too.
    const bool is_end = status == SPECRT_CANCELLED || status == SPECRT_CLOSED;
    if (stopped() && (is_end || status == SPECRT_CALLBACK)) return false;
    fail(status, error.what());
  } catch (...) {
    fail(SPECRT_INTERNAL, "something was thrown that is not a std::exception");
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
    if (callback == nullptr) continue;
    is_telling_ = true;
    const std::int32_t returned = tell(callback, user, *chunk, *thrown_);
    is_telling_ = false;
    if (returned == 0) continue;
    cancel();
    if (const auto thrown = thrown_->get()) {
      settle();
      fail(SPECRT_CALLBACK, *thrown);
    }
  }
}

const std::string& Session::text() {
  require_begun();
  return given_text_ = text_;
}

const std::vector<Token>& Session::ids() {
  require_begun();
  return given_ids_ = ids_;
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

const std::vector<specrt_logprobs>& Session::logprobs(bool of_prompt) {
  require_begun();
  logprobs_ = run_->logprobs(of_prompt);
  views_.clear();
  for (const Logprobs& one : logprobs_) views_.push_back({one.data(), one.size()});
  return views_;
}

const std::string& Session::json() {
  require_begun();
  json_ = run_->json();
  return json_;
}

}  // namespace specrt::abi
