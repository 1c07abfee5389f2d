#include "native/engine/tensorrt/passes.hpp"

#include <algorithm>
#include <numeric>

#include "failure.hpp"

namespace specrt::native::tensorrt {

namespace {

using nvinfer1::DataType;

constexpr std::int64_t kAny = -1;

[[noreturn]] void apart(const std::string& actual, const std::string& wanted) {
  throw Failure(SPECRT_ENGINE, "the plan " + actual + ", and its record and the manifest say " +
                                   wanted + "; they do not belong together: " + kAgain);
}

DataType cache_type(const EngineRecord& record) {
  return record.compute == "fp16"   ? DataType::kHALF
         : record.compute == "bf16" ? DataType::kBF16
                                    : DataType::kFLOAT;
}

std::map<std::string, Tensor> expected(const EngineRecord& record, const Geometry& geometry,
                                       std::size_t max_length) {
  const auto count = static_cast<std::int64_t>(record.candidates);
  std::map<std::string, Tensor> tensors{
      {"input_ids", {{1, kAny}, DataType::kINT64, true}},
      {"start", {{1}, DataType::kINT64, true}},
      {"rows", {{kAny}, DataType::kINT64, true}},
      {"argmax", {{1, kAny}, DataType::kINT64, false}},
      {"logits", {{1, kAny, geometry.vocab_size}, DataType::kFLOAT, false}},
  };
  if (record.reads_prefix()) tensors.emplace(kKvLength, Tensor{{kAny}, DataType::kINT64, true});
  if (record.confidence) tensors.emplace("confidence", Tensor{{1, kAny}, DataType::kFLOAT, false});
  if (record.candidates != 0) {
    tensors.emplace(kCandidateValues, Tensor{{1, kAny, count}, DataType::kFLOAT, false});
    tensors.emplace(kCandidateIds, Tensor{{1, kAny, count}, DataType::kINT64, false});
  }
  for (const MemoryBuffer& one : geometry.buffers()) {
    const std::vector<std::int64_t> shape{1, one.heads, static_cast<std::int64_t>(max_length),
                                          one.width};
    tensors.emplace(one.name, Tensor{shape, cache_type(record), true});
    tensors.emplace("present_" + one.name, Tensor{shape, cache_type(record), false});
  }
  return tensors;
}

// A plan whose profiles all have one size may have it where others have none.
bool same(const Tensor& actual, const Tensor& wanted) {
  if (actual.type != wanted.type || actual.is_input != wanted.is_input ||
      actual.shape.size() != wanted.shape.size())
    return false;
  for (std::size_t i = 0; i < actual.shape.size(); ++i)
    if (wanted.shape[i] != actual.shape[i] && wanted.shape[i] != kAny) return false;
  return true;
}

const char* type_name(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
      return "float32";
    case DataType::kHALF:
      return "float16";
    case DataType::kBF16:
      return "bfloat16";
    case DataType::kINT64:
      return "int64";
    default:
      return "another type";
  }
}

std::string described(const Tensor& tensor) {
  std::string shape;
  for (const std::int64_t size : tensor.shape)
    shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  return std::string(tensor.is_input ? "input" : "output") + " [" + shape + "] of " +
         type_name(tensor.type);
}

void check_tensors(const CompiledPlan& plan, const std::map<std::string, Tensor>& wanted) {
  for (const auto& [name, tensor] : wanted) {
    const auto entry = plan.tensors().find(name);
    if (entry == plan.tensors().end()) apart("has no tensor " + name, described(tensor));
    if (!same(entry->second, tensor))
      apart("has " + name + " as " + described(entry->second), described(tensor));
  }
  for (const auto& [name, tensor] : plan.tensors())
    if (wanted.count(name) == 0) apart("has a tensor " + name, "that there is none");
}

std::string listed(const Range& sizes) {
  return std::to_string(sizes.least) + ", " + std::to_string(sizes.best) + ", " +
         std::to_string(sizes.most);
}

void check_range(const CompiledPlan& plan, std::size_t number, const Profile& profile,
                 const std::string& input, const Range& wanted) {
  const Tensor& tensor = plan.tensors().at(input);
  if (tensor.shape.back() != kAny) return;  // one size needs no range
  const Range result = plan.range(static_cast<int>(number), input);
  if (result == wanted) return;
  apart("takes " + input + " of " + listed(result) + " in profile " + std::to_string(number),
        listed(wanted) + " ('" + profile.name + "')");
}

}  // namespace

void check_plan(const CompiledPlan& plan, const EngineRecord& record, const Geometry& geometry,
                std::size_t max_length) {
  const std::size_t count = record.profiles.size();
  if (static_cast<std::size_t>(plan.profiles()) != count)
    apart("has " + std::to_string(plan.profiles()) + " profiles", std::to_string(count));
  check_tensors(plan, expected(record, geometry, max_length));
  for (std::size_t i = 0; i < count; ++i) {
    const Profile& profile = record.profiles[i];
    check_range(plan, i, profile, "input_ids", profile.width);
    check_range(plan, i, profile, "rows", profile.rows);
    if (profile.kv_length) check_range(plan, i, profile, kKvLength, *profile.kv_length);
  }
  if (!record.native) return;
  for (const MemoryBuffer& one : geometry.buffers()) {
    const std::string alias = plan.alias("present_" + one.name);
    if (!alias.empty() && alias != one.name)
      apart("writes present_" + one.name + " into " + alias, "that it goes into " + one.name);
  }
}

namespace {

std::vector<std::size_t> offsets_of(const EngineRecord& record, const Geometry& geometry,
                                    std::size_t length) {
  std::vector<std::size_t> offsets{0};
  for (const MemoryBuffer& one : geometry.buffers())
    offsets.push_back(offsets.back() + aligned(product({static_cast<std::size_t>(one.heads), length,
                                                        static_cast<std::size_t>(one.width),
                                                        record.kv_item_bytes()})));
  return offsets;
}

}  // namespace

KVBuffers::KVBuffers(const EngineRecord& record, const Geometry& geometry, std::size_t max_length,
                     const Stream& stream)
    : sets_(record.native ? 1 : 2),
      offsets_(offsets_of(record, geometry, max_length)),
      memory_(product({sets_, offsets_.back()}), "KV buffers", stream) {
  for (const MemoryBuffer& one : geometry.buffers()) {
    names_.push_back(one.name);
    written_.push_back("present_" + one.name);
  }
}

void KVBuffers::bind(Context& context) const {
  for (std::size_t i = 0; i < names_.size(); ++i) {
    context.address(names_[i].c_str(), place(parity_, i));
    context.address(written_[i].c_str(), place((parity_ + 1) % sets_, i));
  }
}

void* KVBuffers::place(std::size_t set, std::size_t name) const {
  return memory_.at(set * offsets_.back() + offsets_[name]);
}

namespace {

constexpr std::size_t kIdBytes = sizeof(Token), kScoreBytes = sizeof(float);

std::size_t ids(std::size_t count) { return aligned(product({count, kIdBytes})); }
std::size_t floats(std::size_t count) { return aligned(product({count, kScoreBytes})); }

}  // namespace

PassBuffers::PassBuffers(const EngineRecord& record, std::size_t vocabulary, std::size_t max_length,
                         bool integrated, const Stream& stream)
    : stream_(stream),
      vocabulary_(vocabulary),
      confident_(record.confidence),
      has_candidates_(record.candidates != 0),
      reads_prefix_(record.reads_prefix()),
      start_at_(ids(record.most_width())),
      rows_at_(start_at_ + ids(1)),
      confidence_at_(ids(record.most_rows())),
      ids_at_(floats(product({record.most_rows(), record.candidates}))),
      most_rows_(record.most_rows()),
      feed_(rows_at_ + ids(most_rows_), "feeds", integrated, stream),
      results_(confidence_at_ + (confident_ ? floats(most_rows_) : 0), "results", integrated,
               stream),
      scores_(floats(product({most_rows_, vocabulary})), "scores", stream),
      candidates_(ids_at_ + (has_candidates_ ? ids(product({most_rows_, record.candidates})) : 0),
                  "candidates", stream),
      unread_(record.reads_prefix() ? ids(max_length) : 0, kKvLength, stream) {}

void PassBuffers::bind(Context& context) const {
  context.address("input_ids", feed_.device());
  context.address("start", feed_.device(start_at_));
  context.address("rows", feed_.device(rows_at_));
  if (reads_prefix_) context.address(kKvLength, unread_.at());
  context.address("argmax", results_.device());
  if (confident_) context.address("confidence", results_.device(confidence_at_));
  context.address("logits", scores_.at());
  if (!has_candidates_) return;
  context.address(kCandidateValues, candidates_.at());
  context.address(kCandidateIds, candidates_.at(ids_at_));
}

void PassBuffers::feed(const Token* tokens, std::size_t width, std::size_t start,
                       std::size_t rows) {
  std::copy_n(tokens, width, fed(0));
  *fed(start_at_) = static_cast<Token>(start);
  std::iota(fed(rows_at_), fed(rows_at_) + rows, static_cast<Token>(width - rows));
  rows_ = rows;
  copied_ = false;
  feed_.send();
}

Output PassBuffers::output() {
  return {reinterpret_cast<const Token*>(results_.host()),
          nullptr,
          confident_ ? reinterpret_cast<const float*>(results_.host(confidence_at_)) : nullptr,
          rows_,
          vocabulary_,
          this};
}

float* PassBuffers::read() {
  if (!copied_) bring();
  return reinterpret_cast<float*>(copy_->at());
}

void PassBuffers::bring() {
  const OnDevice here;
  if (!copy_) {
    const std::size_t all = product({most_rows_, vocabulary_, kScoreBytes});
    copy_ = std::make_unique<HostMemory>(all, false);
  }
  const std::size_t wanted = rows_ * vocabulary_ * kScoreBytes;
  stream_.copy(copy_->at(), scores_.at(), wanted, cudaMemcpyDeviceToHost);
  stream_.wait();
  copied_ = true;
}

}  // namespace specrt::native::tensorrt
