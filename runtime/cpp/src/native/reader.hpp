// From rounds to chunks: cut at ends and stop strings, keep counts and times.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "implementation.hpp"
#include "native/completion.hpp"
#include "native/detokenizer.hpp"
#include "native/stop_strings.hpp"
#include "native/tokenizer.hpp"

namespace specrt::native {

class Reader {
 public:
  Reader(Completion& completion, const Params& params, const std::vector<Token>& eos,
         const Tokenizer& tokenizer);

  // What a round delivers; the completion's finish reason is set where it ended the text.
  Chunk take(const Round& round, std::int64_t time_ns);
  // End a text that no end or stop string ended; what was held back of it, if anything.
  std::optional<Chunk> finish();

 private:
  std::size_t cut(const std::vector<Token>& tokens, std::string& text);
  bool show(const std::string& text, std::string& shown);

  Completion& completion_;
  std::unordered_set<Token> ends_;
  std::unordered_set<Token> eos_;
  std::unique_ptr<Detokenizer> detokenizer_;
  StopStrings stops_;
  bool one_by_one_;
};

}  // namespace specrt::native
