// The processors that go by all of the text, or of the output, so far.
#include <algorithm>

#include "native/processors.hpp"

namespace specrt::native {

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
  for (const auto& entry : seen_.entries()) punish(row, entry.token);
  for (std::size_t i = 0; i < path.size; ++i) {
    if (is_first(path, i) && seen_.times(path[i]) == 0) punish(row, path[i]);
  }
}

OutputPenalties::OutputPenalties(double presence, double frequency)
    : presence_(static_cast<float>(presence)), frequency_(static_cast<float>(frequency)) {}

void OutputPenalties::commit(Span tokens) {
  if (begun_) seen_.add(tokens);
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
    drafted_.push_back(score - taken(seen_.times(token) + static_cast<std::uint32_t>(more)));
  }
  for (const auto& entry : seen_.entries()) {
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
    const auto found = after_.find(key(now));
    if (found != after_.end()) {
      for (const std::size_t end : found->second) {
        if (same(end, now)) row.rule_out(text_[end]);
      }
    }
    for (std::size_t end = std::max(known, before_); end < now; ++end) {
      if (same(end, now)) row.rule_out(text_[end]);
    }
  }
  text_.resize(known);
}

}  // namespace specrt::native
