/* Events of the stand-in, those of other processes too. See sim.h. */
#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "tests/sim/cuda.h"
#include "tests/sim/internal.h"

/* The part that processes share. */
typedef struct sim_shared_s {
    _Atomic uint64_t recorded, done; /* how often */
    _Atomic double ms;               /* when it was done last */
    _Atomic uint32_t bell;           /* rings at each end */
    _Atomic pid_t by;                /* recorded it last */
} sim_shared_t;

struct sim_event_s {
    sim_shared_t *shared;
    int fd; /* Owned; -1 = of this process alone */
};

/* A turn of an event in a stream. */
typedef struct sim_turn_s {
    sim_shared_t *shared;
    uint64_t n;
    _Atomic int left; /* streams that have not come to it, of an event of a whole device */
} sim_turn_t;

static atomic_int events;

int sim_events(void) {
    return events;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* ---- life ------------------------------------------------------------------------------------ */

static cudaError_t make(int fd, cudaEvent_t *out) {
    cudaEvent_t e = calloc(1, sizeof *e);
    const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    if (!e) abort();
    *e = (struct sim_event_s){mmap(NULL, SIM_PAGE, PROT_READ | PROT_WRITE, flags, fd, 0), fd};
    if (e->shared == MAP_FAILED) abort();
    events++;
    *out = e;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out) {
    SIM_CALL(cudaErrorMemoryAllocation);
    return make(-1, out);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    SIM_CALL(cudaErrorMemoryAllocation);
    const bool shared = flags & cudaEventInterprocess;
    if (shared && !(flags & cudaEventDisableTiming)) return sim_failed(cudaErrorInvalidValue);
    return make(shared ? sim_file("sim-event", SIM_PAGE) : -1, out);
}

/* The page stays: work that is under way still ends there. */
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    if (e->fd >= 0) close(e->fd);
    free(e);
    return cudaSuccess;
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *out, cudaEvent_t e) {
    SIM_CALL(cudaErrorInvalidResourceHandle);
    if (e->fd < 0) return sim_failed(cudaErrorInvalidResourceHandle);
    sim_name_file(e->fd, 0, out->reserved);
    return cudaSuccess;
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *out, cudaIpcEventHandle_t handle) {
    SIM_CALL(cudaErrorInvalidResourceHandle);
    int device;
    const int fd = sim_open_file(handle.reserved, &device);
    if (fd < 0) return sim_failed(cudaErrorInvalidResourceHandle);
    return make(fd, out);
}

/* ---- turns ----------------------------------------------------------------------------------- */

static void ring(sim_shared_t *s) {
    s->bell++;
    syscall(SYS_futex, &s->bell, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

static void end_turn(void *argument) {
    sim_turn_t *turn = argument;
    sim_shared_t *s = turn->shared;
    uint64_t done = s->done;
    s->ms = now();
    while (done < turn->n && !atomic_compare_exchange_weak(&s->done, &done, turn->n))
        ;
    ring(s);
    free(turn);
}

/* Work of a process that has ended will not end any more. */
static bool is_over(const sim_shared_t *s, uint64_t n) {
    return s->done >= n || (s->by != getpid() && kill(s->by, 0) && errno == ESRCH);
}

static void wait_for(sim_shared_t *s, uint64_t n) {
    const struct timespec pause = {0, 20000000};
    while (!is_over(s, n)) {
        const uint32_t bell = s->bell;
        if (!is_over(s, n)) syscall(SYS_futex, &s->bell, FUTEX_WAIT, bell, &pause, NULL, 0);
    }
}

static void wait_turn(void *argument) {
    sim_turn_t *turn = argument;
    wait_for(turn->shared, turn->n);
    free(turn);
}

static void give(cudaStream_t stream, void (*run)(void *), sim_shared_t *s, uint64_t n) {
    sim_turn_t *turn = malloc(sizeof *turn);
    if (!turn) abort();
    *turn = (sim_turn_t){s, n, 0};
    sim_give(stream, run, turn);
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream) {
    SIM_CALL(cudaErrorInvalidResourceHandle);
    e->shared->by = getpid();
    give(stream, end_turn, e->shared, ++e->shared->recorded);
    return cudaSuccess;
}

static void end_part(void *argument) {
    sim_turn_t *turn = argument;
    if (!--turn->left) end_turn(turn);
}

/* All that the streams of a context have been given by now. */
CUresult cuCtxRecordEvent(CUcontext context, CUevent e) {
    const cudaError_t failing = sim_failing(__func__, cudaErrorInvalidResourceHandle);
    if (failing) return (CUresult)failing;
    sim_turn_t *turn = malloc(sizeof *turn);
    if (!turn) abort();
    e->shared->by = getpid();
    *turn = (sim_turn_t){e->shared, ++e->shared->recorded, 1};
    sim_give_all(sim_device_number((int)(intptr_t)context - 1), end_part, turn, &turn->left);
    end_part(turn);
    return CUDA_SUCCESS;
}

/* For the work that was recorded last, as at the time of the call. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t e, unsigned flags) {
    SIM_CALL(cudaErrorInvalidResourceHandle);
    if (flags) return sim_failed(cudaErrorInvalidValue);
    give(stream, wait_turn, e->shared, e->shared->recorded);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    SIM_CALL(cudaErrorLaunchFailure);
    sim_count_wait();
    wait_for(e->shared, e->shared->recorded);
    return sim_lost();
}

cudaError_t cudaEventQuery(cudaEvent_t e) {
    SIM_CALL(cudaErrorLaunchFailure);
    return is_over(e->shared, e->shared->recorded) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float *out_ms, cudaEvent_t from, cudaEvent_t to) {
    SIM_CALL(cudaErrorInvalidResourceHandle);
    const sim_shared_t *a = from->shared, *b = to->shared;
    if (!a->done || !b->done || b->done < b->recorded) return sim_failed(cudaErrorNotReady);
    const float told = sim_settings()->elapsed ? sim_settings()->elapsed() : -1;
    *out_ms = told >= 0 ? told : (float)(b->ms - a->ms);
    return cudaSuccess;
}
