/* A stand-in for a CUDA device and its driver, for tests without a GPU.
 *
 * A stream is a thread, which begins some random time after it was given work: code that does not
 * wait sees old bytes. Memory of the device, and pages that were registered, can be touched only
 * while a stream works: code that takes an address of the device for one of the process is stopped
 * by SIGSEGV, and so is work on memory that was freed. New memory holds NaN and -1. Kernels run as
 * functions of the host (tests/emu). A copy from memory of the process takes the bytes at once,
 * as the driver does; all others happen in their turn.
 *
 * Other processes open memory and events as the driver lets them: by handles of 64 bytes (no
 * process opens its own, memory of cuMemCreate or of a stream's pool has none, and a process that
 * frees memory which another one has open is stopped), or by descriptors of cuMemCreate's memory,
 * which outlive their process. An event of a process that has ended is over. As with CUDA, a child
 * that was forked while streams exist cannot use the device.
 *
 * Streams run beside each other; while one works, the memory of all is open. Only wrong values show
 * that a stream has used memory without waiting for the work of another one.
 *
 * There are two devices; CUDA_VISIBLE_DEVICES selects, by number or UUID, those that the process
 * sees.
 *
 * Environment:
 *   GRADD_SIM_DELAY_US    longest pause in front of work that finds a stream idle (500)
 *   GRADD_SIM_CLOSE=N     of N times that the streams become idle, one closes the memory (1)
 *   GRADD_SIM_MEMORY_MB   memory of each device (4096); other processes' use does not count
 *   GRADD_SIM_COUNTS=DIR  a file DIR/PID: how often the host waited and copied to itself, how many
 *                         bytes, and kernels: four numbers of 64 bits
 *   GRADD_SIM_FAIL=CALL:N the N-th call of that function fails, from 1 (cudaMallocAsync:2); or
 *                         `kernel`: the N-th kernel fails, and with it the device is lost, which
 *                         every later call reports
 *   GRADD_SIM_REFUSE=CALL,CALL  these functions always fail, as in a driver that does not support
 *                         them
 *   GRADD_SIM_HOLD=CALL:FILE  that function waits until FILE exists
 *   GRADD_SIM_ONCE=FILE   ... unless FILE exists; it is made when that happens
 */
#ifndef GRADD_TESTS_SIM_SIM_H
#define GRADD_TESTS_SIM_SIM_H

#include <stdbool.h>
#include <stddef.h>

#include "tests/sim/cuda_runtime.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What tests set. */
typedef struct sim_settings_s {
    int driver;             /* its version */
    bool blocking;          /* work is done when it is given, as with CUDA_LAUNCH_BLOCKING */
    unsigned pause_us;      /* before the work of an idle stream; 0 = as GRADD_SIM_DELAY_US says */
    float (*elapsed)(void); /* ms between two events; NULL, or negative: the clock's */
    int shared;             /* bytes of shared memory that a block may have; 0 = SIM_SHARED */
} sim_settings_t;
/* Of this process. */
sim_settings_t *sim_settings(void);

/* As CUDA_VISIBLE_DEVICES from now on, where no memory is taken. */
void sim_see(const char *devices);

/* As GRADD_SIM_FAIL from now on: the n-th call from now fails, 1 = the next. */
void sim_fail(const char *call, int n);
/* Calls left until that failure; 0 = it has happened, or none is due. */
int sim_left(void);
/* The device that was lost works again. */
void sim_recover(void);
/* Bytes of memory of the device that are not freed, and work of all streams that is not done. */
size_t sim_bytes(void);
/* Of memory of cuMemCreate and of other processes, as often as it has an address here. */
size_t sim_bytes_mapped(void);
int sim_pending(void);

/* Events that were made so far. */
int sim_events(void);

/* Whether what this thread does is counted (GRADD_SIM_COUNTS); it is, until told otherwise. */
void sim_count(bool counted);

/* Bytes of shared memory of a block: what it may have at most, as on sm_90 unless tests say less;
 * whether a launch may have so many. One that may not is the thread's last error. */
enum { SIM_SHARED = 227 << 10 };
int sim_shared_most(void);
bool sim_takes_shared(size_t bytes);

/* Work of a stream: `run(argument)` in its turn; without a stream at once. */
void sim_give(cudaStream_t stream, void (*run)(void *), void *argument);
/* Whether a kernel whose turn it is must be left out: the device is lost, perhaps by this one. */
bool sim_kernel_fails(void);

#ifdef __cplusplus
}
#endif
#endif
