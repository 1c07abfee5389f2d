// The tokenizer of ONNX Runtime GenAI, a C++ library that reads tokenizer.json.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "params.hpp"

namespace specrt::native {

class GenaiTokenizer {
 public:
  // Load the library, once per process. Throws Failure(SPECRT_ENGINE) where it is missing.
  static void load(const std::string& library);
  // The same, and read `tokenizer.json` and `tokenizer_config.json` of a bundle. Throws
  // Failure(SPECRT_ENGINE) where the library refuses them, too.
  GenaiTokenizer(const std::string& library, const std::string& bundle);
  ~GenaiTokenizer();
  GenaiTokenizer(const GenaiTokenizer&) = delete;
  GenaiTokenizer& operator=(const GenaiTokenizer&) = delete;

  std::vector<Token> encode(const std::string& text) const;
  std::string decode(const std::vector<Token>& ids) const;

 private:
  struct Functions;
  static const Functions& functions(const std::string& library);
  void require(void* result, const char* what) const;

  const Functions& c_;
  void* tokenizer_ = nullptr;
  mutable std::mutex busy_;
};

}  // namespace specrt::native
