#include "hosted/gil.hpp"

#include <pthread.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "hosted/interpreter.hpp"
#include "implementation.hpp"

namespace specrt::hosted {
namespace {

// States of threads that have ended. Ending takes no lock of Python's: its holder may wait for the
// thread, or Python may be at its end.
class EndedThreads {
 public:
  void add(PyThreadState* state) noexcept {
    try {
      const std::lock_guard<std::mutex> lock(mutex_);
      states_.push_back(state);
    } catch (const std::exception&) {  // no memory: Python keeps this one
    }
  }

  std::vector<PyThreadState*> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(states_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<PyThreadState*> states_;
};

EndedThreads& ended() {
  static EndedThreads& only = *new EndedThreads;  // threads may outlive what is static
  return only;
}

// The state that was made for a thread, as the thread keeps it.
struct ThreadRecord {
  PyThreadState* state;
  bool deferred;
};

pthread_key_t own_key();

// At the end of a thread, after everything that is thread_local in C++. What others keep in keys
// may still use Python, so that they go first.
void thread_ends(void* value) {
  auto* const own = static_cast<ThreadRecord*>(value);
  if (!own->deferred) {
    own->deferred = true;
    if (pthread_setspecific(own_key(), own) == 0) return;
  }
  if (Interpreter::get().usable()) ended().add(own->state);
  delete own;
}

pthread_key_t made_key() {
  pthread_key_t key{};
  if (pthread_key_create(&key, thread_ends) != 0) {
    throw Failure(SPECRT_INTERNAL,
                  "no key of threads is left in this process (pthread_key_create)");
  }
  return key;
}

pthread_key_t own_key() {
  static const pthread_key_t key = made_key();
  return key;
}

// Let Python forget threads that have ended. Some releases of Python take the state of the calling
// thread for the one that is deleted: so a state is made for this only, and goes as the last.
void forget_ended(const PythonApi& api) {
  const std::vector<PyThreadState*> states = ended().take();
  if (states.empty()) return;
  api.PyGILState_Ensure();
  PyThreadState* const own = api.PyGILState_GetThisThreadState();
  for (PyThreadState* const state : states) {
    api.PyThreadState_Clear(state);
    api.PyThreadState_Delete(state);
  }
  api.PyThreadState_Clear(own);
  api.PyThreadState_DeleteCurrent();  // lets go of the lock as well
}

// Python takes the thread that first imports `threading` for the main one, and waits at its end for
// the state with which it did: so that is none that stays.
void import_threading(const PythonApi& api) {
  const int before = api.PyGILState_Ensure();
  PyObject* const module = api.PyImport_ImportModule("threading");
  if (module == nullptr) api.PyErr_Clear();
  if (module != nullptr) api.Py_DecRef(module);
  api.PyGILState_Release(before);
}

// Make Python know this thread until it ends: to do so on every call takes as long as the call.
void introduce(const PythonApi& api) {
  forget_ended(api);
  import_threading(api);
  auto own = std::make_unique<ThreadRecord>();
  const pthread_key_t key = own_key();
  api.PyGILState_Ensure();  // never taken back, so that the state stays
  own->state = api.PyEval_SaveThread();
  if (pthread_setspecific(key, own.get()) == 0) own.release();
}

}  // namespace

Gil::Gil() {
  Interpreter& interpreter = Interpreter::get();
  interpreter.check();
  const PythonApi& api = interpreter.api();
  if (api.PyGILState_GetThisThreadState() == nullptr) introduce(api);
  before_ = api.PyGILState_Ensure();
}

Gil::~Gil() { Interpreter::get().api().PyGILState_Release(before_); }

}  // namespace specrt::hosted

namespace specrt {

// A caller may hold Python's lock, such as through ctypes.PyDLL: other threads need it to go on.
LockRelease::LockRelease() noexcept {
  using namespace hosted;
  const Interpreter& interpreter = Interpreter::get();
  if (!interpreter.usable()) return;
  const PythonApi& api = interpreter.api();
  PyThreadState* const own = api.PyGILState_GetThisThreadState();
  if (own != nullptr && api.current_state() == own) held_ = api.PyEval_SaveThread();
}

LockRelease::~LockRelease() {
  if (held_ == nullptr) return;
  const hosted::PythonApi& api = hosted::Interpreter::get().api();
  api.PyEval_RestoreThread(static_cast<hosted::PyThreadState*>(held_));
}

}  // namespace specrt
