// UTF-8 as it comes in pieces.
#pragma once

#include <string>
#include <string_view>

namespace specrt::native {

// Joins bytes and gives out whole characters. What is no UTF-8 becomes U+FFFD, one for each maximal
// part that could have begun a character. What comes when is as in Python's incremental decoder.
class Utf8Decoder {
 public:
  // Add bytes; return the text that became certain.
  std::string push(std::string_view bytes);
  // Return what was held back: half a character becomes U+FFFD.
  std::string finish();

 private:
  void take(unsigned char byte, std::string& text);
  void settle(std::string& text);

  std::string held_;          // of a character that is not whole yet
  int missing_ = 0;           // bytes that it lacks
  int late_ = -1;             // a byte that ended a piece, and is not looked at yet
  unsigned char low_ = 0x80;  // what its next byte may be
  unsigned char high_ = 0xBF;
};

// Whether a text is UTF-8 from end to end.
bool is_utf8(std::string_view text);

}  // namespace specrt::native
