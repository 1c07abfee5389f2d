/* What an application that embeds specrt pays. See embedding.py.
 *
 *   embedding first LIBRARY BUNDLE ONNXRUNTIME ID...   from dlopen to the first token, in one
 * process
 *
 * and, as a shared library, `rounds`: completions through the C interface. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "specrt/specrt.h"

static double now_ms(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

static int stop(void* user, const specrt_chunk* chunk) {
  (void)chunk;
  *(double*)user = now_ms();
  return 1;
}

static int count(void* user, const specrt_chunk* chunk) {
  *(uint64_t*)user += chunk->count;
  return 0;
}

/* Bytes of this process in memory, in MiB: what /proc says of `name`. */
static double resident_mib(const char* name) {
  char line[256];
  double kib = 0;
  FILE* file = fopen("/proc/self/status", "r");
  while (file != NULL && fgets(line, sizeof line, file) != NULL) {
    if (strncmp(line, name, strlen(name)) == 0) {
      kib = strtod(line + strlen(name) + 1, NULL);
    }
  }
  if (file != NULL) {
    fclose(file);
  }
  return kib / 1024;
}

typedef specrt_status (*opener)(const char*, const specrt_open_options*, specrt_generator**);
typedef specrt_status (*seater)(specrt_generator*, specrt_session**);
typedef specrt_status (*asker)(specrt_session*, const int64_t*, size_t, specrt_params*,
                               specrt_callback, void*);
typedef const char* (*teller)(void);

typedef struct asked {
  asker generate;
  specrt_session* session;
  const int64_t* ids;
  size_t length;
  specrt_params* params;
  uint64_t* tokens;
  int64_t took_ns;
} asked;

static void* complete(void* given) {
  asked* const ask = given;
  const double began = now_ms();
  const specrt_status status =
      ask->generate(ask->session, ask->ids, ask->length, ask->params, count, ask->tokens);
  ask->took_ns = status == SPECRT_OK ? (int64_t)((now_ms() - began) * 1e6) : -status;
  return NULL;
}

/* Complete ids once and return the nanoseconds it took; the number of tokens goes to `tokens`. On a
 * thread that Python has not seen before, as those of an application are. */
int64_t rounds(asker generate, specrt_session* session, const int64_t* ids, size_t length,
               specrt_params* params, uint64_t* tokens) {
  asked ask = {generate, session, ids, length, params, tokens, 0};
  pthread_t thread;
  *tokens = 0;
  if (pthread_create(&thread, NULL, complete, &ask) != 0) {
    return -SPECRT_INTERNAL;
  }
  pthread_join(thread, NULL);
  return ask.took_ns;
}

int main(int given, char** arguments) {
  if (given < 6) {
    fprintf(stderr, "usage: embedding first LIBRARY BUNDLE ONNXRUNTIME ID...\n");
    return 2;
  }
  int64_t* const ids = calloc((size_t)given, sizeof *ids);
  for (int i = 5; i < given; ++i) {
    ids[i - 5] = strtoll(arguments[i], NULL, 10);
  }
  const double began = now_ms();
  void* const library = dlopen(arguments[2], RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  const double loaded = now_ms();
  specrt_open_options options = {0};
  options.size = sizeof options;
  options.onnxruntime = arguments[4][0] == '\0' ? NULL : arguments[4];
  specrt_generator* generator = NULL;
  specrt_session* session = NULL;
  double first = 0;
  specrt_status status =
      ((opener)dlsym(library, "specrt_open"))(arguments[3], &options, &generator);
  const double opened = now_ms();
  if (status == SPECRT_OK) {
    status = ((seater)dlsym(library, "specrt_session_create"))(generator, &session);
  }
  if (status == SPECRT_OK) {
    status = ((asker)dlsym(library, "specrt_generate_ids"))(session, ids, (size_t)given - 5, NULL,
                                                            stop, &first);
  }
  if (status != SPECRT_CANCELLED) {
    fprintf(stderr, "%s\n", ((teller)dlsym(library, "specrt_last_error"))());
    return 1;
  }
  printf(
      "{\"dlopen_ms\": %.1f, \"open_ms\": %.1f, \"first_token_ms\": %.1f,"
      " \"rss_mib\": %.1f, \"peak_mib\": %.1f}\n",
      loaded - began, opened - began, first - began, resident_mib("VmRSS"), resident_mib("VmHWM"));
  free(ids);
  return 0;
}
