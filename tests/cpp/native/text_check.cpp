#include "native/check.hpp"
#include "native/stop_strings.hpp"
#include "native/utf8.hpp"

namespace specrt::checks {

namespace {

using native::Json;

std::string bytes_of(const Json& numbers) {
  std::string bytes;
  for (const Json& number : numbers.items()) {
    bytes.push_back(static_cast<char>(number.integer()));
  }
  return bytes;
}

// Pieces of bytes, and the text that became certain with each; the last is what was held back.
int decode(const Json& one) {
  native::Utf8Decoder decoder;
  int wrong = 0;
  std::size_t at = 0;
  const auto& expected = one.at("texts").items();
  std::string all;
  for (const Json& piece : one.at("pieces").items()) {
    const std::string bytes = bytes_of(piece);
    all += bytes;
    const std::string text = decoder.push(bytes);
    if (text != expected[at].text()) {
      wrong += differs("decoded", text, expected[at].text());
    }
    ++at;
  }
  const std::string rest = decoder.finish();
  if (rest != expected[at].text()) {
    wrong += differs("held back", rest, expected[at].text());
  }
  if (native::is_utf8(all) != one.at("valid").boolean()) {
    wrong += differs("valid", one.at("valid").boolean() ? "no" : "yes", "the other");
  }
  return wrong;
}

std::vector<std::string> texts_of(const Json& list) {
  std::vector<std::string> texts;
  for (const Json& item : list.items()) {
    texts.push_back(item.text());
  }
  return texts;
}

int stop(const Json& one) {
  native::StopStrings stops(texts_of(one.at("stops")));
  int wrong = 0;
  const auto& expected = one.at("shown").items();
  std::size_t at = 0;
  for (const std::string& piece : texts_of(one.at("pieces"))) {
    const native::StopStrings::Shown shown = stops.push(piece);
    const std::string found = shown.text + "|" + shown.met.value_or("");
    if (found != expected[at].text()) {
      wrong += differs("shown", found, expected[at].text());
    }
    ++at;
    if (shown.met) {
      break;
    }
  }
  if (at == expected.size()) {
    return wrong;
  }
  const std::string rest = stops.finish();
  return wrong + (rest == expected[at].text() ? 0 : differs("rest", rest, expected[at].text()));
}

int text(const Json& vectors) {
  int wrong = 0;
  for (const Json& one : vectors.at("utf8").items()) {
    wrong += decode(one);
  }
  for (const Json& one : vectors.at("stops").items()) {
    wrong += stop(one);
  }
  return wrong;
}

const Registered registered("text", text);

}  // namespace

}  // namespace specrt::checks
