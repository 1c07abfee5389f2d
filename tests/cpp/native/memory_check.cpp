// Memory that a bundle takes, and gives back when it is closed.
#include <unistd.h>

#include <fstream>
#include <stdexcept>
#include <vector>

#include "native/check.hpp"
#include "specrt/specrt.h"

namespace specrt::checks {

namespace {

void require(specrt_status status) {
  if (status != SPECRT_OK) throw std::runtime_error(specrt_last_error());
}

long resident_kib() {
  std::ifstream file("/proc/self/statm");
  long size = 0, resident = 0;
  file >> size >> resident;
  return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

// Open, generate and close; what was resident before closing.
long cycle(const native::Json& vectors) {
  specrt_open_options options{};
  options.size = sizeof options;
  options.onnxruntime = vectors.at("library").text().c_str();
  specrt_generator* generator = nullptr;
  specrt_session* session = nullptr;
  specrt_params* params = nullptr;
  require(specrt_open(vectors.at("bundle").text().c_str(), &options, &generator));
  require(specrt_session_create(generator, &session));
  require(specrt_params_create(&params));
  require(specrt_params_set_integer(params, "max_tokens", 8));
  require(specrt_params_set_integer(params, "gamma", 4));
  const std::vector<std::int64_t> prompt(200, 57);
  require(specrt_generate_ids(session, prompt.data(), prompt.size(), params, nullptr, nullptr));
  const long open = resident_kib();
  require(specrt_params_close(params));
  require(specrt_session_close(session));
  require(specrt_generator_close(generator));
  return open;
}

int memory(const native::Json& vectors) {
  const long open = cycle(vectors);
  const long first = resident_kib();
  for (std::int64_t i = 1; i < vectors.at("cycles").integer(); ++i) cycle(vectors);
  const long last = resident_kib();
  const std::string told = std::to_string(open) + " KiB while open, " + std::to_string(first) +
                           " closed, " + std::to_string(last) + " at last";
  if (first < open / 2 && last < first + 8 * 1024) return 0;
  return differs("memory", told, "half of it given back, and no growth");
}

const Registered registered("memory", memory);

}  // namespace

}  // namespace specrt::checks
