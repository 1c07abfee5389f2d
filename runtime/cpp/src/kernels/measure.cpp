// What this machine can do at most, measured on threads of its own. For `specrt bench --kernels`;
// libspecrt, which has the kernels inside, does without.
#ifndef SPECRT_BUILDING

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/kernels.hpp"

extern "C" const char* specrt_kernels();

namespace specrt::kernels {
namespace {

// Seconds that `body(0)` to `body(threads - 1)` take, begun at once.
template <class Body>
double seconds_of(std::size_t threads, const Body& body) {
  std::atomic<std::size_t> ready{1};
  std::atomic<bool> begun{false};
  std::vector<std::thread> others;
  for (std::size_t thread = 1; thread < threads; thread++)
    others.emplace_back([&, thread] {
      ready++;
      while (!begun) std::this_thread::yield();
      body(thread);
    });
  while (ready < threads) std::this_thread::yield();
  const auto start = std::chrono::steady_clock::now();
  begun = true;
  body(0);
  for (std::thread& other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Format format_of(const char* name) {
  if (std::strncmp(name, "int4", 4) == 0 || std::strcmp(name, "fp4") == 0) return Format::int4;
  return std::strncmp(name, "int8", 4) == 0 ? Format::int8 : Format::fp32;
}

}  // namespace
}  // namespace specrt::kernels

#define SPECRT_EXPORT extern "C" __attribute__((visibility("default")))

// Seconds in which some threads read memory, each a part, with the best instructions there are.
SPECRT_EXPORT double specrt_measure_read(const void* memory, std::size_t bytes,
                                         std::size_t threads) {
  using namespace specrt::kernels;
  const std::size_t part = bytes / threads / 256 * 256;
  const auto* from = static_cast<const std::uint8_t*>(memory);
  std::atomic<std::int32_t> sink{0};
  return seconds_of(threads, [&](std::size_t thread) {
    sink += find_kernels("")->read(from + thread * part, part) & 1;
  });
}

// Multiply-adds a second of some threads, with the instructions that multiply this format.
SPECRT_EXPORT double specrt_measure_multiply(const char* format, std::size_t steps,
                                             std::size_t threads) {
  using namespace specrt::kernels;
  const Kernels* kernels = find_kernels(specrt_kernels());
  std::atomic<std::size_t> products{0};
  const double seconds = seconds_of(threads, [&](std::size_t) {
    float sum = 0;
    products += kernels->multiply_only(format_of(format), steps, &sum);
  });
  return static_cast<double>(products) / seconds;
}

#endif
