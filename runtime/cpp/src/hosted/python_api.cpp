#include "hosted/python_api.hpp"

#include <dlfcn.h>

#include <string>

#include "failure.hpp"

namespace specrt::hosted {
namespace {

template <typename Pointer>
void find(void* library, const char* name, Pointer& pointer) {
  pointer = reinterpret_cast<Pointer>(dlsym(library, name));
}

template <typename Pointer>
void need(void* library, const char* name, Pointer& pointer) {
  find(library, name, pointer);
  if (pointer == nullptr) {
    throw Failure(SPECRT_ENGINE, std::string("the Python of this process has no ") + name +
                                     "; expected Python 3.10 or later");
  }
}

}  // namespace

PythonApi look_up(void* library) {
  PythonApi api;
#define SPECRT_NEED(result, name, arguments) need(library, #name, api.name);
#define SPECRT_FIND(result, name, arguments) find(library, #name, api.name);
  SPECRT_PYTHON_FUNCTIONS(SPECRT_NEED)
  SPECRT_PYTHON_STARTERS(SPECRT_FIND)
#undef SPECRT_NEED
#undef SPECRT_FIND
  need(library, "PyExc_KeyboardInterrupt", api.PyExc_KeyboardInterrupt);
  need(library, "PyThreadState_DeleteCurrent", api.PyThreadState_DeleteCurrent);
  find(library, "PyThreadState_GetUnchecked", api.current_state);  // of 3.13 and later
  if (api.current_state == nullptr) need(library, "_PyThreadState_UncheckedGet", api.current_state);
  return api;
}

}  // namespace specrt::hosted
