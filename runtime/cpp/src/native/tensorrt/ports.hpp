// Where the passes of an engine have their feed, their results and their scores.
#pragma once

#include "native/engine.hpp"
#include "native/tensorrt/context.hpp"
#include "native/tensorrt/cuda.hpp"
#include "native/tensorrt/record.hpp"

namespace specrt::native::tensorrt {

// One set for all profiles, as large as the largest needs: passes of an engine never overlap. The
// feed goes to the device in one copy, argmax and confidence come back in one. Scores stay on the
// device until somebody reads a row of them, which greedy decoding does not. Candidates, which the
// hosted implementation reads, have a place that nobody reads.
class Ports final : public LateScores {
 public:
  Ports(const EngineRecord& record, std::size_t vocabulary, bool integrated, const Stream& stream);

  void bind(Context& context) const;
  // Send the feed of one pass, before it is put on the stream.
  void feed(const Token* tokens, std::size_t width, std::size_t start, std::size_t rows);
  // Bring its results, after.
  void fetch() const { results_.fetch(); }
  // The results of the pass that was waited for; they stay until the next feed.
  Output output();
  // Copy the scores of all rows to the host, once for each pass.
  float* read() override;

 private:
  void bring();
  Token* fed(std::size_t offset) const { return reinterpret_cast<Token*>(feed_.host(offset)); }

  const Stream& stream_;
  std::size_t vocabulary_, rows_ = 0;
  bool confident_, has_candidates_;
  bool copied_ = false;
  std::size_t start_at_, rows_at_;  // in the feed; the tokens come first
  std::size_t confidence_at_;       // in the results; argmax comes first
  std::size_t ids_at_, most_rows_;  // in the candidates; values come first
  Staging feed_, results_;
  DeviceMemory scores_, candidates_;
  std::unique_ptr<HostMemory> copy_;
};

}  // namespace specrt::native::tensorrt
