#include "native/processors.hpp"

#include <algorithm>
#include <exception>
#include <limits>
#include <string>

#include "failure.hpp"
#include "native/scores.hpp"

namespace specrt::native {

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

void Custom::commit(Span tokens) { text_.insert(text_.end(), tokens.begin(), tokens.end()); }

void Custom::edit(Row row, Span path) {
  const std::size_t size = text_.size();
  text_.insert(text_.end(), path.begin(), path.end());
  call(row);
  text_.resize(size);
  const float most = peak_of(row.scores, row.size);
  if (most < kInfinity) return;
  throw Failure(SPECRT_INVALID_ARGUMENT,
                "a logits processor left NaN or infinity among the scores; expected scores, and "
                "-inf for what must not come");
}

void Custom::call(Row row) {
  std::int32_t answer = 0;
  std::string reason;
  try {
    answer = called_.function(called_.user, text_.data(), text_.size(), row.scores, row.size);
    if (answer == 0) return;
    reason = "returned " + std::to_string(answer) + "; expected 0";
  } catch (const std::exception& error) {
    reason = std::string("threw an exception: ") + error.what();
  } catch (...) {
    reason = "threw what is no std::exception";
  }
  throw Failure(SPECRT_CALLBACK, "a logits processor failed: it " + reason);
}

}  // namespace specrt::native
