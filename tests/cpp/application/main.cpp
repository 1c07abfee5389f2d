// application CASE [NAME=VALUE ...]: runs a case, whichever implementation of libspecrt it is
// linked with, and prints what came of it.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <clocale>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <specrt/specrt.hpp>
#include <thread>

#include "json.hpp"

namespace {

using specrt::Generator;
using specrt::Params;
using specrt::Session;
using specrt::checks::get;
using specrt::checks::json;
using specrt::native::Json;

// What the command line names: bundle, python, onnxruntime, tokenizer, vectors.
std::map<std::string, std::string> given;

const std::vector<std::int64_t> kPrompt(20, 57);          // ids, which every implementation takes
constexpr std::int64_t kForever = std::int64_t{1} << 40;  // the context ends before

void require(specrt_status status) {
  if (status != SPECRT_OK) throw specrt::Error(status, specrt_last_error());
}

void print(specrt_status status) {
  std::printf("%s|%s\n", specrt_status_name(status), status ? specrt_last_error() : "");
}

void print(const std::string& line) { std::printf("%s\n", line.c_str()); }

Generator open(bool prompt_cache = true) {
  specrt::OpenOptions options;
  options.threads = 1;
  options.prompt_cache = prompt_cache;
  options.python = given["python"];
  options.onnxruntime = given["onnxruntime"];
  options.tokenizer = given["tokenizer"];
  return Generator(given["bundle"], options);
}

Params params_of(std::int64_t tokens, specrt_processor processor = nullptr, void* user = nullptr) {
  Params params;
  params.max_tokens(tokens).ignore_eos();
  if (processor != nullptr) require(specrt_params_add_processor(params.get(), processor, user));
  return params;
}

specrt_status complete(const Session& session, const Params& params,
                       specrt_callback callback = nullptr, void* user = nullptr) {
  return specrt_generate_ids(session.get(), kPrompt.data(), kPrompt.size(), params.get(), callback,
                             user);
}

std::uint64_t begin(const Session& session, const Params& params) {
  std::uint64_t generation = 0;
  const specrt_chunk* chunk = nullptr;
  require(
      specrt_begin_ids(session.get(), kPrompt.data(), kPrompt.size(), params.get(), &generation));
  require(specrt_next(session.get(), generation, &chunk));
  return generation;
}

// ---- what the Python runtime generated, again ----

void set(Params& params, const std::string& name, const Json& value) {
  const char* const key = name.c_str();
  switch (value.kind()) {
    case Json::Kind::kBoolean:
      params.set(key, value.boolean() ? 1 : 0);
      break;
    case Json::Kind::kInteger:
      params.set(key, value.integer());
      break;
    case Json::Kind::kNumber:
      params.set(key, value.number());
      break;
    case Json::Kind::kText:
      params.set(key, value.text());
      break;
    case Json::Kind::kList:
      for (const Json& item : value.items()) {
        if (item.kind() == Json::Kind::kText) params.add(key, item.text());
        if (item.kind() == Json::Kind::kInteger)
          params.add(key, std::vector<std::int64_t>{item.integer()});
      }
      break;
    default:
      for (const auto& [token, bias] : value.fields())
        params.bias(std::stoll(token), bias.number());
  }
}

// One line for each chunk: its tokens, how many of them were drafted, and the counts so far. The
// last says how the generation ended, where that is not well.
std::string read(Session& session, std::uint64_t generation, std::int64_t cancel_after,
                 std::string& text) {
  std::string lines;
  for (std::int64_t chunks = 0;; ++chunks) {
    if (chunks == cancel_after) session.cancel();
    const specrt_chunk* chunk = nullptr;
    const specrt_status status = specrt_next(session.get(), generation, &chunk);
    if (status != SPECRT_OK) return lines + specrt_status_name(status);
    if (chunk == nullptr) return lines;
    text.append(chunk->text, chunk->bytes);
    const specrt::Stats stats = session.stats();
    lines += json(std::vector<std::int64_t>(chunk->ids, chunk->ids + chunk->count));
    for (const std::uint64_t number : {std::uint64_t{chunk->accepted}, stats.rounds, stats.drafted,
                                       stats.evaluated, stats.accepted})
      lines += " " + std::to_string(number);
    lines += "\n";
  }
}

std::string replayed(Session& session, const Json& request) {
  Params params;
  for (const auto& [name, value] : request.at("params").fields()) set(params, name, value);
  const auto fails = [](void* most, const std::int64_t*, std::size_t count, float*,
                        std::size_t) -> std::int32_t {
    return count < *static_cast<std::size_t*>(most) ? 0 : 1;
  };
  const Json* const fail_at = request.find("fail_at");
  std::size_t most = fail_at == nullptr ? 0 : static_cast<std::size_t>(fail_at->integer());
  if (fail_at != nullptr) require(specrt_params_add_processor(params.get(), fails, &most));
  const Json& prompt = request.at("prompt");
  std::uint64_t generation = 0;
  specrt_status status = SPECRT_OK;
  if (prompt.kind() == Json::Kind::kText) {
    const std::string& text = prompt.text();
    status = specrt_begin(session.get(), text.data(), text.size(), params.get(), &generation);
  } else {
    const auto ids = get<std::vector<std::int64_t>>(request, "prompt");
    status = specrt_begin_ids(session.get(), ids.data(), ids.size(), params.get(), &generation);
  }
  if (status != SPECRT_OK)
    return specrt::checks::object({{"refused", json(std::string(specrt_status_name(status)))}});
  const Json* const after = request.find("cancel_after");
  std::string text;
  const std::string rounds =
      read(session, generation, after == nullptr ? -1 : after->integer(), text);
  const specrt::Stats stats = session.stats();
  return specrt::checks::object({{"ids", json(session.ids())},
                                 {"text", json(text)},
                                 {"finish_reason", json(stats.finish_reason)},
                                 {"cached_tokens", json(stats.cached_tokens)},
                                 {"rounds", json(rounds)},
                                 {"completion", session.json()}});
}

void replay() {
  std::ifstream file(given["vectors"], std::ios::binary);
  const Json vectors = Json::parse(std::string{std::istreambuf_iterator<char>(file), {}});
  const std::vector<Json>& requests = vectors.at("requests").items();
  // Opened twice: what the first time left changes nothing.
  for (const std::size_t count : {std::size_t{1}, requests.size()}) {
    const Generator generator = open(vectors.at("prompt_cache").boolean());
    Session session = generator.session();
    for (std::size_t i = 0; i < count; ++i) print(replayed(session, requests[i]));
  }
  specrt::shutdown();
}

// ---- threads, ends and processors ----

// Sessions on threads of their own, which both need the costs of passes before either knows them.
void together() {
  const Generator generator = open();
  std::vector<std::thread> threads;
  std::vector<std::vector<std::int64_t>> texts(2);
  for (auto& ids : texts) {
    threads.emplace_back([&ids, &generator] {
      Session session = generator.session();
      for (const char* const drafter : {"model", "cascade", "ngram"}) {
        session.generate(kPrompt, params_of(30).gamma_auto().drafter(drafter));
        ids = session.ids();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  print(json(texts));
  specrt::shutdown();
}

// What runs ends where its session is cancelled, or its bundle closed, by another thread.
void ended() {
  Generator generator = open();
  Session session = generator.session();
  for (const bool closes : {false, true}) {
    std::atomic<bool> running{false};
    const auto note = [](void* user, const specrt_chunk*) -> std::int32_t {
      *static_cast<std::atomic<bool>*>(user) = true;
      return 0;
    };
    std::thread reader([&] { print(complete(session, params_of(kForever), note, &running)); });
    while (!running) std::this_thread::yield();
    closes ? generator.close() : session.cancel();
    reader.join();
    if (closes) break;
    print(session.stats().finish_reason);
    session.generate(kPrompt, params_of(4));
    print(json(session.ids()));
  }
}

// The application rounds upwards and has traps on floating-point errors; its callbacks find that.
void floating() {
  std::fesetround(FE_UPWARD);
  feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW);
  const int traps = fegetexcept();
  const auto is_own = [traps] { return std::fegetround() == FE_UPWARD && fegetexcept() == traps; };
  const Generator generator = open();
  Session session = generator.session();
  bool kept = is_own();
  Params params = params_of(24);
  params.gamma(2).temperature(1e300).verifier("rejection").seed(3);
  session.generate(kPrompt, params, [&](const specrt::Chunk&) { kept = kept && is_own(); });
  print(json(session.ids()));
  print(json(kept && is_own()));
}

// One processor that decides, one that throws.
void processors() {
  const specrt_processor decides = [](void*, const std::int64_t*, std::size_t, float* scores,
                                      std::size_t vocabulary) -> std::int32_t {
    for (std::size_t at = 0; at < vocabulary; ++at) scores[at] = at == 65;
    return 0;
  };
  const specrt_processor throws = [](void*, const std::int64_t*, std::size_t, float*,
                                     std::size_t) -> std::int32_t {
    throw std::runtime_error("no scores today");
  };
  const Generator generator = open();
  const Session session = generator.session();
  print(complete(session, params_of(6, decides)));
  print(json(session.ids()));
  print(complete(session, params_of(6, throws)));
  specrt::shutdown();
}

// What an application asks of a bundle and a generation besides: one JSON object.
void asked() {
  Generator generator = open();
  Session session = generator.session();
  Params params = params_of(12);
  params.logprobs(2).prompt_logprobs(1).stop_tokens(std::vector<std::int64_t>{1, 2}).gamma(0);
  params.processor([](specrt::Tokens, float*, std::size_t) { throw std::logic_error("cleared"); });
  for (const char* const name : {"stop_token_ids", "gamma", "logits_processors"})
    params.clear(name);
  std::vector<std::uint64_t> emitted;
  session.generate(kPrompt, params, [&](const specrt::Chunk&) {
    emitted.push_back(session.stats().completion_tokens);
    if (session.ids().size() != emitted.back()) throw std::logic_error("another count");
  });
  const auto ranks = [](const std::vector<specrt::Logprobs>& all) {
    std::vector<std::string> lists;
    for (const specrt::Logprobs& one : all)
      for (const specrt::Logprob& each : one)
        lists.push_back("[" + json(each.token) + ", " + json(each.rank) + ", " +
                        json(each.logprob) + "]");
    return json(lists);
  };
  std::vector<std::int64_t> bytes;
  for (std::int64_t token = 0; token < generator.info().vocabulary; ++token)
    for (const char byte : generator.token_bytes(token) + '\n')
      bytes.push_back(static_cast<unsigned char>(byte));
  const specrt::Info info = generator.info();
  const specrt::Memory memory = generator.memory();
  const char* const telemetry = std::getenv("ORT_DISABLE_TELEMETRY");
  print(specrt::checks::object({{"bos", json(info.bos_token)},
                                {"eos", json(info.eos_tokens)},
                                {"weights", json(memory.weights_bytes)},
                                {"kv", json(memory.kv_bytes)},
                                {"resident", json(memory.resident_bytes)},
                                {"telemetry", json(telemetry ? std::string(telemetry) : "")},
                                {"bytes", json(bytes)},
                                {"emitted", json(emitted)},
                                {"logprobs", ranks(session.logprobs())},
                                {"prompt_logprobs", ranks(session.prompt_logprobs())},
                                {"completion", session.json()}}));
  specrt::shutdown();
}

// A generation whose passes another session runs too.
struct Shared {
  explicit Shared(const Generator& generator, specrt_processor processor)
      : session(generator.session()) {
    generation = begin(session, params_of(40, processor, this).gamma(0));
  }

  Session session;
  std::uint64_t generation = 0;
  std::atomic<int> calls{0};
  std::atomic<bool> inside{false}, go{false};
};

// A processor is called in the turn of another session, closes its own there, and stops.
void closing_processor() {
  const auto closes = [](void* user, const std::int64_t*, std::size_t, float*,
                         std::size_t) -> std::int32_t {
    Shared& shared = *static_cast<Shared*>(user);
    if (++shared.calls == 1) return 0;  // on its own thread
    if (shared.calls == 2) require(specrt_session_close(shared.session.get()));
    return 3;
  };
  const Generator generator = open();
  Shared shared(generator, closes);
  generator.session().generate(kPrompt, params_of(40));
  print(json(shared.calls.load()));
  specrt::shutdown();
}

// When a generation has ended, none of its processors is called any more, nor running.
void returning() {
  const auto waits = [](void* user, const std::int64_t*, std::size_t, float*,
                        std::size_t) -> std::int32_t {
    Shared& shared = *static_cast<Shared*>(user);
    if (++shared.calls == 1) return 0;  // on its own thread
    shared.inside = true;
    while (!shared.go) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    shared.inside = false;
    return 0;
  };
  const Generator generator = open();
  Shared shared(generator, waits);
  std::thread other([&] { generator.session().generate(kPrompt, params_of(40)); });
  while (!shared.inside) std::this_thread::yield();
  std::thread signal([&shared] { shared.go = true; });
  shared.session.cancel();
  const specrt_chunk* chunk = nullptr;
  print(specrt_next(shared.session.get(), shared.generation, &chunk));
  print(json(shared.inside.load()));
  signal.join();
  other.join();
  specrt::shutdown();
}

// A child of a process that has opened a bundle is refused; its parent goes on.
void forked() {
  const Generator generator = open();
  std::fflush(stdout);
  if (const pid_t child = fork(); child == 0) {
    specrt_session* session = nullptr;
    specrt_status status = specrt_session_create(generator.get(), &session);
    std::uint64_t generation = 0;
    if (status == SPECRT_OK) status = specrt_begin(session, "def", 3, nullptr, &generation);
    print(status);
    std::fflush(stdout);
    _exit(0);
  } else {
    waitpid(child, nullptr, 0);
  }
  Session session = generator.session();
  session.generate(kPrompt, params_of(4));
  print(json(session.ids()));
  specrt::shutdown();
}

void opening() {
  try {
    open();
    print(SPECRT_OK);
  } catch (const specrt::Error& error) {
    print(error.name() + ("|" + std::string(error.what())));
  }
}

// JSON and notices have points where the application has commas.
void locale() {
  print(std::setlocale(LC_ALL, "") ? std::localeconv()->decimal_point : "none");
  specrt::OpenOptions scarce;
  scarce.memory_bytes = 1;
  print(Generator(given["bundle"], scarce).info().notices);
  const Generator generator = open();
  Session session = generator.session();
  session.generate(kPrompt, params_of(3).logprobs(1));
  print(session.json());
}

// Growth in KiB while a body is repeated, once it was warm.
template <typename Body>
void print_growth(int warm, int count, Body body) {
  const auto resident_kib = [] {
    long total = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> total >> resident;
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
  };
  for (int i = 0; i < warm; ++i) body();
  const long before = resident_kib();
  for (int i = 0; i < count; ++i) body();
  print(json(resident_kib() - before));
}

// Over generations; over threads that come, call and end; over opening and closing.
void memory() {
  Generator generator = open();
  print_growth(20, 200, [&] { generator.session().generate(kPrompt, params_of(4)); });
  const auto decode = [&] { generator.decode(std::vector<std::int64_t>{5}); };
  print_growth(100, 3000, [&] { std::thread(decode).join(); });
  generator.close();
  print_growth(5, 50, [] { open().session().generate(kPrompt, params_of(8)); });
  specrt::shutdown();
}

const std::map<std::string, void (*)()> kCases = {{"replay", replay},
                                                  {"together", together},
                                                  {"ended", ended},
                                                  {"processors", processors},
                                                  {"closing_processor", closing_processor},
                                                  {"floating", floating},
                                                  {"returning", returning},
                                                  {"forked", forked},
                                                  {"opening", opening},
                                                  {"locale", locale},
                                                  {"memory", memory},
                                                  {"asked", asked}};

}  // namespace

int main(int count, char** arguments) {
  for (int i = 2; i < count; ++i) {
    const std::string argument = arguments[i];
    const std::size_t end = argument.find('=');
    given[argument.substr(0, end)] = argument.substr(end + 1);
  }
  try {
    kCases.at(count > 1 ? arguments[1] : "")();
    return 0;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}
