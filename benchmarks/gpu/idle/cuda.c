/* A driver with one device. */
#include <string.h>

int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int index) { return *device = index, 0; }
int cuDeviceGetName(char *name, int size, int device) {
  return strncpy(name, "idle device", size), 0;
}
int cuGetErrorString(int code, const char **text) { return *text = "an error", 0; }
