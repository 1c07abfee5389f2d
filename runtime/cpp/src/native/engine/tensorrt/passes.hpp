// The memory that passes of a plan are bound to, and what a plan must have to be bound to it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "native/engine/protocol.hpp"
#include "native/engine/tensorrt/cuda.hpp"
#include "native/engine/tensorrt/plan.hpp"
#include "native/engine/tensorrt/record.hpp"

namespace specrt::native::tensorrt {

constexpr const char* kCandidateValues = "candidates.values";
constexpr const char* kCandidateIds = "candidates.ids";

// Refuse a plan whose tensors or profiles are not what its record and the manifest say, before a
// pass finds out. Throws Failure(SPECRT_ENGINE) with what was found and what they say.
void check_plan(const CompiledPlan& plan, const EngineRecord& record, const Geometry& geometry,
                std::size_t max_length);

// One set of KV buffers that every pass updates in place, or two that swap after each. All are
// cleared, because attention may read what it then multiplies by 0.
class KVBuffers {
 public:
  KVBuffers(const EngineRecord& record, const Geometry& geometry, std::size_t max_length,
            const Stream& stream);

  // Which set the next pass reads; always 0 where there is one.
  std::size_t parity() const { return parity_; }
  // Let a context read the set of the next pass, and write the other, or the same if there is one.
  void bind(Context& context) const;
  // Note that a pass has written the other set.
  void swap() { parity_ = (parity_ + 1) % sets_; }

 private:
  void* place(std::size_t set, std::size_t name) const;

  std::vector<std::string> names_, written_;
  std::size_t sets_;
  std::vector<std::size_t> offsets_;  // of each buffer in a set, and after the last the set's size
  std::size_t parity_ = 0;
  DeviceMemory memory_;
};

// One set for all profiles, as large as the largest needs: passes of an engine never overlap. The
// feed goes to the device in one copy, argmax and confidence come back in one. Scores stay on the
// device until a row of them is read, which greedy decoding does not. Candidates, which the
// hosted implementation reads, are written and never read.
class PassBuffers final : public DeferredScores {
 public:
  PassBuffers(const EngineRecord& record, std::size_t vocabulary, std::size_t max_length,
              bool integrated, const Stream& stream);

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
  bool confident_, has_candidates_, reads_prefix_;
  bool copied_ = false;
  std::size_t start_at_, rows_at_;  // in the feed; the tokens come first
  std::size_t confidence_at_;       // in the results; argmax comes first
  std::size_t ids_at_, most_rows_;  // in the candidates; values come first
  Staging feed_, results_;
  DeviceMemory scores_, candidates_;
  DeviceMemory unread_;  // of an input whose size alone counts
  std::unique_ptr<HostMemory> copy_;
};

}  // namespace specrt::native::tensorrt
