// The compression function of SHA-256, by the processor's own instructions where it has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specrt::native {

// Take so many blocks of 64 bytes into a state of 8 words.
void sha256_blocks(std::uint32_t* state, const unsigned char* data, std::size_t blocks);
// The same in plain C++, for a processor without such instructions.
void sha256_blocks_plain(std::uint32_t* state, const unsigned char* data, std::size_t blocks);

}  // namespace specrt::native
