#include "native/engine/tensorrt/record.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "failure.hpp"
#include "native/bundle/fields.hpp"
#include "native/text/json.hpp"

namespace specrt::native::tensorrt {

namespace {

constexpr std::int64_t kFormat = 1;

std::string text_or_empty(const Fields& fields, const char* key) {
  return fields.has(key) ? fields.text(key) : "";
}

Range range_of(const Fields& profile, const char* key, const Fields& sizes) {
  const auto size = [&](const char* name) { return static_cast<std::size_t>(sizes.count(name)); };
  const Range range{size("least"), size("best"), size("most")};
  if (range.least > range.best || range.best > range.most)
    throw std::runtime_error(std::string(key) + " of profile " + shown(profile.text("name")) +
                             " is " + std::to_string(range.least) + ", " +
                             std::to_string(range.best) + ", " + std::to_string(range.most) +
                             "; expected rising sizes");
  return range;
}

Range range_of(const Fields& profile, const char* key) {
  return range_of(profile, key, profile.record(key));
}

Profile profile_of(const Fields& one) {
  Profile profile{one.text("name"), range_of(one, "width"), range_of(one, "rows"), std::nullopt};
  if (!one.has(kKvLength)) return profile;
  if (const auto sizes = one.record_or_null(kKvLength))
    profile.kv_length = range_of(one, kKvLength, *sizes);
  return profile;
}

// Only what a recipe set otherwise than the library's own choice is there.
std::string setting(const Fields& fields, const char* name) {
  if (!fields.has("settings")) return "";
  for (const Fields& one : fields.records("settings"))
    if (one.text("name") == name) return one.text("value");
  return "";
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(", ", at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 2;
  }
  return parts;
}

void read_device(const Fields& fields, EngineRecord& record) {
  record.gpu = text_or_empty(fields, "gpu");
  const std::string capability = text_or_empty(fields, "gpu_capability");
  record.capabilities = split(capability.empty() ? setting(fields, "capabilities") : capability);
  record.hardware = setting(fields, "hardware_compatible");
  record.newer_versions = setting(fields, "version_compatible") == "True";
  record.streaming = setting(fields, "weight_streaming") == "True";
  record.stripped = setting(fields, "stripped") == "True";
}

EngineRecord record_of(const Fields& fields) {
  const std::int64_t format = fields.whole("format", 1);
  if (format > kFormat)
    throw std::runtime_error("it has format " + std::to_string(format) +
                             ", and this libspecrt reads up to " + std::to_string(kFormat) +
                             "; upgrade it");
  EngineRecord record;
  record.backend = fields.text("backend");
  record.version = fields.text("version");
  const std::string form = fields.text("form");
  record.native = form == "native";
  record.compute = fields.text("compute");
  const bool known =
      record.compute == "fp16" || record.compute == "bf16" || record.compute == "fp32";
  if (!known || !(record.native || form == "decomposed"))
    throw std::runtime_error("it computes in " + shown(record.compute) + ", form " + shown(form) +
                             "; expected fp16, bf16 or fp32, native or decomposed");
  for (const Fields& one : fields.records("profiles")) record.profiles.push_back(profile_of(one));
  if (record.profiles.empty()) throw std::runtime_error("profiles is empty; expected at least one");
  if (fields.has("candidates"))
    record.candidates = static_cast<std::size_t>(fields.whole("candidates", 0, kMostCount));
  record.confidence = fields.has("confidence") && fields.boolean("confidence");
  read_device(fields, record);
  return record;
}

std::string span(const Range& sizes) {
  return sizes.fixed() ? std::to_string(sizes.most)
                       : std::to_string(sizes.least) + " to " + std::to_string(sizes.most);
}

}  // namespace

std::size_t EngineRecord::most_width() const {
  std::size_t most = 0;
  for (const Profile& profile : profiles) most = std::max(most, profile.width.most);
  return most;
}

std::size_t EngineRecord::most_rows() const {
  std::size_t most = 0;
  for (const Profile& profile : profiles) most = std::max(most, profile.rows.most);
  return most;
}

bool EngineRecord::reads_prefix() const {
  return std::any_of(profiles.begin(), profiles.end(),
                     [](const Profile& one) { return one.kv_length.has_value(); });
}

std::size_t EngineRecord::kv_length(std::size_t reach) const {
  std::size_t least = 0;
  for (const Profile& profile : profiles) {
    const std::size_t length = profile.kv_length ? profile.kv_length->most : 0;
    if (length >= reach && (least == 0 || length < least)) least = length;
  }
  return least;
}

EngineRecord read_engine_record(const std::string& path) {
  try {
    std::ifstream file(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    if (!file) throw std::runtime_error("it is missing, or no file");
    const Json json = Json::parse(text);
    return record_of(Fields(json, ""));
  } catch (const std::runtime_error& error) {
    throw Failure(SPECRT_BUNDLE, path + " cannot be read (" + error.what() + "); " + kAgain);
  }
}

std::size_t choose(const EngineRecord& record, const PassShape& pass) {
  const std::vector<Profile>& all = record.profiles;
  if (0 < pass.rows && pass.rows <= pass.width) {
    for (std::size_t i = 0; i < all.size(); ++i)
      if (all[i].fixed() && all[i].takes(pass)) return i;
    for (std::size_t i = 0; i < all.size(); ++i)
      if (all[i].takes(pass)) return i;
  }
  std::string known;
  for (const Profile& one : all)
    known += (known.empty() ? "'" : ", '") + one.name + "' of width " + span(one.width) +
             " and rows " + span(one.rows);
  throw Failure(SPECRT_ENGINE, "no profile of the plan takes a pass of width " +
                                   std::to_string(pass.width) + " with " +
                                   std::to_string(pass.rows) + " scored rows; there are " + known +
                                   "; build the bundle with a recipe that has it");
}

namespace {

constexpr Version kRtxFirst{8, 0, 0, 0};  // of RTX plans without a list of capabilities

std::string version_difference(const EngineRecord& built, const Library& here) {
  Version theirs = parse_version(built.version), ours = here.version;
  // JetPack tells no build number.
  if (theirs[3] == 0 || ours[3] == 0 || built.backend == "tensorrt-rtx") theirs[3] = ours[3] = 0;
  if (theirs == ours || (built.newer_versions && ours > theirs)) return "";
  return "it was built by " + title_of(built.backend) + " " + built.version + ", and here is " +
         here.version_text();
}

std::string joined(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) all += (all.empty() ? "" : ", ") + part;
  return all;
}

std::string gpu_difference(const EngineRecord& built, const Gpu& gpu) {
  const std::vector<std::string>& capabilities = built.capabilities;
  const bool is_listed = std::count(capabilities.begin(), capabilities.end(), gpu.capability) != 0;
  const bool is_rtx = built.backend == "tensorrt-rtx";
  if (is_rtx || built.hardware == "ampere+") {
    const bool any = !is_rtx || capabilities.empty();
    if ((is_rtx && is_listed) || (any && parse_version(gpu.capability) >= kRtxFirst)) return "";
    return "it is for compute capability " + (any ? "8.0 and later" : joined(capabilities)) +
           ", and " + gpu.name + " has " + gpu.capability;
  }
  if (!capabilities.empty() && !is_listed)
    return "it was built on " + built.gpu + " of compute capability " + joined(capabilities) +
           ", and " + gpu.name + " has " + gpu.capability;
  if (!built.gpu.empty() && built.gpu != gpu.name && built.hardware != "same-capability")
    return "it was built on " + built.gpu + ", and here is " + gpu.name;
  return "";
}

}  // namespace

std::string difference(const EngineRecord& built, const Library& here, const Gpu& gpu) {
  if (built.backend != here.backend)
    return "it is a plan of " + title_of(built.backend) + " " + built.version +
           ", and this libspecrt was built with " + here.name() +
           ": build libspecrt with the other library as TENSORRT_ROOT, or build the bundle with "
           "`specrt build RECIPE --backend " +
           here.backend + "`";
  std::string differs = version_difference(built, here);
  const std::string device = gpu_difference(built, gpu);
  if (!device.empty()) differs += (differs.empty() ? "" : "; ") + device;
  if (differs.empty()) return "";
  return differs + ": build it here with `specrt build RECIPE --backend " + here.backend + "`";
}

}  // namespace specrt::native::tensorrt
