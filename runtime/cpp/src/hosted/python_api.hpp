// The functions of Python's C interface that are used, looked up while the program runs.
//
// All but those that start an interpreter, and two about threads that every release exports, are of
// the stable ABI of Python 3.10, so that one build
// serves every later Python, and neither headers nor libpython are needed to compile it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specrt::hosted {

struct PyObject;       // opaque here
struct PyThreadState;  // of one thread, opaque here
struct PyInitConfig;

#define SPECRT_PYTHON_FUNCTIONS(_)                                        \
  _(int, Py_IsInitialized, ())                                            \
  _(void, Py_InitializeEx, (int))                                         \
  _(int, Py_FinalizeEx, ())                                               \
  _(int, PyGILState_Ensure, ())                                           \
  _(void, PyGILState_Release, (int))                                      \
  _(PyThreadState*, PyGILState_GetThisThreadState, ())                    \
  _(void, PyThreadState_Clear, (PyThreadState*))                          \
  _(void, PyThreadState_Delete, (PyThreadState*))                         \
  _(PyThreadState*, PyEval_SaveThread, ())                                \
  _(void, PyEval_RestoreThread, (PyThreadState*))                         \
  _(void, Py_DecRef, (PyObject*))                                         \
  _(void, Py_IncRef, (PyObject*))                                         \
  _(PyObject*, PyImport_ImportModule, (const char*))                      \
  _(PyObject*, PyObject_GetAttrString, (PyObject*, const char*))          \
  _(PyObject*, PyObject_CallObject, (PyObject*, PyObject*))               \
  _(PyObject*, PyObject_Str, (PyObject*))                                 \
  _(PyObject*, PyTuple_New, (std::ptrdiff_t))                             \
  _(int, PyTuple_SetItem, (PyObject*, std::ptrdiff_t, PyObject*))         \
  _(PyObject*, PyTuple_GetItem, (PyObject*, std::ptrdiff_t))              \
  _(std::ptrdiff_t, PyTuple_Size, (PyObject*))                            \
  _(PyObject*, PyBytes_FromStringAndSize, (const char*, std::ptrdiff_t))  \
  _(int, PyBytes_AsStringAndSize, (PyObject*, char**, std::ptrdiff_t*))   \
  _(const char*, PyUnicode_AsUTF8AndSize, (PyObject*, std::ptrdiff_t*))   \
  _(PyObject*, PyLong_FromLongLong, (long long))                          \
  _(PyObject*, PyLong_FromUnsignedLongLong, (unsigned long long))         \
  _(long long, PyLong_AsLongLong, (PyObject*))                            \
  _(double, PyFloat_AsDouble, (PyObject*))                                \
  _(PyObject*, PyErr_Occurred, ())                                        \
  _(void, PyErr_Fetch, (PyObject**, PyObject**, PyObject**))              \
  _(void, PyErr_NormalizeException, (PyObject**, PyObject**, PyObject**)) \
  _(int, PyErr_GivenExceptionMatches, (PyObject*, PyObject*))             \
  _(void, PyErr_SetInterrupt, ())                                         \
  _(void, PyErr_Clear, ())

// Ways to say where the interpreter is: the first pair went away when the others came.
#define SPECRT_PYTHON_STARTERS(_)                                        \
  _(wchar_t*, Py_DecodeLocale, (const char*, std::size_t*))              \
  _(void, Py_SetProgramName, (const wchar_t*))                           \
  _(PyInitConfig*, PyInitConfig_Create, ())                              \
  _(void, PyInitConfig_Free, (PyInitConfig*))                            \
  _(int, PyInitConfig_SetInt, (PyInitConfig*, const char*, int64_t))     \
  _(int, PyInitConfig_SetStr, (PyInitConfig*, const char*, const char*)) \
  _(int, PyInitConfig_GetError, (PyInitConfig*, const char**))           \
  _(int, Py_InitializeFromInitConfig, (PyInitConfig*))

struct PythonApi {
#define SPECRT_MEMBER(result, name, arguments) result(*name) arguments = nullptr;
  SPECRT_PYTHON_FUNCTIONS(SPECRT_MEMBER)
  SPECRT_PYTHON_STARTERS(SPECRT_MEMBER)
#undef SPECRT_MEMBER
  PyObject** PyExc_KeyboardInterrupt = nullptr;
  void (*PyThreadState_DeleteCurrent)() = nullptr;
  PyThreadState* (*current_state)() =
      nullptr;  // the calling thread's state while it holds the lock
};

// Look everything up in a library that dlopen gave, or RTLD_DEFAULT. Throws Failure for a Python
// that is too old.
PythonApi look_up(void* library);

}  // namespace specrt::hosted
