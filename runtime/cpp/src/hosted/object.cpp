#include "hosted/object.hpp"

#include "failure.hpp"
#include "hosted/gil.hpp"
#include "hosted/interpreter.hpp"

namespace specrt::hosted {
namespace {

const PythonApi& python() { return Interpreter::get().api(); }

std::string text_of(PyObject* object) {
  const PythonApi& api = python();
  const Object text(object == nullptr ? nullptr : api.PyObject_Str(object));
  std::ptrdiff_t size = 0;
  const char* result =
      text.get() == nullptr ? nullptr : api.PyUnicode_AsUTF8AndSize(text.get(), &size);
  if (result == nullptr) {
    api.PyErr_Clear();
    return "no reason given";
  }
  return std::string(result, static_cast<std::size_t>(size));
}

}  // namespace

Object& Object::operator=(Object&& other) noexcept {
  PyObject* taken = other.release();
  if (object_ != nullptr) python().Py_DecRef(object_);
  object_ = taken;
  return *this;
}

Object::~Object() {
  if (object_ != nullptr) python().Py_DecRef(object_);
}

PyObject* Object::release() {
  PyObject* object = object_;
  object_ = nullptr;
  return object;
}

void SharedObject::drop() noexcept {
  PyObject* object = object_;
  object_ = nullptr;
  // Where the interpreter is gone, so is the object.
  if (object == nullptr || !Interpreter::get().usable()) return;
  try {
    Gil gil;
    python().Py_DecRef(object);
  } catch (const Failure&) {
  }
}

Reply::Reply(Object tuple) : tuple_(std::move(tuple)) {
  const std::ptrdiff_t size = python().PyTuple_Size(tuple_.get());
  if (size < 1) throw_raised();
  size_ = static_cast<std::size_t>(size);
  const std::int64_t status = integer(0);
  if (status != SPECRT_OK) {
    throw Failure(static_cast<specrt_status>(status), std::string(bytes(1)));
  }
}

PyObject* Reply::item(std::size_t index) const {
  PyObject* result = python().PyTuple_GetItem(tuple_.get(), static_cast<std::ptrdiff_t>(index));
  if (result == nullptr) throw_raised();
  return result;
}

std::string_view Reply::bytes(std::size_t index) const {
  char* data = nullptr;
  std::ptrdiff_t size = 0;
  if (python().PyBytes_AsStringAndSize(item(index), &data, &size) != 0) throw_raised();
  return {data, static_cast<std::size_t>(size)};
}

std::int64_t Reply::integer(std::size_t index) const {
  const long long value = python().PyLong_AsLongLong(item(index));
  if (value == -1 && python().PyErr_Occurred() != nullptr) throw_raised();
  return value;
}

double Reply::number(std::size_t index) const {
  const double value = python().PyFloat_AsDouble(item(index));
  if (value == -1.0 && python().PyErr_Occurred() != nullptr) throw_raised();
  return value;
}

Object Reply::object(std::size_t index) const {
  PyObject* result = item(index);
  python().Py_IncRef(result);
  return Object(result);
}

Object bytes_of(std::string_view text) {
  PyObject* object =
      python().PyBytes_FromStringAndSize(text.data(), static_cast<std::ptrdiff_t>(text.size()));
  if (object == nullptr) throw_raised();
  return Object(object);
}

Object integer_of(std::int64_t value) {
  PyObject* object = python().PyLong_FromLongLong(value);
  if (object == nullptr) throw_raised();
  return Object(object);
}

Object integer_of_unsigned(std::uint64_t value) {
  PyObject* object = python().PyLong_FromUnsignedLongLong(value);
  if (object == nullptr) throw_raised();
  return Object(object);
}

Object attribute(PyObject* object, const char* name) {
  PyObject* result = python().PyObject_GetAttrString(object, name);
  if (result == nullptr) throw_raised();
  return Object(result);
}

Reply call(PyObject* function, std::initializer_list<Object*> arguments) {
  const PythonApi& api = python();
  Object tuple;
  if (arguments.size() != 0) {
    tuple = Object(api.PyTuple_New(static_cast<std::ptrdiff_t>(arguments.size())));
    if (tuple.get() == nullptr) throw_raised();
    std::ptrdiff_t at = 0;
    for (Object* argument : arguments) {  // the tuple takes them over
      if (api.PyTuple_SetItem(tuple.get(), at++, argument->release()) != 0) throw_raised();
    }
  }
  PyObject* came = api.PyObject_CallObject(function, tuple.get());
  if (came == nullptr) throw_raised();
  return Reply(Object(came));
}

Reply call(PyObject* object, const char* method, std::initializer_list<Object*> arguments) {
  const Object bound = attribute(object, method);
  return call(bound.get(), arguments);
}

std::string raised_text() {
  const PythonApi& api = python();
  PyObject *kind = nullptr, *value = nullptr, *trace = nullptr;
  api.PyErr_Fetch(&kind, &value, &trace);
  api.PyErr_NormalizeException(&kind, &value, &trace);
  const Object own_kind(kind), own_value(value), own_trace(trace);
  const std::string text = text_of(value == nullptr ? kind : value);
  return text.empty() ? text_of(kind) : text;
}

void throw_raised() {
  const PythonApi& api = python();
  PyObject* kind = api.PyErr_Occurred();
  if (kind != nullptr && api.PyErr_GivenExceptionMatches(kind, *api.PyExc_KeyboardInterrupt) != 0) {
    api.PyErr_Clear();
    api.PyErr_SetInterrupt();  // the Python that called us hears of it when it goes on
    throw Failure(SPECRT_CANCELLED, "the generation was interrupted");
  }
  throw failure_of(SPECRT_INTERNAL, "Python failed", raised_text(), "this is a bug of specrt");
}

}  // namespace specrt::hosted
