#include "native/seen.hpp"

namespace specrt::native {

void Seen::add(Span tokens) {
  for (const Token token : tokens) {
    const auto place = places_.emplace(token, entries_.size());
    if (place.second) entries_.push_back({token, 0});
    ++entries_[place.first->second].times;
  }
}

std::uint32_t Seen::times(Token token) const {
  const auto place = places_.find(token);
  return place == places_.end() ? 0 : entries_[place->second].times;
}

}  // namespace specrt::native
