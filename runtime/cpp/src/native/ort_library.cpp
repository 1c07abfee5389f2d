#include "native/ort_library.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <vector>

#include "failure.hpp"

namespace specrt::native {

namespace {

#ifdef SPECRT_ONNXRUNTIME_HEADER
#define SPECRT_ORT_PLACE(position, name, result, parameters)                     \
  static_assert(offsetof(OrtApi, name) == std::size_t{position} * sizeof(void*), \
                "the header has " #name " at another position of the table");
SPECRT_ORT_ENTRIES(SPECRT_ORT_PLACE)
#undef SPECRT_ORT_PLACE
#endif

constexpr char kRemedy[] =
    "install ONNX Runtime, or name its libonnxruntime.so in the options of opening or as "
    "SPECRT_ONNXRUNTIME_LIBRARY when this library is built";

std::mutex& guard() {
  static std::mutex mutex;
  return mutex;
}

// What was loaded and made stays until the process ends: its threads may run until then.
OrtLibrary*& current() {
  static OrtLibrary* library = nullptr;
  return library;
}

struct Environment {
  OrtEnv* env = nullptr;
  bool has_pool = false;
};

Environment& environment_of_process() {
  static Environment environment;
  return environment;
}

std::vector<std::string> places(const std::string& path) {
  if (!path.empty()) return {path};
  std::vector<std::string> known;
#ifdef SPECRT_ONNXRUNTIME_LIBRARY
  known.push_back(SPECRT_ONNXRUNTIME_LIBRARY);
#endif
  known.insert(known.end(), {"libonnxruntime.so.1", "libonnxruntime.so"});
  return known;
}

// Whether an entry of the table points into a library.
bool is_code(void* entry) {
  Dl_info place;
  return entry != nullptr && dladdr(entry, &place) != 0;
}

[[noreturn]] void refuse(const std::string& what) { throw Failure(SPECRT_ENGINE, what); }

const OrtApiBase& open_base(const std::string& path, std::string& found) {
  std::string reason;
  for (const std::string& place : places(path)) {
    void* library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      if (reason.empty()) reason = dlerror();
      continue;
    }
    using GetBase = const OrtApiBase* (*)();
    const auto base = reinterpret_cast<GetBase>(dlsym(library, "OrtGetApiBase"));
    const OrtApiBase* const its = base == nullptr ? nullptr : base();
    if (its != nullptr && its->GetApi != nullptr && its->GetVersionString != nullptr) {
      found = place;
      return *its;
    }
    dlclose(library);
    if (reason.empty()) reason = place + " has no OrtGetApiBase of ONNX Runtime";
  }
  refuse("ONNX Runtime cannot be loaded (" + reason + "); " + kRemedy);
}

}  // namespace

std::string ort_reason(const OrtEntries& call, OrtStatus* status) {
  if (status == nullptr) return "";
  std::string said = call.GetErrorMessage(status);
  call.ReleaseStatus(status);
  said.resize(std::min(said.find('\n'), said.size()));
  return said.empty() ? "no reason given" : said;
}

OrtLibrary::OrtLibrary(const std::string& path) {
  const OrtApiBase& base = open_base(path, path_);
  const char* const version = base.GetVersionString();
  version_ = version == nullptr ? "of unknown version" : version;
  const OrtApi* api = base.GetApi(kOrtApi);
  // Positions are what version 1 of the library promises to keep.
  if (api == nullptr || version_.compare(0, 2, "1.") != 0)
    refuse(path_ + " is ONNX Runtime " + version_ + "; expected 1.5 or a newer 1.x");
#ifdef SPECRT_ONNXRUNTIME_HEADER
#define SPECRT_ORT_TAKE(position, name, result, parameters) call_.name = api->name;
#else
  const auto* table = reinterpret_cast<void* const*>(api);
#define SPECRT_ORT_TAKE(position, name, result, parameters) \
  call_.name = reinterpret_cast<decltype(call_.name)>(table[position]);
#endif
  SPECRT_ORT_ENTRIES(SPECRT_ORT_TAKE)
#undef SPECRT_ORT_TAKE
#define SPECRT_ORT_CHECK(position, name, result, parameters) \
  if (!is_code(reinterpret_cast<void*>(call_.name)))         \
    refuse(path_ + " says it is ONNX Runtime " + version_ + ", and has no " #name "; " + kRemedy);
  SPECRT_ORT_ENTRIES(SPECRT_ORT_CHECK)
#undef SPECRT_ORT_CHECK
}

const OrtLibrary& OrtLibrary::load(const std::string& path) {
  const std::lock_guard<std::mutex> lock(guard());
  if (current() == nullptr) current() = new OrtLibrary(path);
  if (!path.empty() && path != current()->path_)
    refuse("ONNX Runtime was loaded from " + current()->path_ + " before, not from " + path +
           "; one process uses one: name the same for every bundle");
  return *current();
}

const OrtLibrary* OrtLibrary::loaded() {
  const std::lock_guard<std::mutex> lock(guard());
  return current();
}

const OrtEnv* OrtLibrary::environment(int pool) const {
  const std::lock_guard<std::mutex> lock(guard());
  Environment& made = environment_of_process();
  if (made.env != nullptr) return made.env;
  OrtThreadingOptions* options = nullptr;
  std::string reason;
  if (pool > 0) {
    reason = ort_reason(call_, call_.CreateThreadingOptions(&options));
    for (OrtStatus* status :
         {reason.empty() ? call_.SetGlobalIntraOpNumThreads(options, pool) : nullptr,
          reason.empty() ? call_.SetGlobalInterOpNumThreads(options, 1) : nullptr})
      reason += ort_reason(call_, status);
    if (reason.empty())
      reason = ort_reason(call_, call_.CreateEnvWithGlobalThreadPools(
                                     ORT_LOGGING_LEVEL_ERROR, "specrt", options, &made.env));
    if (options != nullptr) call_.ReleaseThreadingOptions(options);
    made.has_pool = reason.empty();
  } else {
    reason = ort_reason(call_, call_.CreateEnv(ORT_LOGGING_LEVEL_ERROR, "specrt", &made.env));
  }
  if (!reason.empty()) refuse("ONNX Runtime " + version_ + " cannot start: " + reason);
  return made.env;
}

bool OrtLibrary::has_pool() const {
  const std::lock_guard<std::mutex> lock(guard());
  return environment_of_process().has_pool;
}

}  // namespace specrt::native
