// The native implementation behind the C interface.
#include <malloc.h>

#include "native/bundle.hpp"
#include "native/opened.hpp"
#include "native/session.hpp"

namespace specrt {

namespace {

class NativeHost : public Host {
 public:
  NativeHost(const std::string& path, const OpenOptions& options)
      : opened_(std::make_shared<native::Opened>(path, options)) {}
  ~NativeHost() override {
    opened_.reset();
#ifdef __GLIBC__
    malloc_trim(0);  // glibc keeps freed memory for the next who allocates
#endif
  }
  NativeHost(const NativeHost&) = delete;
  NativeHost& operator=(const NativeHost&) = delete;

  Info info() override { return opened_->info(); }
  std::unique_ptr<Seat> seat() override { return std::make_unique<native::Session>(opened_); }
  std::vector<Token> encode(const std::string& text) override {
    return opened_->tokenizer.encode(text);
  }
  std::string decode(const std::vector<Token>& ids) override {
    if (!opened_->tokenizer.decodes()) {
      throw Failure(SPECRT_UNSUPPORTED,
                    "this library makes no text of this bundle's tokens: open with the path of a "
                    "tokenizer library");
    }
    return opened_->tokenizer.decode(ids);
  }

 private:
  std::shared_ptr<native::Opened> opened_;
};

}  // namespace

std::unique_ptr<Host> open_bundle(const std::string& path, const OpenOptions& options) {
  return std::make_unique<NativeHost>(path, options);
}

std::string implementation_name() {
  const std::string library = native::engine_library();
  return library.empty() ? "native" : "native, " + library;
}

void shut_down() {}

}  // namespace specrt
