// An application of libspecrt, whichever implementation it is linked with; cases are in main.cpp.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "specrt/specrt.h"

namespace application {

using Ids = std::vector<int64_t>;

// What the command line names: bundle, python, onnxruntime, tokenizer, vectors.
extern std::map<std::string, std::string> given;

// Throws std::runtime_error for another status than the expected one.
void require(specrt_status status, specrt_status expected = SPECRT_OK);
specrt_status try_open(specrt_generator** generator, bool prompt_cache = true);
specrt_generator* open(bool prompt_cache = true);
specrt_session* create(specrt_generator* generator);
specrt_stats stats_of(specrt_session* session);
Ids ids_of(specrt_session* session);
std::string json_of(specrt_session* session);
std::string listed(const Ids& ids);  // as JSON

// Replay what the Python runtime generated; print what comes of each request as a line of JSON.
void replay();

}  // namespace application
