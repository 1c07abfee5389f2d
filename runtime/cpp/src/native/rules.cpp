#include "native/rules.hpp"

#include <algorithm>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "failure.hpp"
#include "native/processors.hpp"

namespace specrt::native {

namespace {

using Spell = std::function<std::vector<Token>(const std::string&)>;
using Words = std::vector<std::vector<Token>>;

class RequestRules : public Rules {
 public:
  explicit RequestRules(std::size_t vocabulary) : vocabulary_(vocabulary) {}

  void learn(const std::vector<Token>& tokens) override {
    if (known_ >= tokens.size()) return;
    const Span added{tokens.data() + known_, tokens.size() - known_};
    for (const auto& processor : processors_) processor->commit(added);
    known_ = tokens.size();
  }

  float* edit(const float* row, std::size_t size, const Token* path,
              std::size_t path_size) override {
    if (size > vocabulary_) throw std::out_of_range("a row is longer than the vocabulary");
    edited_.resize(vocabulary_);  // not before it is needed: most requests ask for no edits
    float* edited = edited_.data();
    if (allowed_ != nullptr) {
      allowed_->copy(row, size, edited);
    } else {
      std::copy(row, row + size, edited);
    }
    std::fill(edited + size, edited + edited_.size(), -std::numeric_limits<float>::infinity());
    for (const auto& processor : processors_) {
      processor->edit({edited, edited_.size()}, {path, path_size});
    }
    return edited;
  }

  bool empty() const { return allowed_ == nullptr && processors_.empty(); }
  void allow(const std::vector<Token>& ids) {
    allowed_ = std::make_unique<AllowedTokens>(ids, vocabulary_);
  }
  template <class Made, class... Arguments>
  void add(Arguments&&... arguments) {
    processors_.push_back(std::make_unique<Made>(std::forward<Arguments>(arguments)...));
  }

 private:
  std::unique_ptr<AllowedTokens> allowed_;  // comes before all others
  std::vector<std::unique_ptr<Processor>> processors_;
  std::size_t vocabulary_;
  std::vector<float> edited_;
  std::size_t known_ = 0;
};

bool is_known(Token token, std::size_t vocabulary) {
  return token >= 0 && static_cast<std::uint64_t>(token) < vocabulary;
}

void check_id(const char* name, Token token, std::size_t vocabulary) {
  if (is_known(token, vocabulary)) return;
  throw Failure(SPECRT_INVALID_ARGUMENT, std::string(name) + " holds " + std::to_string(token) +
                                             "; expected ids of the vocabulary, 0 to " +
                                             std::to_string(vocabulary - 1));
}

// A word's tokens at the beginning of a text and after a space; without spellings that the model
// cannot say.
Words spellings(const std::vector<std::string>& words, const Spell& spell, std::size_t vocabulary) {
  if (!words.empty() && !spell) {
    throw Failure(SPECRT_INVALID_ARGUMENT,
                  "bad_words are texts, and there is no tokenizer to spell them; use "
                  "allowed_token_ids or logit_bias, or open a bundle with a tokenizer");
  }
  Words found;
  for (const std::string& word : words) {
    Words ways{spell(word), spell(" " + word)};
    if (ways[0] == ways[1]) ways.pop_back();
    for (auto& ids : ways) {
      const auto known = [vocabulary](Token id) { return is_known(id, vocabulary); };
      if (!ids.empty() && std::all_of(ids.begin(), ids.end(), known)) {
        found.push_back(std::move(ids));
      }
    }
  }
  return found;
}

// All tokens that end a text, and that the model can say.
std::vector<Token> stops(const Params& params, const std::vector<Token>& ends,
                         std::size_t vocabulary) {
  std::set<Token> found(ends.begin(), ends.end());
  found.insert(params.stop_token_ids.begin(), params.stop_token_ids.end());
  std::vector<Token> known;
  for (const Token token : found) {
    if (is_known(token, vocabulary)) known.push_back(token);
  }
  return known;
}

// A structure would come last; see specrt.requested.
void refuse_structures(const Params& params) {
  const char* asked = params.json_schema       ? "json_schema"
                      : params.regex           ? "regex"
                      : !params.choice.empty() ? "choice"
                      : params.grammar         ? "grammar"
                                               : nullptr;
  if (asked == nullptr) return;
  throw Failure(SPECRT_UNSUPPORTED,
                std::string(asked) +
                    " was given; the native implementation keeps to no structure: "
                    "leave it out, or use the hosted implementation");
}

}  // namespace

std::unique_ptr<Rules> rules_of(const Params& params, const Spell& spell,
                                const std::vector<Token>& ends, std::size_t vocabulary) {
  const Params& p = params;
  auto rules = std::make_unique<RequestRules>(vocabulary);
  for (const Token id : p.stop_token_ids) check_id("stop_token_ids", id, vocabulary);
  if (p.allowed_token_ids) {
    for (const Token id : *p.allowed_token_ids) check_id("allowed_token_ids", id, vocabulary);
    rules->allow(*p.allowed_token_ids);
  }
  Words words = spellings(p.bad_words, spell, vocabulary);
  if (!words.empty()) rules->add<BadWords>(std::move(words));
  if (p.min_tokens > 0 && (!ends.empty() || !p.stop_token_ids.empty())) {
    rules->add<MinTokens>(p.min_tokens, stops(p, ends, vocabulary));
  }
  for (const auto& bias : p.logit_bias) check_id("logit_bias", bias.first, vocabulary);
  if (!p.logit_bias.empty()) rules->add<LogitBias>(p.logit_bias);
  for (const auto& processor : p.processors) rules->add<Custom>(processor);
  if (p.repetition_penalty != 1.0) rules->add<RepetitionPenalty>(p.repetition_penalty);
  if (p.presence_penalty != 0.0 || p.frequency_penalty != 0.0) {
    rules->add<OutputPenalties>(p.presence_penalty, p.frequency_penalty);
  }
  if (p.no_repeat_ngram_size > 0) rules->add<NoRepeatNgram>(p.no_repeat_ngram_size);
  refuse_structures(p);
  return rules->empty() ? nullptr : std::move(rules);
}

}  // namespace specrt::native
