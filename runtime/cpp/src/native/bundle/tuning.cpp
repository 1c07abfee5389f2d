#include "native/bundle/tuning.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "failure.hpp"
#include "native/bundle/fields.hpp"
#include "native/bundle/manifest.hpp"
#include "native/machine.hpp"
#include "native/text/json.hpp"

namespace specrt::native {

namespace {

constexpr std::int64_t kTuningFormat = 2;
constexpr std::uint64_t kMostTuningBytes = 1 << 20;

struct TuningRecord {
  Tuning tuning;
  std::string source;
  Machine machine;
  std::int64_t threads = 0;
};

std::vector<double> nanoseconds(const Fields& fields, const std::string& key) {
  const std::vector<std::int64_t> whole = fields.wholes(key);
  return {whole.begin(), whole.end()};
}

// A gamma, and a drafter, as one setting names them.
int gamma_of(const Fields& fields, const Manifest& manifest) {
  const auto gamma = fields.whole_or_null("fixed_gamma");
  if (!gamma) return kAuto;
  const std::vector<int>& built = manifest.gammas;
  for (const int one : built)
    if (one == *gamma) return one;
  throw std::runtime_error("gamma " + std::to_string(*gamma) + ", expected one of " +
                           shown(std::vector<std::int64_t>(built.begin(), built.end())));
}

std::string drafter_of(const Fields& fields) {
  const std::string drafter = fields.text("drafter");
  for (const char* known : {"", "model", "ngram", "cascade", "none"})
    if (drafter == known) return drafter;
  throw std::runtime_error("drafter " + shown(drafter) +
                           ", expected one of model, ngram, cascade, none");
}

void check_settings(const Fields& fields, const Manifest& manifest) {
  for (const Fields& setting : fields.records("settings")) {
    setting.only({"drafter", "fixed_gamma", "emitted", "decode_ns", "rounds", "drafted",
                  "evaluated", "accepted"});
    setting.count("emitted");
    setting.whole("decode_ns", 1);
    for (const char* key : {"rounds", "drafted", "evaluated", "accepted"}) setting.whole(key);
    gamma_of(setting, manifest);
    drafter_of(setting);
  }
}

Machine read_machine(const Fields& fields) {
  fields.only({"cpu", "vector_units", "cores", "accelerator", "library"});
  return {fields.text("cpu"), fields.text("vector_units"), fields.whole("cores"),
          fields.text("accelerator"), fields.text("library")};
}

// How wide the widest pass is whose cost is kept: more than one row's where rows share passes.
std::size_t expected_widths(const Manifest& manifest, std::size_t own) {
  if (manifest.target.backend != "ort-cpu") return own;
  const auto rows = static_cast<std::size_t>(manifest.batch);
  return own * std::max<std::size_t>(1, std::min(rows, manifest.max_width() / own));
}

std::string costs_shown(const std::vector<double>& costs) {
  std::string text = "(";
  for (const double cost : costs) text += (text.size() > 1 ? ", " : "") + decimal(cost);
  return text + ")";
}

// Throws Failure(SPECRT_BUNDLE) for costs that no machine has.
void check_possible(const Costs& costs) {
  const auto sound = [](const std::vector<double>& known, double least) {
    return !known.empty() && std::all_of(known.begin(), known.end(), [least](double cost) {
      return std::isfinite(cost) && cost >= least;
    });
  };
  const double some = std::numeric_limits<double>::denorm_min();
  if (sound(costs.verify_ns, some) && sound(costs.draft_ns, 0) && sound({costs.outside_ns}, 0) &&
      costs.draft_ns[0] == 0)
    return;
  throw Failure(SPECRT_BUNDLE,
                "the costs are verify " + costs_shown(costs.verify_ns) + ", draft " +
                    costs_shown(costs.draft_ns) + ", outside " + costs_shown({costs.outside_ns}) +
                    "; expected nanoseconds from gamma 0 on, drafting none of which costs "
                    "nothing; run `specrt tune` again");
}

void check_costs(const Costs& costs, const Manifest& manifest) {
  check_possible(costs);
  const auto own = static_cast<std::size_t>(manifest.gammas.back()) + 1;
  const std::size_t wide = expected_widths(manifest, own);
  if (costs.verify_ns.size() != wide || costs.draft_ns.size() != own)
    throw std::runtime_error(std::to_string(costs.verify_ns.size()) + " and " +
                             std::to_string(costs.draft_ns.size()) + " costs, expected " +
                             std::to_string(wide) + " and " + std::to_string(own));
  const auto& drafts = costs.draft_ns;
  if (manifest.draft && std::count(drafts.begin() + 1, drafts.end(), 0.0) > 0)
    throw std::runtime_error("the draft costs nothing");
}

TuningRecord read_record(const std::string& path, const Manifest& manifest) {
  const Json json = Json::parse(read_text(path, kMostTuningBytes));
  const Fields fields(json, json.kind() == Json::Kind::kObject ? "" : "it");
  const Json* format = json.find("format");
  if (format == nullptr || format->kind() != Json::Kind::kInteger ||
      format->integer() != kTuningFormat)
    throw std::runtime_error("format " + (format ? shown(*format) : "null") + ", expected " +
                             std::to_string(kTuningFormat));
  TuningRecord record;
  fields.text("date");
  record.source = fields.text("source");
  record.machine = read_machine(fields.record("machine"));
  record.threads = fields.count("threads");
  fields.whole("pools", 1, 2);
  record.tuning.costs.verify_ns = nanoseconds(fields, "verify_ns");
  record.tuning.costs.draft_ns = nanoseconds(fields, "draft_ns");
  record.tuning.costs.outside_ns = static_cast<double>(fields.whole("outside_ns"));
  record.tuning.gamma = gamma_of(fields, manifest);
  record.tuning.drafter = drafter_of(fields);
  check_settings(fields, manifest);
  check_costs(record.tuning.costs, manifest);
  return record;
}

std::string stale(const TuningRecord& record, const Manifest& manifest, int threads,
                  const std::string& library) {
  if (record.source != manifest.source) return "the bundle was built again since";
  if (const auto differs = record.machine.difference(this_machine(library)))
    return "it was measured " + *differs;
  if (record.threads != threads)
    return "it was measured with " + std::to_string(record.threads) + " threads, not " +
           std::to_string(threads);
  return "";
}

}  // namespace

TuningResult read_tuning(const std::string& folder, const Manifest& manifest, int threads,
                         const std::string& library) {
  const std::string path = folder + "/tuning.json";
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) return {};
  const bool every = threads == cores_here();
  const std::string again =
      "run `specrt tune " + folder + (every ? "" : " --threads " + std::to_string(threads)) + "`";
  try {
    const TuningRecord record = read_record(path, manifest);
    const std::string reason = stale(record, manifest, threads, library);
    if (reason.empty()) return {record.tuning, std::nullopt};
    return {std::nullopt, path + " is ignored: " + reason + "; " + again +
                              "; until then gamma auto learns what passes cost while it decodes"};
  } catch (const std::runtime_error& error) {
    std::string reason = error.what();
    reason.resize(std::min(reason.find(';'), reason.size()));
    return {std::nullopt, path + " is ignored, it is damaged (" + reason + "); " + again};
  }
}

}  // namespace specrt::native
