#include "native/text/genai.hpp"

#include <dlfcn.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>

#include "failure.hpp"
#include "native/machine.hpp"

namespace specrt::native {

// The entries that are used, whose results are nullptr where all went well. They are those of
// ort_genai_c.h, but for OgaCreateTokenizerFromPath, which release 0.16 exports and no public
// header declares.
struct GenaiTokenizer::Functions {
  void* (*create_tokenizer)(const char* folder, void** tokenizer);
  void (*destroy_tokenizer)(void* tokenizer);
  void* (*encode)(const void* tokenizer, const char* text, void* sequences);
  void* (*decode)(const void* tokenizer, const std::int32_t* ids, std::size_t count,
                  const char** text);
  void* (*create_sequences)(void** sequences);
  void (*destroy_sequences)(void* sequences);
  std::size_t (*sequence_count)(const void* sequences, std::size_t index);
  const std::int32_t* (*sequence_data)(const void* sequences, std::size_t index);
  void (*destroy_string)(const char* text);
  const char* (*error_of)(void* result);
  void (*destroy_result)(void* result);
};

namespace {

template <typename Function>
void find(void* library, const std::string& path, const char* name, Function& function) {
  void* const result = dlsym(library, name);
  if (result == nullptr) {
    throw Failure(SPECRT_ENGINE,
                  path + " has no " + name +
                      "; expected libonnxruntime-genai of release 0.16 or later, which "
                      "exports OgaCreateTokenizerFromPath");
  }
  function = reinterpret_cast<Function>(result);
}

// A folder of its own with the files of a tokenizer. The library wants a configuration of a whole
// model next to them, and takes a folder with a manifest.json for a package of another kind.
class Folder {
 public:
  explicit Folder(const std::filesystem::path& bundle) {
    std::string name = (std::filesystem::temp_directory_path() / "specrt-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) {
      throw Failure(SPECRT_ENGINE, "no folder can be made in " +
                                       std::filesystem::temp_directory_path().string() +
                                       ", where the tokenizer library is shown its files");
    }
    path_ = name;
    for (const char* file : {"tokenizer.json", "tokenizer_config.json"}) {
      if (std::filesystem::exists(bundle / file)) {
        std::filesystem::create_symlink(std::filesystem::absolute(bundle / file), path_ / file);
      }
    }
    std::ofstream(path_ / "genai_config.json")
        << R"({"model": {"type": "llama", "vocab_size": 1, "context_length": 1,)"
        << R"( "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0,)"
        << R"( "decoder": {"session_options": {}}}, "search": {}})";
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace

const GenaiTokenizer::Functions& GenaiTokenizer::functions(const std::string& path) {
  static std::mutex once;
  static std::map<std::string, Functions> known;  // libraries stay loaded: they have threads
  const std::lock_guard<std::mutex> lock(once);
  if (const auto entry = known.find(path); entry != known.end()) {
    return entry->second;
  }
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw failure_of(SPECRT_ENGINE, "the tokenizer library cannot be loaded", dlerror(),
                     "name one that is there as `tokenizer` of specrt_open_options");
  }
  Functions c{};
  find(library, path, "OgaCreateTokenizerFromPath", c.create_tokenizer);
  find(library, path, "OgaDestroyTokenizer", c.destroy_tokenizer);
  find(library, path, "OgaTokenizerEncode", c.encode);
  find(library, path, "OgaTokenizerDecode", c.decode);
  find(library, path, "OgaCreateSequences", c.create_sequences);
  find(library, path, "OgaDestroySequences", c.destroy_sequences);
  find(library, path, "OgaSequencesGetSequenceCount", c.sequence_count);
  find(library, path, "OgaSequencesGetSequenceData", c.sequence_data);
  find(library, path, "OgaDestroyString", c.destroy_string);
  find(library, path, "OgaResultGetError", c.error_of);
  find(library, path, "OgaDestroyResult", c.destroy_result);
  return known.emplace(path, c).first->second;
}

void GenaiTokenizer::load(const std::string& path) { functions(path); }

GenaiTokenizer::GenaiTokenizer(const std::string& library, const std::string& bundle)
    : c_(functions(library)) {
  try {
    const Folder folder(bundle);
    require(c_.create_tokenizer(folder.path().c_str(), &tokenizer_), "read the tokenizer");
  } catch (const std::filesystem::filesystem_error& error) {
    throw Failure(SPECRT_ENGINE,
                  std::string("the tokenizer library cannot be shown its files: ") + error.what());
  }
}

GenaiTokenizer::~GenaiTokenizer() { c_.destroy_tokenizer(tokenizer_); }

void GenaiTokenizer::require(void* result, const char* what) const {
  if (result == nullptr) {
    return;
  }
  const std::string reason = c_.error_of(result);
  c_.destroy_result(result);
  throw Failure(SPECRT_ENGINE, std::string("the tokenizer library could not ") + what + ": " +
                                   reason.substr(0, reason.find('\n')));
}

std::vector<Token> GenaiTokenizer::encode(const std::string& text) const {
  const std::lock_guard<std::mutex> lock(busy_);
  void* handle = nullptr;
  require(c_.create_sequences(&handle), "encode a text");
  const std::unique_ptr<void, void (*)(void*)> sequences(handle, c_.destroy_sequences);
  require(c_.encode(tokenizer_, text.c_str(), handle), "encode a text");
  const std::int32_t* const ids = c_.sequence_data(handle, 0);
  return {ids, ids + c_.sequence_count(handle, 0)};
}

std::string GenaiTokenizer::decode(const std::vector<Token>& ids) const {
  const std::lock_guard<std::mutex> lock(busy_);
  const std::vector<std::int32_t> narrow(ids.begin(), ids.end());
  const char* text = nullptr;
  require(c_.decode(tokenizer_, narrow.data(), narrow.size(), &text), "decode tokens");
  const std::string result = text;
  c_.destroy_string(text);
  return result;
}

}  // namespace specrt::native
