// specrt for C++17: the C interface with owners, exceptions and ranges.
//
//   specrt::Generator generator("engines/build/codelet");
//   specrt::Session session = generator.session();
//   for (const specrt::Chunk& chunk : session.stream("def area(", specrt::Params().max_tokens(64)))
//     std::cout << chunk.text << std::flush;
//
// What goes wrong is thrown as specrt::Error. A generation that was cancelled just ends; its
// statistics say so. Objects can be moved, not copied; what an object gives out as a view stays as
// it is until its next call. The rules for threads are those of specrt.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "specrt/detail.hpp"
#include "specrt/params.hpp"
#include "specrt/specrt.h"
#include "specrt/types.hpp"

namespace specrt {
inline namespace v1 {

// "0.1.0 native"
inline std::string version() { return specrt_version(); }
// End what the library started; see specrt_shutdown.
inline void shutdown() { detail::check(specrt_shutdown()); }
// Have lines for a log told to a function of the application; none for an empty one.
inline void set_log(Log log) { detail::Logger::only().set(std::move(log)); }

// The chunks of a generation, for a range-based `for`. One that is left early is cancelled, and
// ends before the stream does, whatever other threads do with its session; within a processor of
// its own it ends when that has returned. It never touches a later generation of its session.
class Stream {
 public:
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Chunk;
    using difference_type = std::ptrdiff_t;
    using pointer = const Chunk*;
    using reference = const Chunk&;

    reference operator*() const { return stream_->chunk_; }
    pointer operator->() const { return &stream_->chunk_; }
    Iterator& operator++() {
      if (!stream_->advance()) stream_ = nullptr;
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(const Iterator& other) const { return stream_ == other.stream_; }
    bool operator!=(const Iterator& other) const { return !(*this == other); }

    Iterator() = default;

   private:
    friend class Stream;
    explicit Iterator(Stream* stream) : stream_(stream) {}
    Stream* stream_ = nullptr;
  };

  ~Stream() {
    if (session_ != nullptr) specrt_session_end(session_, generation_);
  }
  Stream(Stream&& other) noexcept
      : session_(std::exchange(other.session_, nullptr)),
        generation_(other.generation_),
        hooks_(std::move(other.hooks_)) {}
  Stream& operator=(Stream&&) = delete;

  // Its number among those of its session, with which another thread may cancel it.
  std::uint64_t generation() const { return generation_; }

  // The next chunk, which is valid until the call after it; nullptr at the end.
  const Chunk* next() { return advance() ? &chunk_ : nullptr; }

  Iterator begin() { return Iterator(advance() ? this : nullptr); }
  Iterator end() { return Iterator(nullptr); }

 private:
  friend class Session;
  // Has the hooks before anything can call them.
  template <typename Begin>
  Stream(specrt_session* session, detail::Hooks hooks, Begin begin) : hooks_(std::move(hooks)) {
    detail::check(begin(&generation_));
    session_ = session;
  }

  bool advance() {
    if (session_ == nullptr) return false;
    const specrt_chunk* chunk = nullptr;
    const specrt_status status = specrt_next(session_, generation_, &chunk);
    if (chunk != nullptr) {
      chunk_ = detail::view(*chunk);
      return true;
    }
    if (status != SPECRT_BUSY) session_ = nullptr;  // it is over, and nothing is left to cancel
    detail::went_on(status, hooks_);
    return false;
  }

  specrt_session* session_ = nullptr;  // a number: the session may be moved or closed meanwhile
  std::uint64_t generation_ = 0;
  detail::Hooks hooks_;
  Chunk chunk_;
};

// Generates one text at a time. `cancel` and `close` may be called from any thread.
class Session {
 public:
  // Complete a prompt, and return the text. The callback gets each chunk; where it returns a value,
  // false stops. What it throws is thrown here.
  std::string generate(std::string_view prompt, const Params& params = Params()) {
    return generate(prompt, params, [](const Chunk&) {});
  }
  template <typename Function>
  std::string generate(std::string_view prompt, const Params& params, Function&& callback) {
    const detail::Hooked own = params.hooked();
    return run(callback, own, [&](specrt_callback function, void* user) {
      return specrt_generate(get(), detail::address(prompt), prompt.size(), own.params(), function,
                             user);
    });
  }
  std::string generate(Tokens prompt, const Params& params = Params()) {
    return generate(prompt, params, [](const Chunk&) {});
  }
  template <typename Function>
  std::string generate(Tokens prompt, const Params& params, Function&& callback) {
    const detail::Hooked own = params.hooked();
    return run(callback, own, [&](specrt_callback function, void* user) {
      return specrt_generate_ids(get(), prompt.data(), prompt.size(), own.params(), function, user);
    });
  }

  // The same, chunk by chunk.
  Stream stream(std::string_view prompt, const Params& params = Params()) {
    const detail::Hooked own = params.hooked();
    return Stream(get(), own.hooks(), [&](std::uint64_t* generation) {
      return specrt_begin(get(), detail::address(prompt), prompt.size(), own.params(), generation);
    });
  }
  Stream stream(Tokens prompt, const Params& params = Params()) {
    const detail::Hooked own = params.hooked();
    return Stream(get(), own.hooks(), [&](std::uint64_t* generation) {
      return specrt_begin_ids(get(), prompt.data(), prompt.size(), own.params(), generation);
    });
  }

  // Stop whatever it generates, or one generation: that of a chunk.
  void cancel(std::uint64_t generation = SPECRT_ANY_GENERATION) {
    detail::check(specrt_session_cancel(get(), generation));
  }
  // The same, and wait until it is at its end.
  void end(std::uint64_t generation = SPECRT_ANY_GENERATION) {
    detail::check(specrt_session_end(get(), generation));
  }
  void close() noexcept { owner_.close(); }

  // What the last generation came to, so far; within a callback, too.
  Stats stats() const;
  std::string text() const {
    const char* text = nullptr;
    std::size_t bytes = 0;
    detail::check(specrt_session_text(get(), &text, &bytes));
    return {text, bytes};
  }
  std::vector<std::int64_t> ids() const {
    const std::int64_t* ids = nullptr;
    std::size_t count = 0;
    detail::check(specrt_session_ids(get(), &ids, &count));
    return Tokens(ids, count).copy();
  }
  std::vector<Logprobs> logprobs() const {
    return detail::copied_logprobs(specrt_session_logprobs, get());
  }
  std::vector<Logprobs> prompt_logprobs() const {
    return detail::copied_logprobs(specrt_session_prompt_logprobs, get());
  }
  std::string json() const {
    const char* json = nullptr;
    std::size_t bytes = 0;
    detail::check(specrt_session_json(get(), &json, &bytes));
    return {json, bytes};
  }
  specrt_session* get() const { return owner_.get(); }

 private:
  friend class Generator;
  Session() = default;

  template <typename Function, typename Generate>
  std::string run(Function& callback, const detail::Hooked& own, Generate generate) {
    detail::Caller<Function> caller{callback, nullptr, {}};
    const specrt_status status = generate(&detail::Caller<Function>::run, &caller);
    if (caller.thrown) std::rethrow_exception(caller.thrown);
    detail::went_on(status, own.hooks());
    return std::move(caller.text);
  }

  detail::Owner<specrt_session, specrt_session_close> owner_;
};

// An open bundle.
class Generator {
 public:
  explicit Generator(const std::string& bundle, const OpenOptions& options = {});

  Session session() const {
    Session session;
    detail::check(specrt_session_create(get(), session.owner_.out()));
    return session;
  }
  Info info() const;
  std::vector<std::int64_t> encode(std::string_view text) const;
  std::string decode(Tokens ids) const;
  // What a token adds to a text, perhaps a part of a character.
  std::string token_bytes(std::int64_t token) const;
  Memory memory() const;

  // Close it and its sessions; what runs ends with SPECRT_CLOSED.
  void close() noexcept { owner_.close(); }
  specrt_generator* get() const { return owner_.get(); }

 private:
  detail::Owner<specrt_generator, specrt_generator_close> owner_;
};

}  // namespace v1
}  // namespace specrt

#include "specrt/inline.hpp"
