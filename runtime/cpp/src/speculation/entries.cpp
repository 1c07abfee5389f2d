// What Python calls of the policy; specrt.speculation.compiled_gamma is the other side.
#include <cstring>

#include "speculation/auto_gamma.hpp"

// libspecrt has the policy inside, and exports its own interface alone.
#ifndef SPECRT_BUILDING

#define SPECRT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace specrt::speculation;

// A policy keeps its rival and its step, in whatever order handles are freed.
using Step = std::shared_ptr<SharedStep>;
using Policy = std::shared_ptr<AutoGamma>;

struct Table {
  const double* ns;
  std::size_t size;
};

Costs costs_of(Table verify, Table draft, double outside_ns, int flags) {
  return {{verify.ns, verify.ns + verify.size},
          {draft.ns, draft.ns + draft.size},
          outside_ns,
          (flags & 1) != 0,
          (flags & 2) != 0};
}

// What a call returns, or `failed` where it throws.
template <typename Call, typename Result>
Result guarded(Call call, Result failed) noexcept {
  try {
    return call();
  } catch (...) {
    return failed;
  }
}

}  // namespace

// Changes with what follows: a library of other entries is not used.
SPECRT_EXPORT int specrt_gamma_entries() { return 2; }

// A shared step; null without memory. `flags`: 1 for assumed costs, 2 for drafts of one pass.
SPECRT_EXPORT Step* specrt_gamma_make_step(const double* verify_ns, std::size_t verifies,
                                           const double* draft_ns, std::size_t drafts,
                                           double outside_ns, int flags, int most, int padded) {
  return guarded(
      [&] {
        const auto costs = costs_of({verify_ns, verifies}, {draft_ns, drafts}, outside_ns, flags);
        return new Step(std::make_shared<SharedStep>(costs, most, padded != 0));
      },
      static_cast<Step*>(nullptr));
}

SPECRT_EXPORT void specrt_gamma_free_step(Step* step) { delete step; }

// The calls below that return a number return -1 where an argument is out of range.

// How many more steps of the same rows the plan is good for.
SPECRT_EXPORT int specrt_gamma_begin(Step* step, int rows, int drafting, Policy* const* policies,
                                     const int* lacks, const int* rooms) {
  return guarded(
      [&] {
        std::vector<DraftingRow> known;
        for (int i = 0; i < drafting; ++i) {
          known.push_back({&(*policies[i])->acceptance(), lacks[i], rooms[i]});
        }
        (*step)->begin(rows, known);
        return (*step)->rest;
      },
      -1);
}

SPECRT_EXPORT int specrt_gamma_settle(Step* step, int made, int drafted, int widest,
                                      std::int64_t draft_ns, std::int64_t verify_ns, int passes,
                                      int drafting, int steps) {
  return guarded(
      [&] {
        (*step)->settle({made, drafted, widest, draft_ns, verify_ns, passes, drafting, steps});
        return 0;
      },
      -1);
}

// A policy; null without memory. `rival` and `step` may be null.
SPECRT_EXPORT Policy* specrt_gamma_make(const double* verify_ns, std::size_t verifies,
                                        const double* draft_ns, std::size_t drafts,
                                        double outside_ns, int flags, int most, Policy* rival,
                                        Step* step) {
  return guarded(
      [&] {
        const auto costs = costs_of({verify_ns, verifies}, {draft_ns, drafts}, outside_ns, flags);
        return new Policy(std::make_shared<AutoGamma>(costs, most, rival ? *rival : nullptr,
                                                      step ? *step : nullptr));
      },
      static_cast<Policy*>(nullptr));
}

SPECRT_EXPORT void specrt_gamma_free(Policy* policy) { delete policy; }

SPECRT_EXPORT int specrt_gamma_choose(Policy* policy) {
  return guarded([&] { return (*policy)->choose(); }, -1);
}

// 0 to leave the token out, 1 to stop after it, 2 to go on.
SPECRT_EXPORT int specrt_gamma_decide(Policy* policy, int drafted, double confidence) {
  return guarded([&] { return static_cast<int>((*policy)->decide(drafted, confidence)); }, -1);
}

SPECRT_EXPORT int specrt_gamma_observe(Policy* policy, std::size_t tokens, std::size_t drafted,
                                       std::size_t accepted, std::int64_t draft_ns,
                                       std::int64_t verify_ns, int caught_up) {
  return guarded(
      [&] {
        (*policy)->observe({tokens, drafted, accepted, draft_ns, verify_ns, caught_up != 0});
        return 0;
      },
      -1);
}

SPECRT_EXPORT double specrt_gamma_rate(Policy* policy) { return (*policy)->rate(); }

// The tokens that a round is expected to emit, by those drafted; `tokens` has room for most + 1.
SPECRT_EXPORT void specrt_gamma_tokens(Policy* policy, double* tokens) {
  const std::vector<double>& known = (*policy)->acceptance().tokens();
  std::memcpy(tokens, known.data(), known.size() * sizeof(double));
}

// Writes why nothing is drafted, as much as there is room for; nothing where it drafts.
SPECRT_EXPORT int specrt_gamma_fallback(Policy* policy, std::size_t after, char* text,
                                        std::size_t room) {
  return guarded(
      [&] {
        const auto reason = (*policy)->fallback(after).value_or("");
        text[reason.copy(text, room - 1)] = 0;
        return 0;
      },
      -1);
}

#endif
