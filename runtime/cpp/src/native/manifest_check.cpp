#include <algorithm>
#include <stdexcept>

#include "native/manifest.hpp"
#include "native/manifest_fields.hpp"

namespace specrt::native {

namespace {

bool inside(const std::string& name) {
  if (name.empty() || name[0] == '/') return false;
  bool any = false;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    if (part == "..") return false;
    any = any || (!part.empty() && part != ".");
    begin = end + 1;
  }
  return any;
}

void require(bool holds, const std::string& problem) {
  if (!holds) throw std::runtime_error(problem);
}

void check_files(const Record& record) {
  const Manifest& m = record.manifest;
  std::vector<std::string> listed = {m.target.engine};
  if (m.draft) listed.push_back(m.draft->engine);
  listed.push_back("tokenizer.json");
  for (const std::string& name : listed)
    require(record.files.count(name) > 0, "files lacks " + shown(name) + "; expected it");
  for (const auto& [name, file] : record.files)
    require(inside(name), "files names " + shown(name) + "; expected a place inside the bundle");
}

void check_shape(const std::string& role, const Geometry& shape,
                 const std::vector<std::int64_t>& windows) {
  require(windows.size() == static_cast<std::size_t>(shape.layers),
          role + ".geometry.windows has " + std::to_string(windows.size()) +
              " entries; expected one for each of " + std::to_string(shape.layers) + " layers");
  require(shape.heads % shape.kv_heads == 0,
          role + ".geometry.kv_heads is " + std::to_string(shape.kv_heads) +
              "; expected a divisor of heads, " + std::to_string(shape.heads));
}

}  // namespace

void check_manifest(const Record& record, const std::vector<std::int64_t>& gammas,
                    const std::map<std::string, std::vector<std::int64_t>>& windows) {
  const Manifest& m = record.manifest;
  const auto has = [&](std::int64_t gamma) {
    return std::find(gammas.begin(), gammas.end(), gamma) != gammas.end();
  };
  require(has(0), "gammas is " + shown(gammas) + "; expected 0 among them");
  if (m.gamma)
    require(has(*m.gamma),
            "gamma is " + std::to_string(*m.gamma) + "; expected one of " + shown(gammas));
  const std::int64_t most = *std::max_element(gammas.begin(), gammas.end());
  const std::uint64_t width = std::max<std::uint64_t>(static_cast<std::uint64_t>(m.prefill),
                                                      static_cast<std::uint64_t>(most) + 1);
  require(width <= static_cast<std::uint64_t>(m.max_length),
          "prefill or gammas asks for passes of " + std::to_string(width) + "; expected up to " +
              std::to_string(m.max_length));
  const std::int64_t vocab = m.target.geometry.vocab_size;
  for (const Token end : m.eos_token_ids)
    require(end < vocab, "eos_token_ids is " + shown(m.eos_token_ids) + "; expected ids below " +
                             std::to_string(vocab));
  if (m.bos_token_id)
    require(*m.bos_token_id < vocab, "bos_token_id is " + std::to_string(*m.bos_token_id) +
                                         "; expected an id below " + std::to_string(vocab));
  check_files(record);
  check_shape("target", m.target.geometry, windows.at("target"));
  if (m.draft) check_shape("draft", m.draft->geometry, windows.at("draft"));
}

std::size_t Manifest::max_width() const {
  const int most = gammas.empty() ? 0 : *std::max_element(gammas.begin(), gammas.end());
  return static_cast<std::size_t>(std::max(prefill, most + 1));
}

}  // namespace specrt::native
