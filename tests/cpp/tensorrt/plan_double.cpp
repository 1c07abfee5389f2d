// The model that is in every plan, what its plans say, and what its passes do.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "tensorrt/double.hpp"

namespace specrt::doubles {

namespace {

std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace

int& last_profile() {
  thread_local int profile = -1;
  return profile;
}

std::vector<float> scores_after(const Id* tokens, std::size_t count, std::size_t vocabulary) {
  std::uint64_t state = 1;
  for (std::size_t i = 0; i < count; ++i)
    state = mixed(state + static_cast<std::uint64_t>(tokens[i]) + 1);
  std::vector<float> scores(vocabulary);
  for (std::size_t v = 0; v < vocabulary; ++v)
    scores[v] = static_cast<float>(mixed(state + 977 * (v + 1)) % 4096) / 512.0f;
  return scores;
}

Id likeliest(const std::vector<float>& scores) {
  return std::max_element(scores.begin(), scores.end()) - scores.begin();
}

float confidence_of(const std::vector<float>& scores) {
  const float best = *std::max_element(scores.begin(), scores.end());
  float sum = 0;
  for (const float score : scores) sum += std::exp(score - best);
  return 1 / sum;
}

namespace {

Spec spec_of(const native::Json& json) {
  const auto size = [&](const char* name) { return json.at(name).integer(); };
  Spec spec{size("batch"),
            size("layers"),
            size("kv_heads"),
            size("head_dim"),
            size("vocabulary"),
            size("max_length"),
            size("candidates"),
            size("scratch"),
            json.at("native").boolean(),
            json.at("confidence").boolean(),
            json.at("compute").text(),
            {}};
  for (const native::Json& one : json.at("profiles").items()) {
    std::array<std::int64_t, 6> sizes{};
    for (std::size_t i = 0; i < 6; ++i) sizes[i] = one.items().at(i).integer();
    spec.profiles.push_back(sizes);
  }
  return spec;
}

}  // namespace

std::shared_ptr<Plan> plan_of(const native::Json& json) {
  auto plan = std::make_shared<Plan>();
  const Spec& spec = plan->spec = spec_of(json);
  const auto add = [&](const std::string& name, Tensor tensor) {
    plan->names.push_back(name);
    plan->tensors.emplace(name, std::move(tensor));
  };
  const std::int64_t b = spec.batch;
  add("input_ids", {{b, -1}, DataType::kINT64, true});
  add("start", {{b}, DataType::kINT64, true});
  add("rows", {{-1}, DataType::kINT64, true});
  const DataType kind = spec.compute == "fp32"   ? DataType::kFLOAT
                        : spec.compute == "bf16" ? DataType::kBF16
                                                 : DataType::kHALF;
  for (std::int64_t i = 0; i < spec.layers; ++i)
    for (const char* half : {"key.", "value."}) {
      const std::string name = half + std::to_string(i);
      plan->caches.push_back(name);
      const Tensor cache{{b, spec.kv_heads, spec.max_length, spec.head_dim}, kind, true};
      add(name, cache);
      add("present_" + name, {cache.shape, kind, false});
      if (spec.native) plan->aliases["present_" + name] = name;
    }
  add("logits", {{b, -1, spec.vocabulary}, DataType::kFLOAT, false});
  add("argmax", {{b, -1}, DataType::kINT64, false});
  if (spec.confidence) add("confidence", {{b, -1}, DataType::kFLOAT, false});
  if (spec.candidates != 0) {
    add("candidates.values", {{b, -1, spec.candidates}, DataType::kFLOAT, false});
    add("candidates.ids", {{b, -1, spec.candidates}, DataType::kINT64, false});
  }
  if (const native::Json* more = json.find("more"))  // a tensor that no graph has
    add(more->text(), {{b}, DataType::kINT8, true});
  if (const native::Json* crossed = json.find("crossed")) plan->aliases[crossed->text()] = "key.1";
  plan->on_host = json.find("on_host") != nullptr;
  return plan;
}

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
