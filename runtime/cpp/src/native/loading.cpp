#include "native/loading.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>

namespace specrt::native {

namespace {

constexpr const char* kDrafters[] = {"model", "ngram", "cascade", "none"};

// More threads than there are cores only get in each other's way.
int cores(int threads) {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int there = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  if (threads == 0) {
    return there;
  }
  if (threads < 1 || threads > there) {
    throw Failure(SPECRT_INVALID_ARGUMENT,
                  "threads is " + std::to_string(threads) + "; expected a whole number from 1 to " +
                      std::to_string(there) + ", the cores this process may use");
  }
  return threads;
}

// The library that is to read the tokenizer. It reads two files, and the manifest lists both.
std::string tokenizer_library(const Bundle& bundle, const OpenOptions& options) {
  std::string library = options.tokenizer;
#ifdef SPECRT_TOKENIZER_LIBRARY
  if (library.empty()) library = SPECRT_TOKENIZER_LIBRARY;
#endif
  constexpr char kConfig[] = "tokenizer_config.json";
  const bool is_there = access((bundle.path + "/" + kConfig).c_str(), F_OK) == 0;
  if (!library.empty() && is_there) bundle.file(kConfig);
  // One that the application names is loaded, or opening fails; one that was configured is a
  // default.
  if (!options.tokenizer.empty()) GenaiTokenizer::load(options.tokenizer);
  return library;
}

}  // namespace

LoadedBundle::LoadedBundle(const std::string& path, const OpenOptions& options)
    : threads(cores(options.threads)),
      prompt_cache(options.prompt_cache),
      bundle(open_folder(path, threads, options)),
      models(open_models(bundle, options, threads)),
      tokenizer(path, tokenizer_library(bundle, options), bundle.manifest.bos_token_id,
                static_cast<std::size_t>(bundle.manifest.target.geometry.vocab_size)) {
  check_vocabulary();
  bundle.check_unchanged();
}

void LoadedBundle::check_vocabulary() const {
  const auto scored = static_cast<std::size_t>(bundle.manifest.target.geometry.vocab_size);
  if (tokenizer.size() > scored) {
    throw Failure(SPECRT_BUNDLE, "the tokenizer has ids up to " +
                                     std::to_string(tokenizer.size() - 1) +
                                     ", and the model scores " + std::to_string(scored) +
                                     "; they do not belong together: build the bundle again from "
                                     "one checkpoint");
  }
}

int LoadedBundle::gamma_of(const Params& params) const {
  const Manifest& manifest = bundle.manifest;
  if (!params.gamma) {
    if (manifest.gamma) {
      return *manifest.gamma;
    }
    if (!bundle.tuning) {
      return kAuto;
    }
    return bundle.tuning->drafter == "none" ? 0 : bundle.tuning->gamma;
  }
  const std::vector<int>& built = manifest.gammas;
  if (*params.gamma == kAuto || std::count(built.begin(), built.end(), *params.gamma) != 0) {
    return *params.gamma;
  }
  std::string known;
  for (const int gamma : built) {
    known += (known.empty() ? "" : ", ") + std::to_string(gamma);
  }
  throw Failure(SPECRT_INVALID_ARGUMENT,
                "gamma " + std::to_string(*params.gamma) +
                    " is not among those this bundle was built for: " + known +
                    "; choose one of them or 'auto', or add it to `gammas` in the recipe and "
                    "build again");
}

std::string LoadedBundle::drafter_of(const Params& params) const {
  const bool has_draft = models.draft != nullptr;
  if (params.drafter.empty()) {
    if (!models.absent.empty()) {
      return "none";
    }
    for (const std::string& name :
         {bundle.tuning ? bundle.tuning->drafter : "", bundle.manifest.drafter}) {
      if (name == "ngram" || (has_draft && (name == "model" || name == "cascade"))) return name;
    }
    return has_draft ? "model" : "ngram";
  }
  if (std::count(std::begin(kDrafters), std::end(kDrafters), params.drafter) == 0) {
    throw Failure(SPECRT_INVALID_ARGUMENT, "drafter '" + params.drafter +
                                               "' is unknown; known: model, ngram, cascade, none");
  }
  if ((params.drafter == "model" || params.drafter == "cascade") && !has_draft) {
    const std::string why =
        models.absent.empty() ? "this bundle has no draft model" : models.absent;
    throw Failure(
        SPECRT_INVALID_ARGUMENT,
        "drafter '" + params.drafter + "' needs a draft model: " + why + "; use 'ngram' or 'none'");
  }
  return params.drafter;
}

Costs LoadedBundle::costs() const {
  return bundle.tuning ? bundle.tuning->costs : Costs::assume(bundle.manifest.gammas.back());
}

Memory LoadedBundle::memory() const {
  const Manifest& manifest = bundle.manifest;
  Memory memory;
  for (const ModelRecord* model : {&manifest.target, manifest.draft ? &*manifest.draft : nullptr}) {
    if (model == nullptr || (model != &manifest.target && models.draft == nullptr)) continue;
    memory.weights_bytes += model->weight_bytes;
    memory.kv_bytes += sessions * static_cast<std::uint64_t>(kv_bytes(manifest, *model, 1));
  }
  return memory;
}

Info LoadedBundle::info() const {
  const Manifest& manifest = bundle.manifest;
  Info info;
  info.name = manifest.name;
  info.backend = manifest.target.backend;
  info.precision = manifest.precision;
  info.max_length = manifest.max_length;
  info.vocabulary = manifest.target.geometry.vocab_size;
  info.max_gamma = *std::max_element(manifest.gammas.begin(), manifest.gammas.end());
  info.has_draft = models.draft != nullptr;
  info.has_tokenizer = tokenizer.encodes();
  info.bos = manifest.bos_token_id.value_or(-1);
  info.eos = manifest.eos_token_ids;
  std::sort(info.eos.begin(), info.eos.end());
  for (const std::string& notice : bundle.notices) {
    info.notices += notice + "\n";
  }
  for (const std::string& notice : {models.absent, tokenizer.notice()}) {
    info.notices += notice.empty() ? "" : notice + "\n";
  }
  return info;
}

}  // namespace specrt::native
