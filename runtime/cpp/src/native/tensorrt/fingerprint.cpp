#include "native/tensorrt/fingerprint.hpp"

#include <algorithm>

namespace specrt::native::tensorrt {

namespace {

constexpr Version kRtxFirst{8, 0, 0, 0};  // of RTX plans with no capability asked for

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
  const std::vector<std::string>& asked = built.capabilities;
  const bool is_asked = std::count(asked.begin(), asked.end(), gpu.capability) != 0;
  const bool is_rtx = built.backend == "tensorrt-rtx";
  if (is_rtx || built.hardware == "ampere+") {
    const bool any = !is_rtx || asked.empty();
    if ((is_rtx && is_asked) || (any && parse_version(gpu.capability) >= kRtxFirst)) return "";
    return "it is for compute capability " + (any ? "8.0 and later" : joined(asked)) + ", and " +
           gpu.name + " has " + gpu.capability;
  }
  if (!asked.empty() && !is_asked)
    return "it was built on " + built.gpu + " of compute capability " + joined(asked) + ", and " +
           gpu.name + " has " + gpu.capability;
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
