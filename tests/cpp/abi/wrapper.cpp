// The C++ header.
#include <limits>
#include <memory>
#include <stdexcept>

#include "abi/check.hpp"

namespace {

struct Own : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename Thrown, typename Body>
std::string thrown(Body body) {
  try {
    body();
  } catch (const Thrown& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another: ") + error.what();
  }
  return "nothing";
}

}  // namespace

using check::status_of;

CHECK_CASE(generates) {
  check::Opened opened;
  specrt::Session& session = opened.session;
  THAT(session.generate("count 2") == "ab ab ");
  std::string seen;
  session.generate("count 3", specrt::Params(), [&](const specrt::Chunk& chunk) {
    seen += chunk.text;
    THAT(chunk.ids.size() == 1);
  });
  THAT(seen == "ab ab ab ");
  int left = 2;
  session.generate("forever", {}, [&](const specrt::Chunk&) { return --left > 0; });
  THAT(left == 0 && session.stats().finish_reason == "cancelled");
  const std::vector<std::int64_t> prompt = {5, 6, 7};
  session.generate(prompt);
  THAT(session.ids() == prompt);
  const std::int64_t raw[] = {8, 9};
  session.generate(specrt::Tokens(raw, 2));
  THAT((session.ids() == std::vector<std::int64_t>{8, 9}));
  THAT(session.json() == "{\"chunks\": 2}");
  const specrt::Stats stats = session.stats();
  THAT(stats.completion_tokens == 2 && stats.prompt_tokens == 7 && stats.rounds == 1);
  THAT(stats.acceptance_rate == 0.5 && stats.draft_yield == 0.25 && stats.tokens_per_round == 3.0);
  THAT(stats.gamma == -1 && stats.seed == 11 && stats.drafter == "model");
  THAT(stats.finish_reason == "length" && stats.fallback.empty());
  THAT(stats.queue_ms == 1.5 && stats.ttft_ms == 2.5);
}

CHECK_CASE(streams) {
  check::Opened opened;
  specrt::Session& session = opened.session;
  std::string text;
  for (const specrt::Chunk& chunk : session.stream("count 3")) text += chunk.text;
  THAT(text == "ab ab ab " && session.text() == text);
  for (const specrt::Chunk& chunk : session.stream("forever")) {
    THAT(chunk.text == "ab ");
    break;
  }
  THAT(session.stats().finish_reason == "cancelled");
  specrt::Stream stream = session.stream(std::vector<std::int64_t>{1, 2});
  THAT(status_of([&] { session.generate("count 1"); }) == SPECRT_BUSY);
  specrt::Stream moved = std::move(stream);
  specrt::Session owner = std::move(session);
  THAT(moved.next() != nullptr && moved.next()->ids[0] == 2);
  THAT(moved.next() == nullptr && moved.next() == nullptr);
  session = std::move(owner);
  THAT(status_of([&] {
         for (const specrt::Chunk& chunk : session.stream("fail")) text += chunk.text;
       }) == SPECRT_ENGINE);
  for (const specrt::Chunk& chunk : session.stream("count 0")) text += chunk.text;
}

CHECK_CASE(a_stream_touches_its_own_generation) {
  check::Opened opened;
  specrt::Session& session = opened.session;
  const auto rest = [](specrt::Stream& stream) {
    int chunks = 0;
    while (stream.next() != nullptr) ++chunks;
    return chunks;
  };
  auto old = std::make_unique<specrt::Stream>(session.stream("forever"));
  THAT(old->next()->generation == old->generation());
  session.cancel();
  specrt::Stream now = session.stream("count 3");
  THAT(now.next() != nullptr);
  THAT(old->next() == nullptr);  // it is over
  session.cancel(old->generation());
  old.reset();
  THAT(rest(now) == 2 && session.stats().finish_reason == "length");
  old = std::make_unique<specrt::Stream>(session.stream("forever"));
  THAT(old->next() != nullptr);
  session.cancel();
  session.generate("count 2", {}, [&](const specrt::Chunk&) { old.reset(); });
  THAT(session.stats().finish_reason == "length");
}

CHECK_CASE(throws) {
  check::Opened opened;
  specrt::Session& session = opened.session;
  THAT(thrown<Own>([&] {
         session.generate("forever", {}, [](const specrt::Chunk&) { throw Own("mine"); });
       }) == "mine");
  specrt::Params params;
  params.processor([](specrt::Tokens, float*, std::size_t) { throw Own("scores"); });
  THAT(thrown<Own>([&] { session.generate("process", params); }) == "scores");
  THAT(thrown<Own>([&] {
         for (const specrt::Chunk& chunk : session.stream("process", params)) (void)chunk;
       }) == "scores");
  // What is thrown is of this generation, not of one before it.
  int asked = 0;
  specrt::Params two;
  two.processor([&](specrt::Tokens, float*, std::size_t) {
    if (++asked == 1) throw Own("first");
  });
  two.processor([](specrt::Tokens, float*, std::size_t) { throw Own("second"); });
  THAT(thrown<Own>([&] { session.generate("process", two); }) == "first");
  THAT(thrown<Own>([&] { session.generate("process", two); }) == "second");
  // Nor of one that nobody read on.
  asked = 0;
  specrt::Params shared;
  shared.processor([&](specrt::Tokens, float* scores, std::size_t) {
    if (++asked == 1) throw Own("unread");
    scores[0] = std::numeric_limits<float>::quiet_NaN();
  });
  {
    const specrt_chunk* chunk = nullptr;
    specrt::Stream stream = session.stream("process", shared);
    GIVES(SPECRT_CALLBACK, specrt_next(session.get(), stream.generation(), &chunk));
  }
  THAT(thrown<specrt::Error>([&] { session.generate("process", shared); }).find("NaN") !=
       std::string::npos);
  THAT(thrown<specrt::Error>([] { specrt::Generator("missing"); }) == "no bundle is at missing");
  THAT(status_of([] { specrt::Params().top_p(2); }) == SPECRT_INVALID_ARGUMENT);
  THAT(status_of([] { specrt::Params().set("max_tokns", 2); }) == SPECRT_INVALID_ARGUMENT);
}

CHECK_CASE(sets) {
  specrt::Params params;
  const std::vector<std::int64_t> tokens = {1, 2};
  params.max_tokens(9).temperature(0.5).top_k(3).top_p(0.9).min_p(0.1).typical_p(0.9);
  params.repetition_penalty(1.1).presence_penalty(0.1).frequency_penalty(0.1);
  params.no_repeat_ngram_size(3).min_tokens(2).seed(-4).logprobs(2).prompt_logprobs(0);
  params.ignore_eos()
      .ignore_eos(false)
      .gamma(3)
      .gamma_auto()
      .verifier("rejection")
      .drafter("none")
      .parse_special(false);
  params.stop("a").stop(std::string("b")).bad_word("c").choice("d").stop_tokens(tokens);
  params.allowed_tokens(tokens).bias(3, -1.5).set("temperature", 1).set("verifier", "match");
  THAT(status_of([&] { params.clear("min_tokns"); }) == SPECRT_INVALID_ARGUMENT);
  params.min_tokens(10).clear("min_tokens").clear("gamma").clear("logits_processors");
  check::Opened opened;
  THAT(status_of([&] { opened.session.generate("count 1", params); }) == SPECRT_OK);
  THAT(opened.session.stats().gamma == -1 && opened.session.stats().seed == -4);
  opened.session.generate("count 1", params.clear());
  THAT(opened.session.stats().seed == 11);
  specrt::Params copy = std::move(params);
  THAT(status_of([&] { copy.json_schema("{}").regex("a").grammar("start: \"a\""); }) == SPECRT_OK);
}
