// The tokens of texts, as the tokenizer library gives them.
#include <limits>

#include "native/check.hpp"
#include "native/tokenizer.hpp"

namespace specrt::checks {

namespace {

int encode(const native::Json& vectors) {
  const native::Tokenizer tokenizer(vectors.at("bundle").text(), vectors.at("tokenizer").text(),
                                    std::nullopt, std::numeric_limits<int>::max());
  int wrong = tokenizer.encodes() ? 0 : differs("tokenizer", tokenizer.notice(), "nothing to say");
  for (const native::Json& one : vectors.at("texts").items()) {
    std::string found, expected;
    for (const Token token : tokenizer.encode(one.at("text").text())) {
      found += std::to_string(token) + " ";
    }
    for (const native::Json& token : one.at("ids").items()) {
      expected += std::to_string(token.integer()) + " ";
    }
    if (found != expected) wrong += differs(one.at("text").text(), found, expected);
  }
  return wrong;
}

const Registered registered("encode", encode);

}  // namespace

}  // namespace specrt::checks
