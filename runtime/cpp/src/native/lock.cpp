#include "implementation.hpp"

namespace specrt {

// Here is no lock that an application could hold.
LetGoOfLock::LetGoOfLock() noexcept = default;
LetGoOfLock::~LetGoOfLock() = default;

}  // namespace specrt
