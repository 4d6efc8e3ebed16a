/* Words in memory that streams wait for and write, those of other processes too. See sim.h. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/sim/cuda.h"
#include "tests/sim/internal.h"

enum { POLL_US = 20 };

/* A turn of a word in a stream. */
typedef struct sim_value_s {
    _Atomic uint64_t *word;
    uint64_t value;
} sim_value_t;

static void wait_value(void *argument) {
    sim_value_t *v = argument;
    while (!sim_lost() && (int64_t)(*v->word - v->value) < 0)
        usleep(POLL_US);
    free(v);
}

static void write_value(void *argument) {
    sim_value_t *v = argument;
    if (!sim_lost()) *v->word = v->value;
    free(v);
}

static CUresult give(CUstream stream, void (*run)(void *), CUdeviceptr at, uint64_t value) {
    if (at % sizeof value || !sim_memory_find((void *)at, NULL))
        return (CUresult)sim_failed(cudaErrorInvalidValue);
    sim_value_t *v = malloc(sizeof *v);
    if (!v) abort();
    *v = (sim_value_t){(_Atomic uint64_t *)at, value};
    sim_give(stream, run, v);
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr at, uint64_t value, unsigned flags) {
    const cudaError_t failing = sim_failing(__func__, cudaErrorInvalidValue);
    if (failing) return (CUresult)failing;
    if (flags != CU_STREAM_WAIT_VALUE_GEQ) return (CUresult)sim_failed(cudaErrorInvalidValue);
    return give(stream, wait_value, at, value);
}

CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr at, uint64_t value, unsigned flags) {
    const cudaError_t failing = sim_failing(__func__, cudaErrorInvalidValue);
    if (failing) return (CUresult)failing;
    if (flags) return (CUresult)sim_failed(cudaErrorInvalidValue);
    return give(stream, write_value, at, value);
}
