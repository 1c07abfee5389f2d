/* The C interface is C11; used from C. */
#include <specrt/specrt.h>
#include <stdio.h>
#include <string.h>

static int32_t told(void* user, const specrt_chunk* chunk) {
  *(size_t*)user += chunk->count;
  return 0;
}

int main(void) {
  specrt_generator* generator = NULL;
  specrt_session* session = NULL;
  size_t tokens = 0;
  const char* prompt = "count 3";
  if (specrt_abi_version() != SPECRT_ABI_VERSION) return 1;
  if (specrt_open("any", NULL, &generator) != SPECRT_OK) return 1;
  if (specrt_session_create(generator, &session) != SPECRT_OK) return 1;
  if (specrt_generate(session, prompt, strlen(prompt), NULL, told, &tokens) != SPECRT_OK) return 1;
  printf("%s: %d tokens\n", specrt_version(), (int)tokens);
  return specrt_generator_close(generator) == SPECRT_OK && tokens == 3 ? 0 : 1;
}
