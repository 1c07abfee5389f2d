#include "tensorrt/case.hpp"

#include <fstream>
#include <iterator>

#include "tensorrt/double.hpp"

namespace specrt::checks {

namespace {

native::Json read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return native::Json::parse(std::string{std::istreambuf_iterator<char>(file), {}});
}

}  // namespace

Case::Case(const std::string& folder) : json(read(folder + "/case.json")) {
  const auto size = [this](const char* name) { return static_cast<int>(json.at(name).integer()); };
  vocabulary = static_cast<std::size_t>(size("vocabulary"));
  native::Manifest& manifest = bundle.manifest;
  bundle.path = folder;
  manifest.batch = size("batch");
  manifest.max_length = size("max_length");
  manifest.prefill = size("prefill");
  for (const native::Json& gamma : json.at("gammas").items())
    manifest.gammas.push_back(static_cast<int>(gamma.integer()));
  native::ModelRecord& model = manifest.target;
  model.engine = "engine.plan";
  model.backend = manifest.backend = json.at("backend").text();
  model.geometry = {size("layers"),   size("kv_heads"),   size("kv_heads"),
                    size("head_dim"), size("vocabulary"), size("max_length")};
  become(json.at("machine"));
}

void become(const native::Json& machine) {
  doubles::Machine& here = doubles::machine;
  const auto number = [&](const char* name, auto& place) {
    if (const native::Json* found = machine.find(name))
      place = static_cast<std::decay_t<decltype(place)>>(found->integer());
  };
  const auto text = [&](const char* name, std::string& place) {
    if (const native::Json* found = machine.find(name)) place = found->text();
  };
  number("devices", here.devices);
  number("major", here.major);
  number("minor", here.minor);
  number("memory", here.memory);
  number("after", here.after);
  number("error", here.error);
  text("gpu", here.gpu);
  text("fails", here.fails);
  text("said", here.said);
  if (const native::Json* found = machine.find("integrated")) here.integrated = found->boolean();
  if (const native::Json* found = machine.find("version"))
    for (std::size_t i = 0; i < here.version.size(); ++i)
      here.version[i] = static_cast<int>(found->items().at(i).integer());
}

}  // namespace specrt::checks
