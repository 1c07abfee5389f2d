/* specrt: lossless speculative decoding in an application of your own. The C interface.
 *
 * A generator is an open bundle, a session generates one text at a time from it, and parameters say
 * how. Two libraries implement this header and read the same bundles: one hosts the Python runtime,
 * one needs no Python. `specrt_version` tells which one is loaded.
 *
 * Errors: functions return a status. Where it is not SPECRT_OK, `specrt_last_error` says in one
 * line what was given, what was expected and what to do. No C++ exception leaves a function.
 *
 * Handles: a handle is a number in the shape of a pointer and is never followed. One that is NULL,
 * was closed or was never given out is answered with a status; numbers are not used again.
 *
 * Threads: every function may be called from any thread. A session runs one call at a time: a
 * second one is answered with SPECRT_BUSY, but for `specrt_session_cancel` and
 * `specrt_session_close`, which never wait for a pass, and `specrt_session_end`, which waits.
 * Several sessions of one generator may run at once. Parameters must not be changed while another
 * thread uses them; a generation copies them when it begins.
 *
 * Memory: what a function gives out as a pointer belongs to the library. It stays as it is until
 * the next call on the same handle, its close included; the text of `specrt_last_error` until
 * another call of the same thread fails. What the application passes in is copied before a function
 * returns, but for `user` pointers. Texts are UTF-8 and end with a zero that their length does not
 * count. A prompt, a text to encode and a bad word hold no zero byte: tokenizer libraries take it
 * for the end.
 */
#ifndef SPECRT_SPECRT_H
#define SPECRT_SPECRT_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#ifdef SPECRT_BUILDING
#define SPECRT_API __declspec(dllexport)
#else
#define SPECRT_API __declspec(dllimport)
#endif
#else
#define SPECRT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface. Functions and values are added, never changed or taken away. */
#define SPECRT_ABI_VERSION 1

/* The release of this header; that of the library that is loaded is in `specrt_version`. */
#define SPECRT_VERSION_MAJOR 0
#define SPECRT_VERSION_MINOR 1
#define SPECRT_VERSION_PATCH 0
#define SPECRT_VERSION "0.1.0"

typedef struct specrt_generator specrt_generator;
typedef struct specrt_session specrt_session;
typedef struct specrt_params specrt_params;

typedef int32_t specrt_status;
enum {
  SPECRT_OK = 0,
  SPECRT_INVALID_ARGUMENT = 1, /* NULL, a value out of range, an option there is not */
  SPECRT_CLOSED = 2,           /* the handle, or its generator, was closed */
  SPECRT_BUSY = 3,             /* another call runs on this session */
  SPECRT_BUNDLE = 4,           /* missing, damaged, of a newer version, of another machine */
  SPECRT_ENGINE = 5,           /* an engine library is missing, or a pass failed */
  SPECRT_CAPACITY = 6,         /* the prompt is longer than the bundle's context */
  SPECRT_UNSUPPORTED = 7,      /* this implementation cannot do that; the message says which can */
  SPECRT_CANCELLED = 8,        /* the generation was stopped: what came before is delivered */
  SPECRT_CALLBACK = 9,         /* a callback threw, or a processor failed; the message says how */
  SPECRT_INTERNAL = 10,        /* a bug of ours */
  SPECRT_MEMORY = 11           /* the system gave no memory; what is open stays as it was */
};

/* ---- The library ------------------------------------------------------------------------- */

/* SPECRT_ABI_VERSION as the library was built. */
SPECRT_API int32_t specrt_abi_version(void);

/* Release, implementation and what it runs on, such as "0.1.0 hosted" or "0.1.0 native". */
SPECRT_API const char* specrt_version(void);

/* What the last call of this thread that failed had to say; "" before any did. */
SPECRT_API const char* specrt_last_error(void);

/* The name of a status, such as "SPECRT_BUSY". */
SPECRT_API const char* specrt_status_name(specrt_status status);

/* Told of what an operator would want in a log, a line each: notices of a bundle that is opened,
 * why speculation went off, and each call that failed, on the thread of the call. It must not call
 * the library. One for the process; NULL, the default, for none. */
enum { SPECRT_LOG_ERROR = 1, SPECRT_LOG_WARNING = 2 };
typedef void (*specrt_log)(void* user, int32_t level, const char* message);
SPECRT_API specrt_status specrt_set_log(specrt_log log, void* user);

/* Close every handle, and end what the library started: hosted, the interpreter if it was started
 * here. Waits for calls that run. Afterwards nothing can be opened in this process.
 * Not needed before the process ends; SPECRT_BUSY inside a callback. */
SPECRT_API specrt_status specrt_shutdown(void);

/* ---- A bundle ---------------------------------------------------------------------------- */

/* How to open a bundle. Set `size` to sizeof(specrt_open_options) and the rest to zero. */
typedef struct specrt_open_options {
  size_t size;
  int32_t threads;            /* cores for the pair; 0: every one this process may use */
  int32_t owns_process;       /* nothing else here uses the engine library: share one pool */
  uint64_t memory_bytes;      /* the draft stays closed where both models with full KV buffers take
                                 more; 0: what is available */
  int32_t no_prompt_cache;    /* read every prompt from its beginning */
  const char* python;         /* hosted: the interpreter that has specrt; NULL: as configured */
  const char* onnxruntime;    /* native: path of libonnxruntime; NULL: as configured */
  const char* tokenizer;      /* native: path of the tokenizer library; NULL: as configured */
  uint64_t text_memory_bytes; /* hosted: remember so much of finished texts, and draft from it */
} specrt_open_options;

/* What an open bundle is. Strings belong to the generator. */
typedef struct specrt_info {
  size_t size; /* in: sizeof(specrt_info) */
  const char* name;
  const char* backend; /* of the target: "ort-cpu", "tensorrt", ... */
  const char* precision;
  int32_t max_length; /* positions of the context */
  int32_t vocabulary; /* token ids are below this */
  int32_t rows;       /* texts that share passes; sessions beyond take turns (hosted) */
  int32_t max_gamma;
  int32_t has_draft;         /* whether a draft model is open */
  int32_t has_tokenizer;     /* whether prompts may be text; token ids always may */
  const char* notices;       /* what the opener should know, a line each; "" for nothing */
  int64_t bos_token;         /* that a text begins with; -1 where there is none */
  const int64_t* eos_tokens; /* each ends a text */
  size_t eos_count;
} specrt_info;

/* Open a bundle. `options` may be NULL. */
SPECRT_API specrt_status specrt_open(const char* bundle, const specrt_open_options* options,
                                     specrt_generator** generator);

SPECRT_API specrt_status specrt_generator_info(specrt_generator* generator, specrt_info* info);

/* Memory of an open bundle. */
typedef struct specrt_memory {
  size_t size;             /* in: sizeof(specrt_memory) */
  uint64_t weights_bytes;  /* of the open models, as they are stored */
  uint64_t kv_bytes;       /* of KV buffers once they are full: all rows (hosted), open sessions */
  uint64_t resident_bytes; /* of this whole process, now; 0 where the system does not tell */
} specrt_memory;
SPECRT_API specrt_status specrt_generator_memory(specrt_generator* generator,
                                                 specrt_memory* memory);

/* Close a generator and its sessions. What runs ends with SPECRT_CLOSED; memory is given back once
 * the last call that runs has returned. NULL is not an error. */
SPECRT_API specrt_status specrt_generator_close(specrt_generator* generator);

/* Turn text into token ids, and back. `count` and `bytes` are set to what there is, also where
 * `capacity` is less, and then nothing more is written than fits; the ids may be NULL where the
 * capacity is 0. Texts are written with a zero at the end, which `bytes` does not count. */
SPECRT_API specrt_status specrt_encode(specrt_generator* generator, const char* text, size_t bytes,
                                       int64_t* ids, size_t capacity, size_t* count);
SPECRT_API specrt_status specrt_decode(specrt_generator* generator, const int64_t* ids,
                                       size_t count, char* text, size_t capacity, size_t* bytes);

/* The bytes that a token adds to a text; they may be a part of a character. Special tokens have
 * none. `bytes` may be NULL where the capacity is 0; no zero is written after them. */
SPECRT_API specrt_status specrt_token_bytes(specrt_generator* generator, int64_t token, char* bytes,
                                            size_t capacity, size_t* count);

/* ---- Parameters -------------------------------------------------------------------------- */

/* Options of a generation by name; those of `specrt.SamplingParams`, `gamma`, `drafter`
 * and `parse_special`:
 *
 * integer  max_tokens, top_k, no_repeat_ngram_size, min_tokens, seed, logprobs, prompt_logprobs,
 *          gamma (-1: auto), ignore_eos (0 or 1), parse_special (0: the texts of control tokens in
 *          a prompt are text like any other; 1, the default: they become those tokens)
 * number   temperature, top_p, min_p, typical_p, repetition_penalty, presence_penalty,
 *          frequency_penalty
 * text     verifier ("match", "rejection"), drafter ("model", "ngram", "cascade", "none"),
 *          gamma ("auto"), json_schema, regex, grammar
 * texts    stop, bad_words, choice
 * tokens   stop_token_ids, allowed_token_ids
 *
 * What is not set has the default of the Python runtime or of the bundle: 128 tokens, greedy.
 * The prompt of an encoder-decoder is the source of its text (hosted implementation only).
 * A value out of range is refused where it is set. Integers will do for numbers. */
SPECRT_API specrt_status specrt_params_create(specrt_params** params);
/* Make parameters that are as others are now, processors included. */
SPECRT_API specrt_status specrt_params_copy(specrt_params* params, specrt_params** copy);
SPECRT_API specrt_status specrt_params_set_integer(specrt_params* params, const char* name,
                                                   int64_t value);
SPECRT_API specrt_status specrt_params_set_number(specrt_params* params, const char* name,
                                                  double value);
SPECRT_API specrt_status specrt_params_set_text(specrt_params* params, const char* name,
                                                const char* text, size_t bytes);
/* Add one to a list of texts. */
SPECRT_API specrt_status specrt_params_add_text(specrt_params* params, const char* name,
                                                const char* text, size_t bytes);
/* Add to a list of tokens. */
SPECRT_API specrt_status specrt_params_add_tokens(specrt_params* params, const char* name,
                                                  const int64_t* ids, size_t count);
/* What is added to the score of a token, `logit_bias`; a second one takes the first one's place. */
SPECRT_API specrt_status specrt_params_add_bias(specrt_params* params, int64_t token, double bias);

/* A logits processor: edit the scores [vocabulary] of the token that follows `ids`, prompt and
 * drafted ones included. Minus infinity rules a token out. Called for each row looked at, on the
 * thread that runs its pass: native, the generating one; hosted, where sessions share passes, that
 * of any session. Must not generate. Returns 0, or anything else to end the generation with
 * SPECRT_CALLBACK; so does a score that is left NaN or plus infinity. After drafted tokens it ends
 * it only if the text gets there: it is called again then. None is called, or still runs, once its
 * generation has ended: the function that generates has returned, `specrt_next` has set NULL, or,
 * where nobody reads on, `specrt_session_close` has returned. */
typedef int32_t (*specrt_processor)(void* user, const int64_t* ids, size_t count, float* scores,
                                    size_t vocabulary);
SPECRT_API specrt_status specrt_params_add_processor(specrt_params* params,
                                                     specrt_processor processor, void* user);
/* Make an option unset again, such as "stop" or "logits_processors"; NULL for all of them. */
SPECRT_API specrt_status specrt_params_clear(specrt_params* params, const char* name);
SPECRT_API specrt_status specrt_params_close(specrt_params* params);

/* ---- A session --------------------------------------------------------------------------- */

/* What one round added: text that is certain, and the tokens that arrived. */
typedef struct specrt_chunk {
  const char* text; /* may be empty while a character is incomplete */
  size_t bytes;
  const int64_t* ids;
  size_t count;
  size_t accepted;     /* so many of the tokens, from the first, were drafted */
  uint64_t generation; /* that it is of */
} specrt_chunk;

/* Told of each chunk, on the thread that generates; valid during the call. Returns 0 to go on, or
 * anything else to stop: the generation then ends with SPECRT_CANCELLED. May not end its thread. */
typedef int32_t (*specrt_callback)(void* user, const specrt_chunk* chunk);

SPECRT_API specrt_status specrt_session_create(specrt_generator* generator,
                                               specrt_session** session);

/* Complete a prompt, up to its end. `params` may be NULL; so may `callback`. */
SPECRT_API specrt_status specrt_generate(specrt_session* session, const char* prompt, size_t bytes,
                                         specrt_params* params, specrt_callback callback,
                                         void* user);
SPECRT_API specrt_status specrt_generate_ids(specrt_session* session, const int64_t* ids,
                                             size_t count, specrt_params* params,
                                             specrt_callback callback, void* user);

/* The same, chunk by chunk: begin, then call `specrt_next` until it sets NULL. One that
 * was begun and not read to its end makes the session busy, until it is cancelled.
 *
 * `generation` is set to the number of the generation: 1 for the first of a session, and one more
 * for each that follows, those of `specrt_generate` included. Asked again after the end,
 * `specrt_next` tells again how it ended; once another generation has followed, it sets NULL and
 * returns SPECRT_CANCELLED, and disturbs nothing. */
SPECRT_API specrt_status specrt_begin(specrt_session* session, const char* prompt, size_t bytes,
                                      specrt_params* params, uint64_t* generation);
SPECRT_API specrt_status specrt_begin_ids(specrt_session* session, const int64_t* ids, size_t count,
                                          specrt_params* params, uint64_t* generation);
SPECRT_API specrt_status specrt_next(specrt_session* session, uint64_t generation,
                                     const specrt_chunk** chunk);

/* Stop a generation, from any thread; it ends with SPECRT_CANCELLED after the pass that runs.
 * SPECRT_ANY_GENERATION stops whatever the session generates. No error where it is over. */
#define SPECRT_ANY_GENERATION 0
SPECRT_API specrt_status specrt_session_cancel(specrt_session* session, uint64_t generation);

/* Stop a generation, and wait until it is at its end: for the call that runs on its session, and so
 * perhaps for a pass. Then none of its processors is called any more. No error where it is over;
 * SPECRT_BUSY within a callback of it or a processor, where it is cancelled and ends later. */
SPECRT_API specrt_status specrt_session_end(specrt_session* session, uint64_t generation);

/* What the last generation came to; this and what follows may be read while it goes on, by the
 * thread that reads the chunks, and within a callback. Strings belong to the session. */
typedef struct specrt_stats {
  size_t size; /* in: sizeof(specrt_stats) */
  uint64_t prompt_tokens;
  uint64_t cached_tokens; /* of the prompt, in the KV buffers already */
  uint64_t completion_tokens;
  uint64_t rounds; /* drafts verified; of plain decoding, tokens decoded */
  uint64_t drafted;
  uint64_t evaluated; /* drafted tokens looked at, to the first rejection of each round */
  uint64_t accepted;
  uint64_t emitted;        /* tokens of the rounds; the first token is the prefill's */
  double acceptance_rate;  /* accepted / evaluated */
  double draft_yield;      /* accepted / drafted */
  double tokens_per_round; /* emitted / rounds */
  double ttft_ms;          /* from the request to the first token, less queue_ms */
  double itl_ms;
  double tokens_per_second;
  int64_t seed;  /* the one drawn, where none was given */
  int32_t gamma; /* -1: auto */
  const char* drafter;
  const char* finish_reason; /* "stop", "length", "cancelled", "error", or "" while unfinished */
  const char* fallback;      /* why speculation went off; "" where it did not */
  double queue_ms;           /* the wait for a row that other generations had */
} specrt_stats;
SPECRT_API specrt_status specrt_session_stats(specrt_session* session, specrt_stats* stats);

/* Text and ids of the last generation, so far. */
SPECRT_API specrt_status specrt_session_text(specrt_session* session, const char** text,
                                             size_t* bytes);
SPECRT_API specrt_status specrt_session_ids(specrt_session* session, const int64_t** ids,
                                            size_t* count);

/* How likely one token was to come next, by the target before any option. */
typedef struct specrt_logprob {
  int64_t token;
  double logprob; /* natural logarithm; minus infinity where the model rules it out */
  uint64_t rank;  /* 1 for the likeliest token */
} specrt_logprob;

/* Of one position: the token that is there, then the likeliest ones that are not it. */
typedef struct specrt_logprobs {
  const specrt_logprob* entries;
  size_t count;
} specrt_logprobs;

/* Log-probabilities of the last generation, one for each token so far, where `logprobs` was set;
 * and of its prompt from the second token on, where `prompt_logprobs` was. Else none. */
SPECRT_API specrt_status specrt_session_logprobs(specrt_session* session,
                                                 const specrt_logprobs** logprobs, size_t* count);
SPECRT_API specrt_status specrt_session_prompt_logprobs(specrt_session* session,
                                                        const specrt_logprobs** logprobs,
                                                        size_t* count);

/* All that is known of the last generation as JSON, log-probabilities included: the object that
 * `specrt generate --json` prints. */
SPECRT_API specrt_status specrt_session_json(specrt_session* session, const char** json,
                                             size_t* bytes);

/* Close a session; what it generates ends with SPECRT_CLOSED. NULL is not an error. */
SPECRT_API specrt_status specrt_session_close(specrt_session* session);

#ifdef __cplusplus
}
#endif

#endif
