/* Internals of the stand-in, shared by its files: failures, memory, streams. See sim.h. */
#ifndef GRADD_TESTS_SIM_INTERNAL_H
#define GRADD_TESTS_SIM_INTERNAL_H

#include "tests/sim/sim.h"

/* ---- failures (failures.c) ------------------------------------------------------------------- */

/* The failure of a call: that of a lost device, or `otherwise` if it is this call's turn. */
cudaError_t sim_failing(const char *call, cudaError_t otherwise);
/* Keeps the thread's last error and gives it back. */
cudaError_t sim_failed(cudaError_t error);
/* Counts calls that hosts wait in, and copies to them; GRADD_SIM_COUNTS says where. */
void sim_count_wait(void);
void sim_count_copy(size_t bytes);
void sim_count_kernel(void);
bool sim_hits(const char *call);
/* Whether this driver never does such a call; first waits if calls of it are held. */
bool sim_refuses(const char *call);
void sim_lose(cudaError_t error);
/* The failure of a device that is lost; else cudaSuccess. */
cudaError_t sim_lost(void);

/* A call that may fail begins with it. */
#define SIM_CALL(otherwise)                                                                        \
    do {                                                                                           \
        const cudaError_t sim_error_ = sim_failing(__func__, otherwise);                           \
        if (sim_error_) return sim_error_;                                                         \
    } while (0)

/* ---- devices (devices.c) --------------------------------------------------------------------- */

enum { SIM_DEVICES = 2 };

/* Number on the machine of the thread's device, and of one that the process names; -1 = none. */
int sim_device(void);
int sim_device_number(int device);
/* What the process calls the device of that number; -1: it does not see it. */
int sim_device_of(int number);

/* ---- memory (memory.c) ----------------------------------------------------------------------- */

#define SIM_PAGE ((size_t)4096)

typedef enum sim_kind_e {
    SIM_TAKEN,      /* by cudaMalloc, or from the pool of a stream */
    SIM_REGISTERED, /* pages of the process */
    SIM_MAPPED,     /* memory of cuMemCreate */
    SIM_OPENED      /* memory that another process has allocated */
} sim_kind_t;

typedef struct sim_block_s {
    char *at;
    size_t bytes, room; /* room: of addresses, whole pages */
    sim_kind_t kind;
    int fd;     /* of a block that can be opened elsewhere; else -1 */
    int device; /* its number on the machine */
} sim_block_t;

size_t sim_pages(size_t bytes);
/* Bytes that a device has, and those of them in use by this process. */
size_t sim_memory_limit(void);
size_t sim_bytes_of(int number);
/* Of the thread's device; NULL: no memory. `shared`: others can open it. */
void *sim_memory_take(size_t bytes, bool shared);
bool sim_memory_drop(void *at);
/* Makes pages memory of the device; false: they are that already. Gives them back to the caller;
 * false: there is no such block of that kind. */
bool sim_memory_add(const sim_block_t *block);
bool sim_memory_remove(const void *at, sim_kind_t kind, sim_block_t *out);
/* The block that holds the address; out may be NULL. */
bool sim_memory_find(const void *at, sim_block_t *out);
/* Called when a stream begins to work and when it stops; in between, memory can be touched. */
void sim_memory_open(void);
void sim_memory_close(void);

/* ---- other processes (sharing.c, physical.c) ------------------------------------------------- */

/* A file in memory, without a name; -1: no memory. */
int sim_file(const char *name, size_t bytes);
/* Its name for other processes, 64 bytes, and a descriptor of what has such a name; -1: it is gone,
 * or on a device that the process does not see. Nothing is left of it when its owner ends. */
void sim_name_file(int fd, int device, char *out);
int sim_open_file(const char *name, int *out_device);
/* Stops the process if another one has opened the block that is freed. */
void sim_check_importers(const void *at);

/* ---- streams (stream.c) ---------------------------------------------------------------------- */

void sim_wait_all(void);
/* Gives the same work to all streams of a device, and adds their number to `left` before. */
void sim_give_all(int number, void (*run)(void *), void *argument, _Atomic int *left);

#endif
