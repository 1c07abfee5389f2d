// The functions of specrt.h that are about an open bundle.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "abi/arguments.hpp"
#include "abi/call.hpp"
#include "abi/entries.hpp"
#include "abi/log.hpp"
#include "abi/sized.hpp"
#include "abi/text.hpp"

using namespace specrt::abi;

namespace {

// What the structures of the first version hold.
constexpr std::size_t kLeastOptions = offsetof(specrt_open_options, tokenizer) + sizeof(char*);
constexpr std::size_t kLeastInfo = offsetof(specrt_info, notices) + sizeof(char*);
constexpr std::size_t kLeastMemory = offsetof(specrt_memory, resident_bytes) + sizeof(uint64_t);

std::string optional_text(const char* name, const char* text) {
  return text == nullptr ? std::string() : checked_text(name, text);
}

specrt::OpenOptions options_of(const specrt_open_options* given) {
  specrt::OpenOptions options;
  if (given == nullptr) return options;
  const auto known = read_sized(given, "specrt_open_options", kLeastOptions);
  if (known.threads < 0) {
    invalid("threads is " + std::to_string(known.threads) +
            "; expected 1 or more, or 0 for every core");
  }
  options.threads = known.threads;
  options.owns_process = known.owns_process != 0;
  options.memory_bytes = known.memory_bytes;
  options.prompt_cache = known.no_prompt_cache == 0;
  options.python = optional_text("python", known.python);
  options.onnxruntime = optional_text("onnxruntime", known.onnxruntime);
  options.tokenizer = optional_text("tokenizer", known.tokenizer);
  options.text_memory_bytes = known.text_memory_bytes;
  return options;
}

std::vector<specrt::Token> copied_ids(const int64_t* ids, size_t count) {
  if (count > 0) require(ids, "ids");
  require_count("ids", count, sizeof *ids);
  return count == 0 ? std::vector<specrt::Token>() : std::vector<specrt::Token>(ids, ids + count);
}

void log_notices(const std::string& notices) {
  std::istringstream lines(notices);
  for (std::string line; std::getline(lines, line);) log(SPECRT_LOG_WARNING, line.c_str());
}

// What the system counts for this process.
std::uint64_t resident_bytes() {
  std::uint64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

specrt_status specrt_open(const char* bundle, const specrt_open_options* options,
                          specrt_generator** generator) {
  return guarded([&] {
    require(generator, "generator");
    *generator = nullptr;
    const std::string path = checked_text("bundle", bundle);
    if (path.empty()) invalid("bundle is ''; expected the path of a folder");
    const specrt::OpenOptions chosen = options_of(options);
    auto opened = std::make_shared<Generator>(specrt::open_bundle(path, chosen));
    log_notices(opened->info().notices);
    const Handle handle = handles().add(Kind::kGenerator, std::move(opened));
    *generator = reinterpret_cast<specrt_generator*>(handle);
  });
}

specrt_status specrt_generator_info(specrt_generator* generator, specrt_info* info) {
  return guarded([&] {
    const auto opened = find(generator);
    const specrt::Info& known = opened->info();
    specrt_info out{};
    out.name = known.name.c_str();
    out.backend = known.backend.c_str();
    out.precision = known.precision.c_str();
    out.max_length = known.max_length;
    out.vocabulary = known.vocabulary;
    out.rows = known.rows;
    out.max_gamma = known.max_gamma;
    out.has_draft = known.has_draft ? 1 : 0;
    out.has_tokenizer = known.has_tokenizer ? 1 : 0;
    out.notices = known.notices.c_str();
    out.bos_token = known.bos;
    out.eos_tokens = known.eos.data();
    out.eos_count = known.eos.size();
    write_sized(info, out, "specrt_info", kLeastInfo);
  });
}

specrt_status specrt_generator_memory(specrt_generator* generator, specrt_memory* memory) {
  return guarded([&] {
    const auto opened = find(generator);
    checked_size(memory, "specrt_memory", kLeastMemory);
    const specrt::Memory known = opened->host().memory();
    const specrt_memory out{0, known.weights_bytes, known.kv_bytes, resident_bytes()};
    write_sized(memory, out, "specrt_memory", kLeastMemory);
  });
}

specrt_status specrt_generator_close(specrt_generator* generator) {
  return guarded(
      [&] {
        if (generator == nullptr) return;
        const auto taken = handles().take(Kind::kGenerator, handle_of(generator));
        std::static_pointer_cast<Generator>(taken)->close();
      },
      true);
}

specrt_status specrt_token_bytes(specrt_generator* generator, int64_t token, char* bytes,
                                 size_t capacity, size_t* count) {
  return guarded([&] {
    const auto opened = find(generator);
    require(count, "count");
    *count = 0;
    if (capacity > 0) require(bytes, "bytes");
    require_tokens(opened->info(), {token});
    const std::string result = opened->host().token_bytes(token);
    std::copy_n(result.begin(), std::min(capacity, result.size()), bytes);
    *count = result.size();
  });
}

specrt_status specrt_encode(specrt_generator* generator, const char* text, size_t bytes,
                            int64_t* ids, size_t capacity, size_t* count) {
  return guarded([&] {
    const auto opened = find(generator);
    require(count, "count");
    *count = 0;
    if (capacity > 0) require(ids, "ids");
    const auto result =
        opened->host().encode(checked_words("text", checked_text("text", text, bytes)));
    std::copy_n(result.begin(), std::min(capacity, result.size()), ids);
    *count = result.size();
  });
}

specrt_status specrt_decode(specrt_generator* generator, const int64_t* ids, size_t count,
                            char* text, size_t capacity, size_t* bytes) {
  return guarded([&] {
    const auto opened = find(generator);
    require(bytes, "bytes");
    *bytes = 0;
    if (capacity > 0) require(text, "text");
    const auto given = copied_ids(ids, count);
    require_tokens(opened->info(), given);
    const std::string result = opened->host().decode(given);
    if (capacity > 0) {
      const std::size_t fitting = whole_prefix(result, capacity - 1);
      std::memcpy(text, result.data(), fitting);
      text[fitting] = '\0';
    }
    *bytes = result.size();
  });
}
