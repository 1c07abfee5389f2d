// References to Python objects, calls, and what came of them. All but SharedObject needs the Gil
// held.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "hosted/python_api.hpp"

namespace specrt::hosted {

// Owns a reference.
class Object {
 public:
  Object() = default;
  explicit Object(PyObject* owned) : object_(owned) {}
  Object(Object&& other) noexcept : object_(other.release()) {}
  Object& operator=(Object&& other) noexcept;
  ~Object();

  PyObject* get() const { return object_; }
  PyObject* release();

 private:
  PyObject* object_ = nullptr;
};

// Owns a reference while Python goes on without us; takes the Gil to let go of it.
class SharedObject {
 public:
  SharedObject() = default;
  explicit SharedObject(Object object) : object_(object.release()) {}
  SharedObject(SharedObject&& other) noexcept : object_(other.object_) { other.object_ = nullptr; }
  SharedObject& operator=(SharedObject&&) = delete;
  ~SharedObject() { drop(); }

  PyObject* get() const { return object_; }
  void drop() noexcept;

 private:
  PyObject* object_ = nullptr;
};

// What a function of the Python module returned: 0 and its results.
class Reply {
 public:
  // Throws Failure with what the tuple says, where it begins with a status.
  explicit Reply(Object tuple);

  std::size_t size() const { return size_; }
  std::string_view bytes(std::size_t index) const;
  std::int64_t integer(std::size_t index) const;
  double number(std::size_t index) const;
  Object object(std::size_t index) const;

 private:
  PyObject* item(std::size_t index) const;

  Object tuple_;
  std::size_t size_ = 0;
};

Object bytes_of(std::string_view text);
Object integer_of(std::int64_t value);
Object integer_of_unsigned(std::uint64_t value);
Object attribute(PyObject* object, const char* name);

Reply call(PyObject* function, std::initializer_list<Object*> arguments = {});
Reply call(PyObject* object, const char* method, std::initializer_list<Object*> arguments = {});

// Throw what Python raised as a Failure.
[[noreturn]] void throw_raised();

// Take what Python raised, and return its text.
std::string raised_text();

}  // namespace specrt::hosted
