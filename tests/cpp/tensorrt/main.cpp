// Runs a check of the native TensorRT part over its doubles: `tensorrt_check NAME FOLDER`.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "native/engine/backends.hpp"
#include "native/engine/tensorrt/record.hpp"
#include "native/text/json.hpp"
#include "tensorrt/double.hpp"

namespace specrt::checks {

namespace {

using doubles::Id;

native::Json read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return native::Json::parse(std::string{std::istreambuf_iterator<char>(file), {}});
}

void become(const native::Json& machine);

// What a check is to open, and on what machine: `case.json` in a folder that a test wrote.
struct Case {
  explicit Case(const std::string& folder);

  native::Bundle bundle;
  native::Json json;
  std::size_t vocabulary;

  std::shared_ptr<native::Model> open() const {
    return native::open_tensorrt(bundle, bundle.manifest.target);
  }
};

Case::Case(const std::string& folder) : json(read(folder + "/case.json")) {
  const auto size = [this](const char* name) { return static_cast<int>(json.at(name).integer()); };
  vocabulary = static_cast<std::size_t>(size("vocabulary"));
  native::Manifest& manifest = bundle.manifest;
  bundle.path = folder;
  manifest.batch = size("batch");
  manifest.max_length = size("max_length");
  manifest.prefill = size("prefill");
  for (const native::Json& gamma : json.at("gammas").items())
    manifest.gammas.push_back(static_cast<int>(gamma.integer()));
  native::ModelRecord& model = manifest.target;
  model.engine = "engine.plan";
  model.backend = manifest.backend = json.at("backend").text();
  model.geometry = {size("layers"),   size("kv_heads"),   size("kv_heads"),
                    size("head_dim"), size("vocabulary"), size("max_length")};
  become(json.at("machine"));
}

// Make the machine what an object of `case.json` says.
void become(const native::Json& machine) {
  doubles::Machine& here = doubles::machine;
  const auto number = [&](const char* name, auto& place) {
    if (const native::Json* found = machine.find(name))
      place = static_cast<std::decay_t<decltype(place)>>(found->integer());
  };
  const auto text = [&](const char* name, std::string& place) {
    if (const native::Json* found = machine.find(name)) place = found->text();
  };
  number("devices", here.devices);
  number("major", here.major);
  number("minor", here.minor);
  number("memory", here.memory);
  number("after", here.after);
  number("error", here.error);
  text("gpu", here.gpu);
  text("fails", here.fails);
  text("said", here.said);
  if (const native::Json* found = machine.find("integrated")) here.integrated = found->boolean();
  if (const native::Json* found = machine.find("version"))
    for (std::size_t i = 0; i < here.version.size(); ++i)
      here.version[i] = static_cast<int>(found->items().at(i).integer());
}

std::atomic<int> wrong{0};

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("wrong: %s\n", what.c_str());
  ++wrong;
}

// A text that one engine is fed, in passes of any width, from any position.
class Text {
 public:
  Text(const Case& its, native::Engine& engine, Id seed) : case_(its), engine_(engine) {
    state_ = static_cast<std::uint64_t>(seed) + 1;
  }

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
    for (std::size_t i = 0; i < gammas.size(); ++i)
      if (width == rows && width == static_cast<std::size_t>(gammas[i]) + 1)
        return static_cast<int>(i) + 2;
    return width == 1 && rows == 1 ? 1 : 0;
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
void generate(const Case& its, native::Model& model, Id seed) {
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
  std::printf("opened with %s\n", native::tensorrt_library().c_str());
}

void passes(const Case& its) {
  std::shared_ptr<native::Model> model = its.open();
  generate(its, *model, 1);
  generate(its, *model, 2);
  std::thread other([&] { generate(its, *model, 3); });
  generate(its, *model, 4);
  other.join();
  const std::unique_ptr<native::Engine> engine = model->engine();
  model.reset();  // an engine keeps what it needs
  Text(its, *engine, 5).pass(0, 3, 1, true);
}

// An application that uses another GPU finds it in use afterwards.
void elsewhere(const Case& its) {
  cudaSetDevice(3);
  {
    const std::shared_ptr<native::Model> model = its.open();
    generate(its, *model, 6);
  }
  int device = 0;
  cudaGetDevice(&device);
  expect(device == 3, "the GPU in use is " + std::to_string(device));
}

// Print what a pass that cannot be says, and what the next good one says.
void refused(const Case& its) {
  const std::unique_ptr<native::Engine> engine = its.open()->engine();
  const std::vector<Id> tokens(4096, 1);
  for (const native::Json& one : its.json.at("passes").items()) {
    const auto size = [&](std::size_t i) {
      return static_cast<std::size_t>(one.items().at(i).integer());
    };
    try {
      const native::Output output = engine->forward(tokens.data(), size(0), size(1), size(2));
      if (one.items().size() > 3) output.row(0);
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
    const std::string name = its.bundle.file(std::to_string(number++) + ".json");
    become(machine);
    Library here = library();
    const auto& version = doubles::machine.version;
    here.version = {version[0], version[1], version[2], version[3]};
    std::printf("%s\n", difference(read_engine_record(name), here, find_gpu()).c_str());
  }
}

int run(const std::string& name, const std::string& folder) {
  const Case its(folder);
  try {
    if (name == "open") open(its);
    if (name == "passes") passes(its);
    if (name == "elsewhere") elsewhere(its);
    if (name == "refused") refused(its);
    if (name == "differences") differences(its);
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
