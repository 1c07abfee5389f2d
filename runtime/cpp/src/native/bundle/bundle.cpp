#include "native/bundle/bundle.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>

#include "kernels/kernels.hpp"
#include "native/bundle/fields.hpp"
#include "native/bundle/manifest.hpp"
#include "native/bundle/tuning.hpp"
#include "native/engine/backends.hpp"
#include "native/engine/ort_library.hpp"
#include "native/machine.hpp"

namespace specrt::native {

namespace {

constexpr char kRebuild[] = "build the bundle again with `specrt build RECIPE`";
constexpr std::size_t kReaders = 4;

[[noreturn]] void refuse(const std::string& what) { throw Failure(SPECRT_BUNDLE, what); }

void check_machine(const std::string& folder, const Record& record) {
  const auto built = record.device.find("machine");
  const std::string was = built == record.device.end() ? "None" : built->second;
  const std::string here = machine_name();
  if (built == record.device.end() || was != here)
    refuse(folder + " was built for " + was + ", and this machine is " + here +
           "; build it again here with `specrt build RECIPE`");
}

struct Release {
  int major = -1;
  int minor = 0;
};

int digits(const std::string& text, std::size_t& at) {
  const std::size_t end = std::min(text.find_first_not_of("0123456789", at), text.size());
  if (end == at || end - at > 6) return -1;
  const int number = std::stoi(text.substr(at, end - at));
  at = end;
  return number;
}

// The numbers a version begins with; a major one of -1 for what is not a version.
Release release(const std::string& text) {
  std::size_t at = 0;
  Release version{digits(text, at), 0};
  if (version.major < 0 || at == text.size()) return version;
  if (text[at++] != '.' || text.size() > 100 || (version.minor = digits(text, at)) < 0) return {};
  return version;
}

// Refuse a draft that this library does not run, or on a CPU only.
void check_draft(const std::string& folder, const Manifest& manifest) {
  const std::string kind = manifest.draft ? manifest.draft->kind : "";
  if (kind == "dflash")
    refuse(folder +
           " has a head that drafts blocks (dflash), which the native library does not run yet; "
           "use the Python package or the hosted library, or build it with a head of EAGLE-3");
  if (!manifest.draft || manifest.draft->backend == "ort-cpu") return;
  if (manifest.draft->kind.empty() && manifest.draft->vocab_map.empty()) return;
  const std::string which =
      manifest.draft->kind.empty() ? "a draft that scores some entries only" : "a head";
  throw Failure(SPECRT_UNSUPPORTED,
                folder + " has " + which + ", which the native library does not run on " +
                    manifest.draft->backend +
                    "; build the bundle for `ort-cpu`, or use the hosted library");
}

bool runs_here(const Manifest& manifest) {
  return manifest.target.backend == "ort-cpu" ||
         (manifest.draft && manifest.draft->backend == "ort-cpu");
}

// Refuse engines for other kernels than those of this library.
void check_kernels(const std::string& folder, const Record& record) {
  const auto built = record.versions.find("kernels");
  const bool is_named = built != record.versions.end();
  if (is_named && (built->second == kernels::kLayout || built->second == kernels::kEarlierLayout))
    return;
  refuse(folder + " was built " +
         (is_named ? "for CPU kernels of " + shown(built->second)
                   : std::string("before there were CPU kernels")) +
         ", and this library has those of " + shown(std::string(kernels::kLayout)) + "; " +
         kRebuild + ", where `specrt doctor` finds CPU kernels");
}

// Refuse a library older than the one that saved the engines; newer ones read them.
void check_library(const std::string& folder, const Record& record, const OpenOptions& options) {
  if (!runs_here(record.manifest)) return;
  const auto built = record.versions.find("onnxruntime");
  const Release needed = built == record.versions.end() ? Release{} : release(built->second);
  if (built != record.versions.end() && needed.major < 0)
    refuse(folder + " names " + shown(built->second) +
           " as its version of onnxruntime; expected one such as 1.25.1: build the bundle again "
           "with `specrt build RECIPE`");
  const std::string& version = OrtLibrary::load(options.onnxruntime).version();
  const Release here = release(version);
  if (here.major >= 0 && std::pair(here.major, here.minor) < std::pair(needed.major, needed.minor))
    refuse(folder + " was built with onnxruntime " + built->second + ", and ONNX Runtime " +
           version +
           " is loaded here; use a newer one, or build the bundle again here with "
           "`specrt build RECIPE`");
  check_kernels(folder, record);
}

// What is wrong with one file; empty where nothing is. `found` is set to what was hashed.
std::string problem_of(const std::string& path, const HashedFile& expected, FileState& found) {
  try {
    struct stat info;
    if (stat(path.c_str(), &info) != 0) throw std::system_error(errno, std::generic_category());
    const auto size = static_cast<std::uint64_t>(info.st_size);
    if (size != expected.bytes)
      return path + " has " + std::to_string(size) + " bytes, expected " +
             std::to_string(expected.bytes) + "; " + kRebuild;
    if (!S_ISREG(info.st_mode)) throw std::system_error(EISDIR, std::generic_category());
    const HashedFile hashed = hash_file(path);
    found = hashed.state;
    if (hashed.bytes == expected.bytes && hashed.sha256 == expected.sha256) return "";
    return path + " is not the file that was built (sha256 " + hashed.sha256.substr(0, 12) +
           ", expected " + expected.sha256.substr(0, 12) + "); " + kRebuild;
  } catch (const std::system_error& error) {
    const int code = error.code().value();
    if (code == ENOMEM) throw std::bad_alloc();
    if (code == ENOENT) return path + " is missing; " + kRebuild;
    return failure_of(SPECRT_BUNDLE, path + " is unreadable", std::strerror(code), kRebuild).what();
  }
}

std::map<std::string, FileState> check_files(const std::string& folder, const Record& record) {
  std::vector<std::pair<std::string, HashedFile>> files(record.files.begin(), record.files.end());
  std::vector<std::string> problems(files.size());
  std::vector<FileState> states(files.size());
  std::atomic<std::size_t> next{0};
  std::atomic<bool> has_memory{true};
  const auto work = [&] {
    for (std::size_t i = next++; i < files.size(); i = next++) {
      try {
        problems[i] = problem_of(folder + "/" + files[i].first, files[i].second, states[i]);
      } catch (const std::bad_alloc&) {
        has_memory = false;
      }
    }
  };
  std::vector<std::thread> readers;
  const auto cores = static_cast<std::size_t>(cores_here());
  while (readers.size() + 1 < std::min({kReaders, cores, files.size()})) {
    try {
      readers.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // no more threads to be had: those there are do it
    }
  }
  work();
  for (std::thread& reader : readers) reader.join();
  if (!has_memory) throw std::bad_alloc();
  for (const std::string& problem : problems)
    if (!problem.empty()) refuse(problem);
  std::map<std::string, FileState> checked;
  for (std::size_t i = 0; i < files.size(); ++i) checked[files[i].first] = states[i];
  return checked;
}

// What runs the target, as a tuning names it.
std::string library_of(const Manifest& manifest) {
  const std::string& backend = manifest.backend;
  std::string version;
  if (backend.compare(0, 4, "ort-") == 0) {
    if (const OrtLibrary* library = OrtLibrary::loaded()) version = library->version();
    return "onnxruntime " + (version.empty() ? "of unknown version" : version);
  }
#ifdef SPECRT_WITH_TENSORRT
  version = tensorrt_library();
  version.erase(0, version.rfind(' ') + 1);
#endif
  return backend + " " + (version.empty() ? "of unknown version" : version);
}

}  // namespace

std::string Bundle::file(const std::string& name) const {
  const std::string place = path + "/" + name;
  if (files.count(name) > 0) return place;
  refuse(place + " is not listed in manifest.json; build the bundle again");
}

void Bundle::check_unchanged() const {
  for (const auto& [name, state] : files) {
    const std::string place = path + "/" + name;
    try {
      if (state_of(place) == state) continue;
    } catch (const std::system_error&) {  // it is gone
    }
    refuse(place + " was changed while the bundle was opened; open it again");
  }
}

Bundle open_folder(const std::string& path, int threads, const OpenOptions& options) {
  std::string folder = path;
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  Record record = read_manifest(folder);
  check_machine(folder, record);
  check_draft(folder, record.manifest);
  check_library(folder, record, options);
  Bundle bundle;
  bundle.files = check_files(folder, record);
  bundle.path = folder;
  bundle.manifest = std::move(record.manifest);
  TuningResult result = read_tuning(folder, bundle.manifest, threads, library_of(bundle.manifest));
  bundle.tuning = std::move(result.tuning);
  if (result.notice) bundle.notices.push_back(*result.notice);
  return bundle;
}

}  // namespace specrt::native
