// The native implementation behind the C interface.
#include <malloc.h>

#include "implementation.hpp"
#include "native/bundle/bundle.hpp"
#include "native/engine/backends.hpp"
#include "native/loading.hpp"
#include "native/session.hpp"

namespace specrt {

namespace {

class NativeHost : public Host {
 public:
  NativeHost(const std::string& path, const OpenOptions& options)
      : shared_(std::make_shared<native::LoadedBundle>(path, options)) {}
  ~NativeHost() override {
    shared_.reset();
#ifdef __GLIBC__
    malloc_trim(0);  // glibc keeps freed memory for later allocations
#endif
  }
  NativeHost(const NativeHost&) = delete;
  NativeHost& operator=(const NativeHost&) = delete;

  Info info() override { return shared_->info(); }
  std::unique_ptr<Slot> slot() override { return std::make_unique<native::Session>(shared_); }
  std::vector<Token> encode(const std::string& text) override {
    return shared_->tokenizer.encode(text);
  }
  std::string decode(const std::vector<Token>& ids) override {
    require_decoder();
    return shared_->tokenizer.decode(ids);
  }
  std::string token_bytes(Token token) override {
    require_decoder();
    return shared_->tokenizer.bytes_of(token);
  }
  Memory memory() override { return shared_->memory(); }

 private:
  void require_decoder() const {
    if (shared_->tokenizer.decodes()) return;
    throw Failure(SPECRT_UNSUPPORTED,
                  "this library makes no text of this bundle's tokens: open with the path of a "
                  "tokenizer library");
  }

  std::shared_ptr<native::LoadedBundle> shared_;
};

}  // namespace

std::unique_ptr<Host> open_bundle(const std::string& path, const OpenOptions& options) {
  if (options.text_memory_bytes > 0) {
    throw Failure(SPECRT_UNSUPPORTED,
                  "text_memory_bytes was given, and this library remembers no texts; set it to 0, "
                  "or use the hosted library");
  }
  return std::make_unique<NativeHost>(path, options);
}

std::string implementation_name() {
  const std::string library = native::engine_library();
  return library.empty() ? "native" : "native, " + library;
}

void shut_down() {}

}  // namespace specrt

namespace specrt {

// Here is not a lock that an application could hold.
LockRelease::LockRelease() noexcept = default;
LockRelease::~LockRelease() = default;

}  // namespace specrt
