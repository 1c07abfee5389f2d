#include <algorithm>
#include <cstring>

#include "tensorrt/plan_double.hpp"

namespace specrt::doubles {

void Pass::run() const {
  const Spec& spec = plan_->spec;
  const Id* fed = at<Id>("input_ids", width_);
  const auto start = static_cast<std::size_t>(*at<Id>("start", 1));
  const Id* wanted = at<Id>("rows", rows_);
  const auto length = static_cast<std::size_t>(spec.max_length);
  if (start > length || width_ > length - start) broken("positions beyond the KV buffers");
  for (std::size_t i = 0; i < plan_->caches.size(); ++i) update(i, fed, start);
  std::vector<Id> seen = tokens(0, start + width_);
  for (std::size_t i = 1; i < plan_->caches.size(); ++i)
    if (tokens(i, start + width_) != seen) broken("the layers disagree");
  for (std::size_t r = 0; r < rows_; ++r) {
    if (wanted[r] < 0 || wanted[r] >= static_cast<Id>(width_)) broken("a row that was not fed");
    score(r, seen.data(), start + static_cast<std::size_t>(wanted[r]) + 1);
  }
  spoil();
}

// What a buffer holds for a token: something else in each, so that none is taken for another.
std::uint32_t Pass::mark(std::size_t cache, Id token) const {
  const auto held =
      static_cast<std::uint32_t>(token + 1) * 64 + static_cast<std::uint32_t>(cache + 1);
  return plan_->spec.item() == 2 ? held & 0xFFFF : held;
}

std::size_t Pass::place(std::size_t head, std::size_t position) const {
  const auto length = static_cast<std::size_t>(plan_->spec.max_length);
  return (head * length + position) * static_cast<std::size_t>(plan_->spec.head_dim);
}

char* Pass::cache(const std::string& name) const {
  const Spec& spec = plan_->spec;
  const auto heads = static_cast<std::size_t>(spec.kv_heads);
  return at<char>(name, place(heads, 0) * spec.item());
}

void Pass::update(std::size_t number, const Id* fed, std::size_t start) const {
  const Spec& spec = plan_->spec;
  const std::string& name = plan_->caches[number];
  char* from = cache(name);
  char* to = cache("present_" + name);
  if (spec.native != (from == to)) broken(name + " is not where its form wants it");
  const auto heads = static_cast<std::size_t>(spec.kv_heads);
  const auto dims = static_cast<std::size_t>(spec.head_dim);
  if (from != to) std::memcpy(to, from, place(heads, 0) * spec.item());
  for (std::size_t s = 0; s < width_; ++s) {
    const std::uint32_t held = mark(number, fed[s]);  // little endian: the low half comes first
    for (std::size_t h = 0; h < heads; ++h)
      for (std::size_t d = 0; d < dims; ++d)
        std::memcpy(to + (place(h, start + s) + d) * spec.item(), &held, spec.item());
  }
}

std::vector<Id> Pass::tokens(std::size_t number, std::size_t count) const {
  const Spec& spec = plan_->spec;
  const char* held = cache("present_" + plan_->caches[number]);
  std::vector<Id> found;
  for (std::size_t p = 0; p < count; ++p) {
    std::uint32_t first = 0;
    std::memcpy(&first, held + place(0, p) * spec.item(), spec.item());
    for (std::size_t h = 0; h < static_cast<std::size_t>(spec.kv_heads); ++h)
      for (std::size_t d = 0; d < static_cast<std::size_t>(spec.head_dim); ++d)
        if (std::memcmp(held + (place(h, p) + d) * spec.item(), &first, spec.item()) != 0)
          broken("a buffer disagrees with itself");
    const Id token = static_cast<Id>(first / 64) - 1;
    if (token < 0 || mark(number, token) != first) broken("a position that was never written");
    found.push_back(token);
  }
  return found;
}

void Pass::score(std::size_t row, const Id* seen, std::size_t count) const {
  const auto vocabulary = static_cast<std::size_t>(plan_->spec.vocabulary);
  const std::vector<float> scores = scores_after(seen, count, vocabulary);
  std::copy(scores.begin(), scores.end(),
            at<float>("logits", rows_ * vocabulary) + row * vocabulary);
  at<Id>("argmax", rows_)[row] = likeliest(scores);
  if (plan_->spec.confidence) at<float>("confidence", rows_)[row] = confidence_of(scores);
}

// Fill what nobody should read, so that who shares memory with it is found.
void Pass::spoil() const {
  const Spec& spec = plan_->spec;
  const std::size_t count = rows_ * static_cast<std::size_t>(spec.candidates);
  if (count == 0) return;
  std::memset(at<float>("candidates.values", count), 0xA5, count * sizeof(float));
  std::memset(at<Id>("candidates.ids", count), 0xA5, count * sizeof(Id));
}

}  // namespace specrt::doubles
