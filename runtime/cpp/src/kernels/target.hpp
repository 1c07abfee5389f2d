// Functions of one instruction set, between SPECRT_TARGET(features) and SPECRT_TARGET_END.
//
// Comes after all that is included, but what is included inside: an inline function of a header
// that several files share has one copy in the library, and that must run on every processor.
#pragma once

#define SPECRT_PRAGMA(words) _Pragma(#words)
#if defined(__clang__)
#define SPECRT_TARGET(features) \
  SPECRT_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define SPECRT_TARGET_END SPECRT_PRAGMA(clang attribute pop)
#define SPECRT_PREFETCH(at) __builtin_prefetch(at)
#else
#define SPECRT_TARGET(features) SPECRT_PRAGMA(GCC push_options) SPECRT_PRAGMA(GCC target(features))
#define SPECRT_TARGET_END SPECRT_PRAGMA(GCC pop_options)
// GCC 12 drops the built-in one from a lambda, as if it did nothing.
#define SPECRT_PREFETCH(at) __asm__ volatile("prefetcht0 %a0" : : "p"(at))
#endif
