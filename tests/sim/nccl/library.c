/* A stand-in for NCCL, over the stand-in for CUDA (sim.h): a library that the plug-in opens, which
 * takes the rest from the program that has opened it.
 *
 * It really averages, between processes: an id names memory that the ranks share, where each puts
 * its numbers, a chunk at a time, and adds up those of all ranks in their order. A reduction is
 * work of a stream, and waits there until all ranks have come, for ever; only ncclCommAbort ends
 * that. The stand-in stops the process where NCCL would give wrong numbers or hang: ranks that ask
 * for other reductions, a communicator that blocks, one that is used while a call of it is in
 * progress.
 *
 * GRADD_SIM_FAIL and GRADD_SIM_REFUSE know ncclGetUniqueId, ncclCommInitRankConfig and
 * ncclAllReduce; with ncclCommGetAsyncError the communicator has failed.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kernels/cuda/plugin/nccl.h"
#include "kernels/math/bf16.h"
#include "kernels/math/f16.h"
#include "tests/sim/internal.h"

enum { MOST_RANKS = 4, CHUNK = 1 << 16, LAST_RESORT_S = 120 };

/* What a rank asks for. */
typedef struct ask_s {
    uint64_t count;
    int type, op;
} ask_t;

/* What the ranks share. */
typedef struct room_s {
    _Atomic uint64_t came; /* to meetings, all ranks together */
    atomic_int joined, finalized;
    ask_t asks[MOST_RANKS];
    char data[MOST_RANKS][CHUNK];
} room_t;

struct ncclComm {
    room_t *room;
    char name[sizeof(ncclUniqueId)];
    int rank, ranks;
    atomic_int refs; /* the caller, and work of streams */
    atomic_bool aborted;
    bool finalizing;
    int busy;          /* so often the next question is answered with "in progress" */
    uint64_t meetings; /* of this rank, in streams */
};

/* ---- meetings -------------------------------------------------------------------------------- */

static _Noreturn void stop(const char *what) {
    fprintf(stderr, "NCCL's stand-in: %s\n", what);
    abort();
}

/* False: it was aborted. */
static bool meet(ncclComm_t c) {
    const uint64_t all = ++c->meetings * (uint64_t)c->ranks;
    const time_t until = time(NULL) + LAST_RESORT_S;
    atomic_fetch_add(&c->room->came, 1);
    while (atomic_load(&c->room->came) < all) {
        if (c->aborted) return false;
        if (time(NULL) > until) stop("no rank comes, and nothing aborts");
        usleep(50);
    }
    return !c->aborted;
}

static void release(ncclComm_t c) {
    if (atomic_fetch_sub(&c->refs, 1) > 1) return;
    munmap(c->room, sizeof *c->room);
    free(c);
}

/* ---- numbers --------------------------------------------------------------------------------- */

static size_t bytes_of(int type) {
    return type == ncclFloat64 ? 8 : type == ncclFloat32 ? 4 : 2;
}

static double get(const void *data, int type, size_t i) {
    if (type == ncclFloat64) return ((const double *)data)[i];
    if (type == ncclFloat32) return ((const float *)data)[i];
    if (type == ncclFloat16) return gradd_f16_f32(((const gradd_f16_t *)data)[i]);
    return gradd_bf16_f32(((const gradd_bf16_t *)data)[i]);
}

static void put(void *data, int type, size_t i, double x) {
    if (type == ncclFloat64)
        ((double *)data)[i] = x;
    else if (type == ncclFloat32)
        ((float *)data)[i] = (float)x;
    else if (type == ncclFloat16)
        ((gradd_f16_t *)data)[i] = gradd_f32_f16((float)x);
    else
        ((gradd_bf16_t *)data)[i] = gradd_f32_bf16((float)x);
}

/* ---- a reduction ----------------------------------------------------------------------------- */

typedef struct reduction_s {
    ncclComm_t comm;
    const char *from;
    char *to;
    ask_t ask;
} reduction_t;

/* An average multiplies by 1 / ranks before it adds, and each sum of two is rounded to the type. */
static void add_up(const reduction_t *r, size_t first, size_t n) {
    const room_t *room = r->comm->room;
    const int type = r->ask.type;
    for (size_t i = 0; i < n; i++) {
        char sum[8];
        memcpy(sum, room->data[0] + i * bytes_of(type), bytes_of(type));
        for (int rank = 1; rank < r->comm->ranks; rank++)
            put(sum, type, 0, get(sum, type, 0) + get(room->data[rank], type, i));
        memcpy(r->to + (first + i) * bytes_of(type), sum, bytes_of(type));
    }
}

static void bring(const reduction_t *r, size_t first, size_t n) {
    const double scale = r->ask.op == ncclAvg ? 1.0 / r->comm->ranks : 1;
    char *own = r->comm->room->data[r->comm->rank];
    for (size_t i = 0; i < n; i++)
        put(own, r->ask.type, i, get(r->from, r->ask.type, first + i) * scale);
}

static bool check_asks(const reduction_t *r) {
    for (int rank = 0; rank < r->comm->ranks; rank++)
        if (memcmp(&r->comm->room->asks[rank], &r->ask, sizeof r->ask))
            stop("ranks ask for different reductions");
    return true;
}

static bool reduce_all(const reduction_t *r) {
    const size_t most = CHUNK / bytes_of(r->ask.type);
    r->comm->room->asks[r->comm->rank] = r->ask;
    if (!meet(r->comm) || !check_asks(r)) return false;
    for (size_t first = 0; first < r->ask.count; first += most) {
        const size_t rest = r->ask.count - first, n = rest < most ? rest : most;
        bring(r, first, n);
        if (!meet(r->comm)) return false;
        add_up(r, first, n);
        if (!meet(r->comm)) return false;
    }
    return meet(r->comm);
}

static void reduce(void *argument) {
    reduction_t *r = argument;
    if (!r->comm->aborted && !sim_lost()) reduce_all(r);
    release(r->comm);
    free(r);
}

static void check_idle(const struct ncclComm *c) {
    if (c->busy) stop("a call of the communicator is in progress");
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t c, cudaStream_t stream) {
    if (sim_refuses(__func__) || sim_hits(__func__)) return ncclSystemError;
    if (!sim_memory_find(from, NULL) || !sim_memory_find(to, NULL)) return ncclInvalidArgument;
    reduction_t *r = calloc(1, sizeof *r); /* the bytes between the fields are compared */
    if (!r) return ncclSystemError;
    r->comm = c;
    r->from = from;
    r->to = to;
    r->ask.count = count;
    r->ask.type = type;
    r->ask.op = op;
    atomic_fetch_add(&c->refs, 1);
    sim_give(stream, reduce, r);
    c->busy = 2;
    return ncclInProgress;
}

static int depth;

ncclResult_t ncclGroupStart(void) {
    depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    if (!depth--) stop("a group ends that has not begun");
    return ncclInProgress;
}

/* ---- communicators --------------------------------------------------------------------------- */

ncclResult_t ncclGetUniqueId(ncclUniqueId *out) {
    static atomic_int n;
    if (sim_refuses(__func__) || sim_hits(__func__)) return ncclSystemError;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    memset(out, 0, sizeof *out);
    snprintf(out->internal, sizeof out->internal, "/gradd-nccl-%d-%d-%lld%09ld", (int)getpid(), ++n,
             (long long)t.tv_sec, t.tv_nsec);
    return ncclSuccess;
}

static room_t *enter(const char *name) {
    const int fd = shm_open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return NULL;
    room_t *room = NULL;
    if (!ftruncate(fd, sizeof *room))
        room = mmap(NULL, sizeof *room, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return room == MAP_FAILED ? NULL : room;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    if (sim_refuses(__func__) || sim_hits(__func__)) return ncclSystemError;
    if (config->size < sizeof *config || config->magic != NCCL_CONFIG_MAGIC || config->blocking)
        stop("no communicator of its own kind, which does not block");
    if (ranks > MOST_RANKS || rank < 0 || rank >= ranks || id.internal[0] != '/')
        return ncclInvalidArgument;
    ncclComm_t c = calloc(1, sizeof *c);
    if (!c) return ncclSystemError;
    id.internal[sizeof id.internal - 1] = 0;
    memcpy(c->name, id.internal, sizeof c->name);
    c->room = enter(c->name);
    if (!c->room) {
        free(c);
        return ncclSystemError;
    }
    c->rank = rank;
    c->ranks = ranks;
    c->refs = 1;
    if (atomic_fetch_add(&c->room->joined, 1) + 1 == ranks) shm_unlink(c->name);
    *out = c;
    return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *out) {
    const bool waits =
        c->room->joined < c->ranks || (c->finalizing && c->room->finalized < c->ranks);
    *out = sim_hits(__func__) ? ncclRemoteError : waits || c->busy ? ncclInProgress : ncclSuccess;
    if (c->busy) c->busy--;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t c) {
    check_idle(c);
    c->finalizing = true;
    atomic_fetch_add(&c->room->finalized, 1);
    return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t c) {
    check_idle(c);
    if (!c->finalizing) stop("a communicator is destroyed that was not finalized");
    release(c);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t c) {
    if (c->room->joined < c->ranks) shm_unlink(c->name);
    c->aborted = true;
    release(c);
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = {
        "no error",
        "unhandled cuda error",
        "unhandled system error",
        "internal error",
        "invalid argument",
        "invalid usage",
        "remote process exited or there was a network error",
        "NCCL operation in progress",
    };
    return (size_t)result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}
