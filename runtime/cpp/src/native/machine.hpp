// What a measured time depends on, and what this process may take.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "failure.hpp"

namespace specrt::native {

// Where something was measured; see specrt.system.machine.Machine.
struct Machine {
  std::string cpu;
  std::string vector_units;
  std::int64_t cores = 0;  // those this process may use
  std::string accelerator;
  std::string library;

  // Where or how this one measures and the other does not.
  std::optional<std::string> difference(const Machine& other) const;
};

// This machine, for the engines of a library such as "onnxruntime 1.31.1".
Machine this_machine(const std::string& library);

// What the system calls this kind of machine, such as "x86_64".
std::string machine_name();

int cores_here();

// Bytes that can be taken without swapping; 0 where the system does not tell.
std::uint64_t available_bytes();

}  // namespace specrt::native
