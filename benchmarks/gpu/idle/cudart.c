/* A CUDA runtime without a device: memory is the host's, kernels do nothing, all is counted.

   What ONNX Runtime's CUDA provider decides on the host (which nodes it takes, what it copies, what
   it captures) happens as on a GPU. No number that comes out means anything.
   The offsets are those of CUDA 13. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *handle;
enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, OUT_OF_MEMORY = 2, CAPTURING = 1 };
enum { PROPERTIES_BYTES = 1008, POINTER_BYTES = 88, FUNCTION_BYTES = 144 };

static struct {
  long launches, captures, replays, copies_in_captures, waits_in_captures, captured_launches;
} counted;
static int capturing;

__attribute__((destructor)) static void report(void) {
  const char *path = getenv("IDLE_REPORT");
  FILE *file = path ? fopen(path, "w") : NULL;
  if (!file) return;
  fprintf(file,
          "{\"launches\": %ld, \"captures\": %ld, \"replays\": %ld, \"captured_launches\": %ld, "
          "\"copies_in_captures\": %ld, \"waits_in_captures\": %ld}\n",
          counted.launches, counted.captures, counted.replays, counted.captured_launches,
          counted.copies_in_captures, counted.waits_in_captures);
  fclose(file);
}

static int made(handle *one) { return (*one = calloc(1, 64)) ? 0 : OUT_OF_MEMORY; }
static int launched(void) {
  counted.launches++;
  counted.captured_launches += capturing;
  return 0;
}
static int waited(void) {
  counted.waits_in_captures += capturing;
  return 0;
}

/* The device: compute capability 8.0, 108 multiprocessors, 8 GiB. */
int cudaGetDeviceCount(int *count) { return *count = 1, 0; }
int cudaGetDevice(int *device) { return *device = 0, 0; }
int cudaDriverGetVersion(int *version) { return *version = 13000, 0; }
int cudaRuntimeGetVersion(int *version) { return *version = 13000, 0; }
int cudaMemGetInfo(size_t *free, size_t *total) { return *free = *total = (size_t)8 << 30, 0; }

static void put(char *at, size_t offset, int value) { memcpy(at + offset, &value, sizeof value); }
static void put_size(char *at, size_t offset, size_t value) {
  memcpy(at + offset, &value, sizeof value);
}
int cudaGetDeviceProperties(char *p, int device) {
  memset(p, 0, PROPERTIES_BYTES);
  strcpy(p, "idle device");
  put_size(p, 288, (size_t)8 << 30);      /* totalGlobalMem */
  put_size(p, 296, 48 << 10);             /* sharedMemPerBlock */
  put(p, 304, 65536);                     /* regsPerBlock */
  put(p, 308, 32);                        /* warpSize */
  put(p, 320, 1024);                      /* maxThreadsPerBlock */
  for (int i = 0; i < 3; i++) {
    put(p, 324 + 4 * i, 1024);            /* maxThreadsDim */
    put(p, 336 + 4 * i, 65535);           /* maxGridSize */
  }
  put(p, 360, 8), put(p, 364, 0);         /* major, minor */
  put(p, 384, 108);                       /* multiProcessorCount */
  put(p, 596, 40 << 20);                  /* l2CacheSize */
  put(p, 604, 2048);                      /* maxThreadsPerMultiProcessor */
  put_size(p, 624, 164 << 10);            /* sharedMemPerMultiprocessor */
  put(p, 632, 65536);                     /* regsPerMultiprocessor */
  put_size(p, 672, 163 << 10);            /* sharedMemPerBlockOptin */
  return 0;
}
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  static const int known[][2] = {{1, 1024},     {8, 48 << 10}, {10, 32}, {16, 108},
                                 {75, 8},       {76, 0},       {97, 163 << 10}};
  *value = 1;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i][0] == attribute) *value = known[i][1];
  return 0;
}

/* Memory. */
int cudaMalloc(handle *at, size_t size) {
  return (*at = calloc(1, size + 256)) ? 0 : OUT_OF_MEMORY;
}
int cudaMallocHost(handle *at, size_t size) { return cudaMalloc(at, size); }
int cudaHostAlloc(handle *at, size_t size, unsigned flags) { return cudaMalloc(at, size); }
int cudaMallocFromPoolAsync(handle *at, size_t size, handle pool, handle stream) {
  return cudaMalloc(at, size);
}
int cudaFree(handle at) { return free(at), 0; }
int cudaFreeHost(handle at) { return free(at), 0; }
int cudaFreeAsync(handle at, handle stream) { return free(at), 0; }
int cudaMemcpy(handle to, const void *from, size_t size, int kind) {
  return memmove(to, from, size), waited();
}
int cudaMemcpyAsync(handle to, const void *from, size_t size, int kind, handle stream) {
  counted.copies_in_captures += capturing && (kind == HOST_TO_DEVICE || kind == DEVICE_TO_HOST);
  return memmove(to, from, size), 0;
}
int cudaMemset(handle at, int value, size_t size) { return memset(at, value, size), 0; }
int cudaMemsetAsync(handle at, int value, size_t size, handle stream) {
  return memset(at, value, size), 0;
}
int cudaPointerGetAttributes(char *found, const void *at) {
  memset(found, 0, POINTER_BYTES);
  put(found, 0, 2); /* device memory */
  return 0;
}
int cudaMemPoolGetAttribute(handle pool, int attribute, unsigned long long *value) {
  return *value = 0, 0;
}

/* Streams, events and captured graphs. */
int cudaStreamCreate(handle *stream) { return made(stream); }
int cudaStreamCreateWithFlags(handle *stream, unsigned flags) { return made(stream); }
int cudaEventCreate(handle *event) { return made(event); }
int cudaEventCreateWithFlags(handle *event, unsigned flags) { return made(event); }
int cudaEventElapsedTime(float *ms, handle begin, handle end) { return *ms = 1, 0; }
int cudaStreamSynchronize(handle stream) { return waited(); }
int cudaDeviceSynchronize(void) { return waited(); }
int cudaEventSynchronize(handle event) { return waited(); }
int cudaStreamIsCapturing(handle stream, int *status) {
  return *status = capturing ? CAPTURING : 0, 0;
}
int cudaStreamBeginCapture(handle stream, int mode) {
  return capturing = 1, counted.captures++, 0;
}
int cudaStreamEndCapture(handle stream, handle *graph) { return capturing = 0, made(graph); }
int cudaGraphInstantiate(handle *run, handle graph, unsigned long long flags) { return made(run); }
int cudaGraphLaunch(handle run, handle stream) { return counted.replays++, 0; }

/* Kernels. */
handle *__cudaRegisterFatBinary(handle binary) { return calloc(1, 64); }
int __cudaLaunchKernel(void) { return launched(); }
int cudaLaunchKernel(void) { return launched(); }
int cudaLaunchKernelExC(void) { return launched(); }
int cudaLaunchCooperativeKernel(void) { return launched(); }
int cudaFuncGetAttributes(char *found, const void *function) {
  memset(found, 0, FUNCTION_BYTES);
  put(found, 24, 1024); /* maxThreadsPerBlock */
  put(found, 32, 80), put(found, 36, 80); /* ptxVersion, binaryVersion */
  return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int threads, size_t shared, unsigned flags) {
  return *blocks = 1, 0;
}
const char *cudaGetErrorName(int error) { return "error"; }
const char *cudaGetErrorString(int error) { return "an error of the idle device"; }
