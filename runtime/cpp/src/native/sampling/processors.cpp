// The processors that go by all of the text, or of the output, so far.
#include "native/sampling/processors.hpp"

#include <algorithm>
#include <exception>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "failure.hpp"
#include "native/sampling/reductions.hpp"

namespace specrt::native {

void TokenCounts::add(Span tokens) {
  for (const Token token : tokens) {
    const auto place = places_.emplace(token, entries_.size());
    if (place.second) entries_.push_back({token, 0});
    ++entries_[place.first->second].times;
  }
}

std::uint32_t TokenCounts::times(Token token) const {
  const auto place = places_.find(token);
  return place == places_.end() ? 0 : entries_[place->second].times;
}

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

void Row::rule_out(Token token) {
  if (has(token)) scores[token] = -kInfinity;
}

AllowedTokens::AllowedTokens(const std::vector<Token>& ids, std::size_t vocabulary)
    : most_(vocabulary, -kInfinity) {
  for (const Token id : ids) most_.at(static_cast<std::size_t>(id)) = kInfinity;
}

void AllowedTokens::copy(const float* row, std::size_t size, float* into) const {
  const float* most = most_.data();
  for (std::size_t i = 0; i < size; ++i) into[i] = row[i] > most[i] ? most[i] : row[i];
}

BadWords::BadWords(std::vector<std::vector<Token>> words) : words_(std::move(words)), reach_(0) {
  for (const auto& word : words_) reach_ = std::max(reach_, word.size() - 1);
}

void BadWords::commit(Span tokens) {
  last_.insert(last_.end(), tokens.begin(), tokens.end());
  if (last_.size() > reach_) {
    last_.erase(last_.begin(), last_.end() - static_cast<std::ptrdiff_t>(reach_));
  }
}

void BadWords::edit(Row row, Span path) {
  for (const auto& word : words_) {
    if (ends_like(word, path)) row.rule_out(word.back());
  }
}

// Whether text and path end with all of a word but its last token.
bool BadWords::ends_like(const std::vector<Token>& word, Span path) const {
  const std::size_t before = word.size() - 1;
  if (before > last_.size() + path.size) return false;
  for (std::size_t back = 1; back <= before; ++back) {
    const Token token =
        back <= path.size ? path[path.size - back] : last_[last_.size() - (back - path.size)];
    if (token != word[before - back]) return false;
  }
  return true;
}

void MinTokens::commit(Span tokens) {
  if (begun_) left_ -= static_cast<std::int64_t>(tokens.size);
  begun_ = true;
}

void MinTokens::edit(Row row, Span path) {
  if (static_cast<std::int64_t>(path.size) >= left_) return;
  for (const Token end : ends_) row.rule_out(end);
}

LogitBias::LogitBias(const std::vector<std::pair<Token, double>>& bias) {
  std::unordered_map<Token, std::size_t> places;
  for (const auto& [token, added] : bias) {
    const auto place = places.emplace(token, bias_.size());
    if (place.second) bias_.emplace_back(token, 0.0F);
    bias_[place.first->second].second = static_cast<float>(added);
  }
}

void LogitBias::edit(Row row, Span) {
  for (const auto& [token, added] : bias_) {
    if (row.has(token)) row.scores[token] += added;
  }
}

void CallbackProcessor::commit(Span tokens) {
  text_.insert(text_.end(), tokens.begin(), tokens.end());
}

void CallbackProcessor::edit(Row row, Span path) {
  const std::size_t size = text_.size();
  text_.insert(text_.end(), path.begin(), path.end());
  const std::int32_t answer =
      called_.function(called_.user, text_.data(), text_.size(), row.scores, row.size);
  text_.resize(size);
  if (answer == 0) return;
  throw Failure(SPECRT_CALLBACK,
                "a logits processor returned " + std::to_string(answer) + "; expected 0 to go on");
}

namespace {

// Whether a place of a path holds its token for the first time.
bool is_first(Span path, std::size_t place) {
  return std::find(path.begin(), path.begin() + place, path[place]) == path.begin() + place;
}

}  // namespace

RepetitionPenalty::RepetitionPenalty(double penalty)
    : penalty_(static_cast<float>(penalty)), lowers_(penalty >= 1.0) {}

// The lesser of both is the divided one above 0, and the multiplied one below.
void RepetitionPenalty::punish(Row row, Token token) const {
  if (!row.has(token)) return;
  float& score = row.scores[token];
  const float divided = score / penalty_;
  const float multiplied = score * penalty_;
  score = lowers_ ? std::min(divided, multiplied) : std::max(divided, multiplied);
}

void RepetitionPenalty::edit(Row row, Span path) {
  for (const auto& entry : counts_.entries()) punish(row, entry.token);
  for (std::size_t i = 0; i < path.size; ++i) {
    if (is_first(path, i) && counts_.times(path[i]) == 0) punish(row, path[i]);
  }
}

OutputPenalties::OutputPenalties(double presence, double frequency)
    : presence_(static_cast<float>(presence)), frequency_(static_cast<float>(frequency)) {}

void OutputPenalties::commit(Span tokens) {
  if (begun_) counts_.add(tokens);
  begun_ = true;
}

// Rounded to f32 after each operation, as Python does: built with -ffp-contract=off.
float OutputPenalties::taken(std::uint32_t times) const {
  const float often = frequency_ * static_cast<float>(times);
  return presence_ + often;
}

void OutputPenalties::edit(Row row, Span path) {
  drafted_.clear();
  for (const Token token : path) {
    const auto more = std::count(path.begin(), path.end(), token);
    const float score = row.has(token) ? row.scores[token] : 0.0F;
    drafted_.push_back(score - taken(counts_.times(token) + static_cast<std::uint32_t>(more)));
  }
  for (const auto& entry : counts_.entries()) {
    if (row.has(entry.token)) row.scores[entry.token] -= taken(entry.times);
  }
  // Counted from the score as it was: these hold.
  for (std::size_t i = 0; i < path.size; ++i) {
    if (row.has(path[i])) row.scores[path[i]] = drafted_[i];
  }
}

// Hash the tokens before a place of the text.
std::uint64_t NoRepeatNgram::key(std::size_t end) const {
  std::uint64_t hash = 0xCBF29CE484222325;
  for (std::size_t i = end - before_; i < end; ++i) {
    hash = (hash ^ static_cast<std::uint64_t>(text_[i])) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 29;
  }
  return hash;
}

// Whether the same tokens stand before two places of the text.
bool NoRepeatNgram::same(std::size_t end, std::size_t other) const {
  const auto at = text_.begin() + static_cast<std::ptrdiff_t>(end);
  const auto to = text_.begin() + static_cast<std::ptrdiff_t>(other);
  return std::equal(at - static_cast<std::ptrdiff_t>(before_), at,
                    to - static_cast<std::ptrdiff_t>(before_));
}

void NoRepeatNgram::commit(Span tokens) {
  const std::size_t known = text_.size();
  text_.insert(text_.end(), tokens.begin(), tokens.end());
  for (std::size_t end = std::max(known, before_); end < text_.size(); ++end) {
    after_[key(end)].push_back(end);
  }
}

void NoRepeatNgram::edit(Row row, Span path) {
  const std::size_t known = text_.size();
  text_.insert(text_.end(), path.begin(), path.end());
  const std::size_t now = text_.size();
  if (now >= before_) {
    const auto entry = after_.find(key(now));
    if (entry != after_.end()) {
      for (const std::size_t end : entry->second) {
        if (same(end, now)) row.rule_out(text_[end]);
      }
    }
    for (std::size_t end = std::max(known, before_); end < now; ++end) {
      if (same(end, now)) row.rule_out(text_[end]);
    }
  }
  text_.resize(known);
}

namespace {

using Words = std::vector<std::vector<Token>>;

class ProcessorChain : public LogitsProcessors {
 public:
  explicit ProcessorChain(std::size_t vocabulary) : vocabulary_(vocabulary) {}

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
  template <class Kind, class... Arguments>
  void add(Arguments&&... arguments) {
    processors_.push_back(std::make_unique<Kind>(std::forward<Arguments>(arguments)...));
  }

 private:
  std::unique_ptr<AllowedTokens> allowed_;  // comes before all others
  std::vector<std::unique_ptr<LogitsProcessor>> processors_;
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

// A word's tokens at the beginning of a text, after a space and in the middle of a text; without
// spellings that the model cannot say.
Words spellings(const std::vector<std::string>& words, const Spell& spell, std::size_t vocabulary) {
  if (!words.empty() && !spell) {
    throw Failure(SPECRT_INVALID_ARGUMENT,
                  "bad_words are texts, and there is no tokenizer to spell them; use "
                  "allowed_token_ids or logit_bias, or open a bundle with a tokenizer");
  }
  std::set<std::vector<Token>> result;
  for (const std::string& word : words) {
    for (auto& ids : Words{spell(word, false), spell(" " + word, false), spell(word, true)}) {
      const auto known = [vocabulary](Token id) { return is_known(id, vocabulary); };
      if (!ids.empty() && std::all_of(ids.begin(), ids.end(), known)) result.insert(std::move(ids));
    }
  }
  return {result.begin(), result.end()};
}

// All tokens that end a text, and that the model can say.
std::vector<Token> stops(const Params& params, const std::vector<Token>& ends,
                         std::size_t vocabulary) {
  std::set<Token> result(ends.begin(), ends.end());
  result.insert(params.stop_token_ids.begin(), params.stop_token_ids.end());
  std::vector<Token> known;
  for (const Token token : result) {
    if (is_known(token, vocabulary)) known.push_back(token);
  }
  return known;
}

// A structure would come last; see specrt.generator.
void refuse_structures(const Params& params) {
  const char* constraint = params.json_schema       ? "json_schema"
                           : params.regex           ? "regex"
                           : !params.choice.empty() ? "choice"
                           : params.grammar         ? "grammar"
                                                    : nullptr;
  if (constraint == nullptr) return;
  throw Failure(SPECRT_UNSUPPORTED,
                std::string(constraint) +
                    " was given; the native implementation keeps to no structure: "
                    "leave it out, or use the hosted implementation");
}

}  // namespace

std::unique_ptr<LogitsProcessors> build_processors(const Params& params, const Spell& spell,
                                                   const std::vector<Token>& ends,
                                                   std::size_t vocabulary) {
  const Params& p = params;
  auto chain = std::make_unique<ProcessorChain>(vocabulary);
  for (const Token id : p.stop_token_ids) check_id("stop_token_ids", id, vocabulary);
  if (p.allowed_token_ids) {
    for (const Token id : *p.allowed_token_ids) check_id("allowed_token_ids", id, vocabulary);
    chain->allow(*p.allowed_token_ids);
  }
  Words words = spellings(p.bad_words, spell, vocabulary);
  if (!words.empty()) chain->add<BadWords>(std::move(words));
  const std::int64_t least = p.min_tokens.value_or(0);
  if (least > 0 && (!ends.empty() || !p.stop_token_ids.empty())) {
    chain->add<MinTokens>(least, stops(p, ends, vocabulary));
  }
  for (const auto& bias : p.logit_bias) check_id("logit_bias", bias.first, vocabulary);
  if (!p.logit_bias.empty()) chain->add<LogitBias>(p.logit_bias);
  for (const auto& processor : p.processors) chain->add<CallbackProcessor>(processor);
  const double penalty = p.repetition_penalty.value_or(1.0);
  if (penalty != 1.0) chain->add<RepetitionPenalty>(penalty);
  if (p.presence_penalty != 0.0 || p.frequency_penalty != 0.0) {
    chain->add<OutputPenalties>(p.presence_penalty, p.frequency_penalty);
  }
  const std::int64_t size = p.no_repeat_ngram_size.value_or(0);
  if (size > 0) chain->add<NoRepeatNgram>(size);
  refuse_structures(p);
  return chain->empty() ? nullptr : std::move(chain);
}

}  // namespace specrt::native
