// engine.json: what a plan was built as, and whether that runs on this library and GPU.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "native/engine/tensorrt/cuda.hpp"
#include "native/engine/tensorrt/library.hpp"

namespace specrt::native::tensorrt {

// The remedy where a plan and its record are not as they were built.
constexpr const char* kAgain = "build the bundle again with `specrt build RECIPE`";

// The sizes an input may take in a profile, and the one its kernels were chosen for.
struct Range {
  std::size_t least, best, most;

  bool fixed() const { return least == most; }
  bool takes(std::size_t size) const { return least <= size && size <= most; }
  bool operator==(const Range& other) const {
    return least == other.least && best == other.best && most == other.most;
  }
};

// The input that says by its size how many positions of the KV buffers are read.
constexpr const char* kKvLength = "kv_length";

// The sizes of one pass; 0 positions are read of the KV buffers by a plan that reads all.
struct PassShape {
  std::size_t width = 0, rows = 0, kv_length = 0;

  bool operator==(const PassShape& other) const {
    return width == other.width && rows == other.rows && kv_length == other.kv_length;
  }
};

// One optimisation profile: passes of some widths, and of how many scored rows.
struct Profile {
  std::string name;  // "prefill", "decode", "catch-up", or "verify G" for gamma G
  Range width, rows;
  std::optional<Range> kv_length;  // positions of the KV buffers that are read; none for all

  bool fixed() const { return width.fixed() && rows.fixed() && (!kv_length || kv_length->fixed()); }
  bool takes(const PassShape& pass) const {
    return width.takes(pass.width) && rows.takes(pass.rows) &&
           (!kv_length || kv_length->takes(pass.kv_length));
  }
};

// See specrt.engine.tensorrt.engine_record.EngineRecord.
struct EngineRecord {
  std::string backend;
  std::string version;  // of the library that built it
  bool native = false;  // KV buffers are updated in place; else each pass writes whole new ones
  std::string compute;  // what KV buffers hold: "fp16", "bf16" or "fp32"
  std::vector<Profile> profiles;  // in the order of the plan
  std::size_t candidates = 0;     // best scores of each row that the plan cuts out
  bool confidence = false;        // whether it tells the probability of the likeliest token
  std::string gpu;                // that it was built on, and for; empty where none was needed
  std::vector<std::string> capabilities;  // of that GPU, or those of the recipe
  std::string hardware;                   // "ampere+", "same-capability", or "" for this GPU only
  bool newer_versions = false;            // later versions of the library may run it
  bool streaming = false;                 // weights stay in host memory where there is no room
  bool stripped = false;                  // weights are not in the plan

  std::size_t kv_item_bytes() const { return compute == "fp32" ? 4 : 2; }
  std::size_t most_width() const;
  std::size_t most_rows() const;
  // Whether a pass says how much of the KV buffers it reads.
  bool reads_prefix() const;
  // How much a pass reads that reaches so far, the least that holds it; 0 for all.
  std::size_t kv_length(std::size_t reach) const;
};

// Throws Failure(SPECRT_BUNDLE) for one that is missing, of a newer format, or no such record.
EngineRecord read_engine_record(const std::string& path);

// The place of the profile for a pass: the one for just it, else one that takes it. Throws
// Failure(SPECRT_ENGINE) with the pass and the passes the plan was built for.
std::size_t choose(const EngineRecord& record, const PassShape& pass);

// What keeps a plan from running here and how to rebuild it; empty where nothing does. The rules
// are those of specrt.engine.tensorrt.engine_record.difference; the driver does not matter.
std::string difference(const EngineRecord& built, const Library& here, const Gpu& gpu);

}  // namespace specrt::native::tensorrt
