// A bundle opened by the Python runtime in this process.
#include <cstring>

#include "hosted/gil.hpp"
#include "hosted/interpreter.hpp"
#include "hosted/object.hpp"
#include "hosted/request.hpp"
#include "hosted/run.hpp"
#include "implementation.hpp"

namespace specrt {
namespace hosted {
namespace {

// The module of the Python runtime behind this file, and the version of its protocol.
constexpr char kModule[] = "specrt.c_host";
constexpr std::int64_t kProtocol = 3;

std::string_view packed(const std::vector<Token>& ids) {
  return {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(Token)};
}

std::vector<Token> ids_of(std::string_view packed) {
  std::vector<Token> ids(packed.size() / sizeof(Token));
  if (!ids.empty()) std::memcpy(ids.data(), packed.data(), packed.size());
  return ids;
}

class HostedSlot : public Slot {
 public:
  explicit HostedSlot(PyObject* host) : host_(host) {}

  std::unique_ptr<Run> begin(const Prompt& prompt, const Params& params) override {
    const std::string json = request_json(params);
    const auto* text = std::get_if<std::string>(&prompt);
    Gil gil;
    Object given = bytes_of(text ? std::string_view(*text) : packed(std::get<1>(prompt)));
    Object is_text = integer_of(text != nullptr), request = bytes_of(json);
    const Reply reply = call(host_, "begin", {&given, &is_text, &request});
    return std::make_unique<HostedRun>(reply.object(1));
  }

 private:
  PyObject* host_;  // nothing outlives its host
};

class HostedHost : public Host {
 public:
  explicit HostedHost(Object host) : host_(std::move(host)) {}

  ~HostedHost() override {
    if (!Interpreter::get().usable()) return;
    try {
      Gil gil;
      call(host_.get(), "close");
    } catch (const std::exception&) {  // the memory goes back with the last reference
    }
  }

  Info info() override {
    Gil gil;
    const Reply reply = call(host_.get(), "info");
    Info info;
    info.name = reply.bytes(1);
    info.backend = reply.bytes(2);
    info.precision = reply.bytes(3);
    info.max_length = static_cast<int>(reply.integer(4));
    info.vocabulary = static_cast<int>(reply.integer(5));
    info.rows = static_cast<int>(reply.integer(6));
    info.max_gamma = static_cast<int>(reply.integer(7));
    info.has_draft = reply.integer(8) != 0;
    info.has_tokenizer = reply.integer(9) != 0;
    info.notices = reply.bytes(10);
    info.bos = reply.integer(11);
    info.eos = ids_of(reply.bytes(12));
    return info;
  }

  std::unique_ptr<Slot> slot() override { return std::make_unique<HostedSlot>(host_.get()); }

  std::vector<Token> encode(const std::string& text) override {
    Gil gil;
    Object given = bytes_of(text);
    return ids_of(call(host_.get(), "encode", {&given}).bytes(1));
  }

  std::string decode(const std::vector<Token>& ids) override {
    Gil gil;
    Object given = bytes_of(packed(ids));
    return std::string(call(host_.get(), "decode", {&given}).bytes(1));
  }

  std::string token_bytes(Token token) override {
    Gil gil;
    Object given = integer_of(token);
    return std::string(call(host_.get(), "bytes_of", {&given}).bytes(1));
  }

  Memory memory() override {
    Gil gil;
    const Reply reply = call(host_.get(), "memory");
    return {static_cast<std::uint64_t>(reply.integer(1)),
            static_cast<std::uint64_t>(reply.integer(2))};
  }

 private:
  SharedObject host_;
};

Object import_runtime() {
  const PythonApi& api = Interpreter::get().api();
  Object module(api.PyImport_ImportModule(kModule));
  if (module.get() == nullptr) {
    throw failure_of(SPECRT_ENGINE, "specrt cannot be imported by the Python of this process",
                     raised_text(),
                     "install it there with `pip install specrt`, or name an interpreter that has "
                     "it as `python` of specrt_open_options");
  }
  const Object protocol = attribute(module.get(), "PROTOCOL");
  if (api.PyLong_AsLongLong(protocol.get()) != kProtocol) {
    api.PyErr_Clear();
    throw Failure(SPECRT_ENGINE,
                  "this library and the Python package specrt are of different releases; build "
                  "the library again with `specrt config --build`");
  }
  return module;
}

}  // namespace
}  // namespace hosted

std::unique_ptr<Host> open_bundle(const std::string& path, const OpenOptions& options) {
  using namespace hosted;
  Interpreter::get().require(options.python);
  Gil gil;
  const Object runtime = import_runtime();
  Object place = bytes_of(path), python = bytes_of(options.python);
  Object threads = integer_of(options.threads), owns = integer_of(options.owns_process);
  Object memory = integer_of_unsigned(options.memory_bytes),
         cache = integer_of(options.prompt_cache);
  Object texts = integer_of_unsigned(options.text_memory_bytes);
  const bool found = Interpreter::get().found();
  Object at_exit = integer_of(found ? reinterpret_cast<std::intptr_t>(&specrt_shutdown) : 0);
  const Reply reply = call(runtime.get(), "open_bundle",
                           {&place, &python, &threads, &owns, &memory, &cache, &at_exit, &texts});
  return std::make_unique<HostedHost>(reply.object(1));
}

std::string implementation_name() { return "hosted"; }

void shut_down() { hosted::Interpreter::get().stop(); }

}  // namespace specrt
