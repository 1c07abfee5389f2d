// Files of a bundle that may hold anything: each is read or refused, and nothing else happens.
#include <fstream>

#include "failure.hpp"
#include "native/check.hpp"
#include "native/manifest.hpp"
#include "native/tokenizer.hpp"
#include "native/tuning.hpp"

namespace specrt::checks {

namespace {

using native::Json;

std::string bytes_of(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

// "" where the file was read, else what was said of it.
std::string said_of(const std::string& file, const std::string& folder,
                    const native::Manifest& manifest) {
  try {
    if (file == "manifest.json") {
      native::read_manifest(folder);
    } else if (file == "tuning.json") {
      const auto found = native::read_tuning(folder, manifest, 1, "onnxruntime 1.0");
      const std::string notice = found.notice.value_or("");
      return notice.find("it is damaged") == notice.npos ? "" : notice;
    } else {
      const native::Tokenizer tokenizer(folder, "", std::nullopt, 300);
      tokenizer.decode({0, 1, 299, 300, 1 << 20});
    }
    return "";
  } catch (const Failure& failure) {
    return failure.status() == SPECRT_BUNDLE ? failure.what() : "another status than of bundles";
  }
}

int readers(const Json& vectors) {
  const std::string folder = vectors.at("folder").text();
  const native::Manifest manifest = native::read_manifest(folder).manifest;
  int wrong = 0;
  for (const Json& one : vectors.at("cases").items()) {
    const std::string& file = one.at("file").text();
    const std::string text = bytes_of(one.at("hex").text());
    std::ofstream(folder + "/" + file, std::ios::binary) << text;
    const std::string said = said_of(file, folder, manifest);
    const Json& refused = one.at("refused");
    if (said.find('\n') != said.npos || said.size() > folder.size() + 2000) {
      wrong += differs(text, said, "one line that is not too long");
    }
    if (!refused.is_null() && refused.boolean() == said.empty()) {
      wrong += differs(text, said.empty() ? "read" : said, said.empty() ? "refused" : "read");
    }
  }
  return wrong;
}

const Registered registered("readers", readers);

}  // namespace

}  // namespace specrt::checks
