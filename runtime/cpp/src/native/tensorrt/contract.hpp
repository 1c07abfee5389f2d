// What a plan must be to belong to its record and its manifest.
#pragma once

#include <string>
#include <vector>

#include "native/engine.hpp"
#include "native/tensorrt/plan.hpp"

namespace specrt::native::tensorrt {

constexpr const char* kCandidateValues = "candidates.values";
constexpr const char* kCandidateIds = "candidates.ids";

// The names of the KV inputs; those of the outputs begin with "present_".
std::vector<std::string> cache_names(const Geometry& geometry);

// Refuse a plan whose tensors or profiles are not what its record and the manifest say, before a
// pass finds out. Throws Failure(SPECRT_ENGINE) with what was found and what they say.
void check_plan(const CompiledPlan& plan, const EngineRecord& record, const Geometry& geometry,
                std::size_t max_length);

}  // namespace specrt::native::tensorrt
