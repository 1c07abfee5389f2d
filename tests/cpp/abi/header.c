/* The C interface is C11; used from C. */
#include <specrt/specrt.h>
#include <stdio.h>
#include <string.h>

static int32_t count(void* user, const specrt_chunk* chunk) {
  *(size_t*)user += chunk->count;
  return 0;
}

int main(int arguments, char** values) {
  specrt_generator* generator = NULL;
  specrt_session* session = NULL;
  specrt_params* params = NULL;
  size_t tokens = 0;
  if (arguments != 3 || specrt_abi_version() != SPECRT_ABI_VERSION) return 2;
  if (specrt_open(values[1], NULL, &generator) != SPECRT_OK) return 1;
  if (specrt_session_create(generator, &session) != SPECRT_OK) return 1;
  if (specrt_params_create(&params) != SPECRT_OK) return 1;
  if (specrt_params_set_integer(params, "max_tokens", 3) != SPECRT_OK) return 1;
  if (specrt_generate(session, values[2], strlen(values[2]), params, count, &tokens) != SPECRT_OK)
    return 1;
  printf("%s: %d tokens\n", specrt_version(), (int)tokens);
  return specrt_params_close(params) == SPECRT_OK && specrt_generator_close(generator) == SPECRT_OK
             ? 0
             : 1;
}
