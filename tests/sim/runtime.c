/* Memory and copies as calls of the CUDA runtime. See sim.h. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/sim/internal.h"

/* ---- memory ---------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **out, size_t bytes) {
    SIM_CALL(cudaErrorMemoryAllocation);
    *out = sim_memory_take(bytes, true);
    return sim_failed(*out ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) {
    (void)stream;
    SIM_CALL(cudaErrorMemoryAllocation);
    *out = sim_memory_take(bytes, false);
    return sim_failed(*out ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *memory) {
    if (!memory) return cudaSuccess;
    sim_count_wait();
    sim_wait_all();
    sim_check_importers(memory);
    return sim_failed(sim_memory_drop(memory) ? cudaSuccess : cudaErrorInvalidValue);
}

static void drop(void *memory) {
    if (sim_memory_drop(memory)) return;
    fprintf(stderr, "CUDA's stand-in: %p is freed, but was not allocated\n", memory);
    abort();
}

cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream) {
    if (memory) sim_give(stream, drop, memory);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned flags) {
    SIM_CALL(cudaErrorMemoryAllocation);
    if (flags != cudaHostRegisterMapped) return sim_failed(cudaErrorInvalidValue);
    const bool whole = (uintptr_t)memory % SIM_PAGE == 0;
    const bool added = whole && sim_memory_add(&(sim_block_t){memory, bytes, sim_pages(bytes),
                                                              SIM_REGISTERED, -1, 0});
    return sim_failed(added ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostGetDevicePointer(void **out, void *memory, unsigned flags) {
    SIM_CALL(cudaErrorInvalidValue);
    if (flags || !sim_memory_find(memory, NULL)) return sim_failed(cudaErrorInvalidValue);
    *out = memory;
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *memory) {
    sim_block_t b;
    sim_wait_all();
    if (!sim_memory_remove(memory, SIM_REGISTERED, &b))
        return sim_failed(cudaErrorHostMemoryNotRegistered);
    mprotect(b.at, b.room, PROT_READ | PROT_WRITE);
    return cudaSuccess;
}

/* ---- copies ---------------------------------------------------------------------------------- */

typedef struct sim_copy_s {
    void *to;
    const void *from; /* NULL = `value`, or the bytes behind this struct */
    size_t bytes;
    int value; /* of every byte; -1 = those behind this struct */
    unsigned char held[];
} sim_copy_t;

static void copy(void *argument) {
    sim_copy_t *c = argument;
    if (sim_lost())
        ;
    else if (c->from)
        memcpy(c->to, c->from, c->bytes);
    else if (c->value < 0)
        memcpy(c->to, c->held, c->bytes);
    else
        memset(c->to, c->value, c->bytes);
    free(c);
}

static cudaError_t give(cudaStream_t stream, const sim_copy_t *how, const void *held) {
    sim_copy_t *c = malloc(sizeof *c + (held ? how->bytes : 0));
    if (!c) return sim_failed(cudaErrorMemoryAllocation);
    *c = *how;
    if (held) memcpy(c->held, held, how->bytes);
    sim_give(stream, copy, c);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    SIM_CALL(cudaErrorInvalidValue);
    if (kind != cudaMemcpyDefault) return sim_failed(cudaErrorInvalidValue);
    if (!bytes) return cudaSuccess;
    const bool there = sim_memory_find(from, NULL);
    if (there && !sim_memory_find(to, NULL)) sim_count_copy(bytes);
    return give(stream, &(sim_copy_t){to, there ? from : NULL, bytes, -1}, there ? NULL : from);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    SIM_CALL(cudaErrorInvalidValue);
    return give(stream, &(sim_copy_t){to, NULL, bytes, value & 0xff}, NULL);
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    SIM_CALL(cudaErrorInvalidValue);
    return give(NULL, &(sim_copy_t){to, NULL, bytes, value & 0xff}, NULL);
}
