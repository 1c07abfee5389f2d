// Runs a check of the native TensorRT part over its doubles: `tensorrt_check NAME FOLDER`.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "json.hpp"
#include "native/bundle/bundle.hpp"
#include "native/engine/backends.hpp"
#include "native/engine/tensorrt/record.hpp"
#include "tensorrt/double.hpp"

namespace specrt::checks {

namespace {

using doubles::Id;

native::Json read_json(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return native::Json::parse(std::string{std::istreambuf_iterator<char>(file), {}});
}

// Make the machine what a test wrote.
void become(const Json& json) {
  doubles::Machine& machine = doubles::machine;
  machine = {get<int>(json, "devices"),
             get<int>(json, "major"),
             get<int>(json, "minor"),
             get<std::string>(json, "gpu"),
             get<bool>(json, "integrated"),
             get<std::size_t>(json, "memory"),
             get<std::vector<int>>(json, "version"),
             get<std::string>(json, "fails"),
             get<int>(json, "after"),
             static_cast<cudaError_t>(get<int>(json, "error")),
             get<std::string>(json, "said")};
}

// What a check is to open, and on what machine: `case.json` in a folder that a test wrote.
struct Case {
  explicit Case(const std::string& folder)
      : json(read_json(folder + "/case.json")), vocabulary(get<std::size_t>(json, "vocabulary")) {
    native::Manifest& manifest = bundle.manifest;
    bundle.path = folder;
    for (const auto& name : get<std::vector<std::string>>(json, "files")) bundle.files[name] = {};
    manifest.batch = get<int>(json, "batch");
    manifest.max_length = get<int>(json, "max_length");
    manifest.prefill = get<int>(json, "prefill");
    manifest.gammas = get<std::vector<int>>(json, "gammas");
    native::ModelRecord& model = manifest.target;
    model.engine = "engine.plan";
    model.backend = manifest.backend = get<std::string>(json, "backend");
    const int heads = get<int>(json, "kv_heads"), width = get<int>(json, "head_dim");
    model.geometry.heads = heads;
    model.geometry.vocab_size = get<int>(json, "vocabulary");
    model.geometry.max_positions = manifest.max_length;
    model.geometry.memories.assign(get<std::size_t>(json, "layers"),
                                   {native::LayerMemory::Kind::attention, heads, width, width, 0});
    become(json.at("machine"));
  }

  std::shared_ptr<native::Model> open() const {
    return native::open_tensorrt(bundle, bundle.manifest.target);
  }

  native::Bundle bundle;
  native::Json json;
  std::size_t vocabulary;
};

std::atomic<int> wrong{0};

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("wrong: %s\n", what.c_str());
  ++wrong;
}

// A text that one engine is fed, in passes of any width, from any position.
class Text {
 public:
  Text(const Case& its, native::Engine& engine, std::uint64_t seed)
      : case_(its), engine_(engine), state_(seed + 1) {}

  std::size_t size() const { return held_.size(); }

  // Go back to a length, feed new tokens there, and hold every scored row to the model.
  void pass(std::size_t start, std::size_t width, std::size_t rows, bool reads) {
    held_.resize(start);
    for (std::size_t i = 0; i < width; ++i) held_.push_back(token());
    const std::size_t before = doubles::bytes_fetched();
    const native::Output output = engine_.forward(held_.data() + start, width, start, rows);
    const std::size_t small = doubles::bytes_fetched() - before;
    expect(small < rows * case_.vocabulary * sizeof(float) + 4096, "scores came unasked");
    if (case_.json.find("profiles") != nullptr)
      expect(doubles::last_profile() == profile_of(width, rows),
             "profile of " + std::to_string(width));
    expect(output.rows == rows && output.vocabulary == case_.vocabulary, "sizes of the output");
    for (std::size_t r = 0; r < rows; ++r) hold(output, r, start + width - rows + r + 1, reads);
    const std::size_t copied = doubles::bytes_fetched() - before - small;
    expect(copied == (reads ? rows * case_.vocabulary * sizeof(float) : 0), "scores copied once");
  }

 private:
  void hold(const native::Output& output, std::size_t row, std::size_t length, bool reads) const {
    const std::string which = "row " + std::to_string(row) + " after " + std::to_string(length);
    const std::vector<float> scores = doubles::scores_after(held_.data(), length, case_.vocabulary);
    expect(output.argmax[row] == doubles::likeliest(scores), "argmax of " + which);
    if (output.confidence != nullptr)
      expect(output.confidence[row] == doubles::confidence_of(scores), "confidence of " + which);
    if (!reads) return;
    const float* found = output.row(row);
    expect(std::equal(scores.begin(), scores.end(), found), "scores of " + which);
    output.row(row)[0] = -1;  // who asks may edit them, and finds the edit again
    expect(output.row(row)[0] == -1, "an edit of " + which);
  }

  // The profiles of a target: one of many sizes, one for one token, one for each gamma.
  int profile_of(std::size_t width, std::size_t rows) const {
    const std::vector<int>& gammas = case_.bundle.manifest.gammas;
    const auto found = std::find(gammas.begin(), gammas.end(), static_cast<int>(width) - 1);
    if (width != rows || (width > 1 && found == gammas.end())) return 0;
    return width == 1 ? 1 : static_cast<int>(found - gammas.begin()) + 2;
  }

  Id token() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<Id>((state_ >> 33) % case_.vocabulary);
  }

  const Case& case_;
  native::Engine& engine_;
  std::uint64_t state_;
  std::vector<Id> held_;
};

// Prefill in chunks, decode, verify at every width with rollbacks, and fill the buffers up.
void generate(const Case& its, native::Model& model, std::uint64_t seed) {
  const std::unique_ptr<native::Engine> engine = model.engine();
  const auto prefill = static_cast<std::size_t>(its.bundle.manifest.prefill);
  const std::size_t length = engine->max_length();
  Text text(its, *engine, seed);
  text.pass(0, prefill - 2, 1, true);
  text.pass(prefill - 2, prefill, 1, false);  // wider than before, in the same profile
  text.pass(5, prefill - 1, 2, true);
  text.pass(6, prefill - 1, 4, true);  // and with more rows
  for (int turn = 0; turn < 3; ++turn) {
    for (const int gamma : its.bundle.manifest.gammas) {
      const auto width = static_cast<std::size_t>(gamma) + 1;
      const std::size_t kept = text.size() - static_cast<std::size_t>(turn) % width;
      if (kept + width > length) continue;
      text.pass(kept, width, width, turn != 1);
      text.pass(kept + 1, 1, 1, turn == 2);
    }
  }
  text.pass(3, 2, 1, true);  // far back, through the wide profile: two tokens, one row
  text.pass(0, prefill, 1, false);
  while (text.size() + prefill <= length) text.pass(text.size(), prefill, 1, false);
  while (text.size() < length) text.pass(text.size(), 1, 1, true);
}

void open(const Case& its) {
  const std::shared_ptr<native::Model> model = its.open();
  const std::unique_ptr<native::Engine> engine = model->engine();
  Text(its, *engine, 1).pass(0, 2, 1, true);
}

// By an application that uses another GPU, and finds it in use afterwards.
void passes(const Case& its) {
  cudaSetDevice(3);
  std::shared_ptr<native::Model> model = its.open();
  generate(its, *model, 1);
  std::thread other([&] { generate(its, *model, 2); });
  generate(its, *model, 3);
  other.join();
  const std::unique_ptr<native::Engine> engine = model->engine();
  model.reset();  // an engine keeps what it needs
  Text(its, *engine, 4).pass(0, 3, 1, true);
  int device = 0;
  cudaGetDevice(&device);
  expect(device == 3, "the GPU in use is " + std::to_string(device));
}

// Print what a pass that cannot be says, and what the next good one says.
void refused(const Case& its) {
  const std::unique_ptr<native::Engine> engine = its.open()->engine();
  const std::vector<Id> tokens(4096, 1);
  for (const auto& pass : get<std::vector<std::vector<std::size_t>>>(its.json, "passes")) {
    try {
      const native::Output output = engine->forward(tokens.data(), pass[0], pass[1], pass[2]);
      if (pass.size() > 3) output.row(0);
      std::printf("ran\n");
    } catch (const Failure& error) {
      std::printf("%d %s\n", error.status(), error.what());
    }
  }
}

void differences(const Case& its) {
  using namespace native::tensorrt;
  int number = 0;
  for (const native::Json& machine : its.json.at("machines").items()) {
    const std::string name = its.bundle.path + "/" + std::to_string(number++) + ".json";
    become(machine);
    Library here = library();
    const std::vector<int>& version = doubles::machine.version;
    here.version = {version[0], version[1], version[2], version[3]};
    std::printf("%s\n", difference(read_engine_record(name), here, find_gpu()).c_str());
  }
}

const std::map<std::string, void (*)(const Case&)> kChecks = {
    {"open", open}, {"passes", passes}, {"refused", refused}, {"differences", differences}};

int run(const std::string& name, const std::string& folder) {
  const Case its(folder);
  try {
    kChecks.at(name)(its);
  } catch (const Failure& error) {
    std::printf("%d %s\n", error.status(), error.what());
  }
  expect(doubles::alive() == 0, std::to_string(doubles::alive()) + " were not given back");
  return wrong == 0 ? 0 : 1;
}

}  // namespace

}  // namespace specrt::checks

int main(int count, char** arguments) {
  if (count != 3) return 2;
  return specrt::checks::run(arguments[1], arguments[2]);
}
