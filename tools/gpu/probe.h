/* What the probes share: a call that must succeed, a pattern in memory of the device, and functions
 * of the driver, found at run time. */
#ifndef GRADD_TOOLS_PROBE_H
#define GRADD_TOOLS_PROBE_H

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "tools/gpu/json_error.h"

#define CHECK(call) require((int)(call), #call, __LINE__)

static inline void require(int status, const char *call, int line) {
    if (!status) return;
    told_failure(call, line, status, NULL);
    exit(1);
}

static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static __global__ void fill(uint32_t *p, size_t n, uint32_t with) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        p[i] = with + (uint32_t)i;
}

static __global__ void differ(const uint32_t *p, size_t n, uint32_t with, unsigned *out) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        if (p[i] != with + (uint32_t)i) atomicAdd(out, 1u);
}

static inline void expect(const void *p, size_t bytes, uint32_t with) {
    unsigned *wrong, n = 0;
    CHECK(cudaMalloc(&wrong, sizeof n));
    CHECK(cudaMemset(wrong, 0, sizeof n));
    differ<<<256, 256>>>((const uint32_t *)p, bytes / 4, with, wrong);
    CHECK(cudaMemcpy(&n, wrong, sizeof n, cudaMemcpyDeviceToHost));
    CHECK(n != 0);
}

static inline void *symbol(const char *name) {
    void *found = NULL;
    cudaDriverEntryPointQueryResult how;
    CHECK(cudaGetDriverEntryPointByVersion(name, &found, 12050, cudaEnableDefault, &how));
    CHECK(!found);
    return found;
}

int probe_ipc(void);
int probe_vmm(void);
int probe_words(void);

#endif
