/* The stand-in's parts for each other: failures, memory, streams. See sim.h. */
#ifndef GRADD_TESTS_SIM_INTERNAL_H
#define GRADD_TESTS_SIM_INTERNAL_H

#include "tests/sim/sim.h"

/* ---- failures (failures.c) ------------------------------------------------------------------- */

/* The failure of a call: that of a lost device, or `otherwise` if it is this call's turn. */
cudaError_t sim_failing(const char *call, cudaError_t otherwise);
/* Keeps the thread's last error and gives it back. */
cudaError_t sim_failed(cudaError_t error);
bool sim_hits(const char *call);
void sim_lose(cudaError_t error);
bool sim_is_lost(void);

/* A call that may fail begins with it. */
#define SIM_CALL(otherwise)                                                                        \
    do {                                                                                           \
        const cudaError_t sim_error_ = sim_failing(__func__, otherwise);                           \
        if (sim_error_) return sim_error_;                                                         \
    } while (0)

/* ---- memory (memory.c) ----------------------------------------------------------------------- */

/* NULL: no memory. */
void *sim_memory_take(size_t bytes);
bool sim_memory_drop(void *at);
/* Pages of the process become memory of the device, and the process's again. */
bool sim_memory_add(void *at, size_t bytes);
bool sim_memory_remove(void *at);
/* Whether the address lies in memory of the device. */
bool sim_memory_has(const void *at);
/* A stream begins to work and has ended; in between, memory can be touched. */
void sim_memory_open(void);
void sim_memory_close(void);

/* ---- streams (stream.c) ---------------------------------------------------------------------- */

void sim_wait_all(void);

#endif
