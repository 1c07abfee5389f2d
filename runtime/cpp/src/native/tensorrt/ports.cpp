#include "native/tensorrt/ports.hpp"

#include <algorithm>
#include <numeric>

#include "native/tensorrt/contract.hpp"

namespace specrt::native::tensorrt {

namespace {

constexpr std::size_t kIdBytes = sizeof(Token), kScoreBytes = sizeof(float);

std::size_t ids(std::size_t count) { return aligned(product({count, kIdBytes})); }
std::size_t floats(std::size_t count) { return aligned(product({count, kScoreBytes})); }

}  // namespace

Ports::Ports(const EngineRecord& record, std::size_t vocabulary, bool integrated,
             const Stream& stream)
    : stream_(stream),
      vocabulary_(vocabulary),
      confident_(record.confidence),
      has_candidates_(record.candidates != 0),
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
                  "candidates", stream) {}

void Ports::bind(Context& context) const {
  context.address("input_ids", feed_.device());
  context.address("start", feed_.device(start_at_));
  context.address("rows", feed_.device(rows_at_));
  context.address("argmax", results_.device());
  if (confident_) context.address("confidence", results_.device(confidence_at_));
  context.address("logits", scores_.at());
  if (!has_candidates_) return;
  context.address(kCandidateValues, candidates_.at());
  context.address(kCandidateIds, candidates_.at(ids_at_));
}

void Ports::feed(const Token* tokens, std::size_t width, std::size_t start, std::size_t rows) {
  std::copy_n(tokens, width, fed(0));
  *fed(start_at_) = static_cast<Token>(start);
  std::iota(fed(rows_at_), fed(rows_at_) + rows, static_cast<Token>(width - rows));
  rows_ = rows;
  copied_ = false;
  feed_.send();
}

Output Ports::output() {
  return {reinterpret_cast<const Token*>(results_.host()),
          nullptr,
          confident_ ? reinterpret_cast<const float*>(results_.host(confidence_at_)) : nullptr,
          rows_,
          vocabulary_,
          this};
}

float* Ports::read() {
  if (!copied_) bring();
  return reinterpret_cast<float*>(copy_->at());
}

void Ports::bring() {
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
