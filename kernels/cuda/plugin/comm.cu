/* Averages over the GPUs of several processes. See comm.h.
 *
 * NCCL may wait for other ranks in any of its calls, and a rank that is gone never comes. So a
 * thread of the communicator makes them, all of them, on a communicator that does not block; it
 * looks again and again whether the library or the stream has come further, and gives up after the
 * limit, or when it is told to. Giving up ends what the library has on the GPU (ncclCommAbort).
 *
 * What ends that way looks done to the stream. Therefore no word is raised in the stream of the
 * averages: when the thread has seen the end of a part and no error, another stream raises it.
 *
 * A round begins with a vote: the ranks add up parts h of their fingerprints, and h * h. The
 * numbers are the same if and only if ranks * sum(h * h) = sum(h)^2. Below 2^16, they and their
 * sums are exact in f64. Ranks that differ all see it, before any of them averages unlike tensors.
 */
#include "kernels/cuda/plugin/comm.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/cuda/gpu.h"
#include "kernels/cuda/plugin/nccl.h"
#include "kernels/cuda/step.h"

enum { VOTES = 8, VOTE_BITS = 16, GOODBYE_MS = 3000 };
enum { SHORTEST_US = 20, LONGEST_US = 320 }; /* between two looks */

/* ---- the library ----------------------------------------------------------------------------- */

#define FUNCTIONS(X)                                                                               \
    X(ncclGetUniqueId)                                                                             \
    X(ncclCommInitRankConfig)                                                                      \
    X(ncclCommGetAsyncError)                                                                       \
    X(ncclAllReduce)                                                                               \
    X(ncclGroupStart)                                                                              \
    X(ncclGroupEnd)                                                                                \
    X(ncclCommFinalize)                                                                            \
    X(ncclCommDestroy)                                                                             \
    X(ncclCommAbort)                                                                               \
    X(ncclGetErrorString)

static struct {
    void *file;
#define X(name) decltype(&::name) name;
    FUNCTIONS(X)
#undef X
} nccl;

static const char *library_name(void) {
    const char *name = getenv("GRADD_NCCL");
    return name && *name ? name : "libnccl.so.2";
}

static gradd_status_t find_functions(void *file) {
#define X(name)                                                                                    \
    *(void **)&nccl.name = dlsym(file, #name);                                                     \
    if (!nccl.name)                                                                                \
        return GRADD_FAIL(UNSUPPORTED, "%s has no " #name ": NCCL 2.14 or newer is needed",        \
                          library_name());
    FUNCTIONS(X)
#undef X
    return GRADD_OK;
}

/* One thread at a time. */
static gradd_status_t open_library(void) {
    if (nccl.file) return GRADD_OK;
    void *file = dlopen(library_name(), RTLD_NOW | RTLD_LOCAL);
    if (!file)
        return GRADD_FAIL(UNSUPPORTED,
                          "NCCL cannot be loaded: %s (GRADD_NCCL=FILE names another file)",
                          dlerror());
    const gradd_status_t status = find_functions(file);
    if (status)
        dlclose(file);
    else
        nccl.file = file;
    return status;
}

static gradd_status_t refused(ncclResult_t result, const char *what) {
    return GRADD_FAIL(PEER, "NCCL: %s: %s (%d)", what, nccl.ncclGetErrorString(result),
                      (int)result);
}
#define NC(call, what)                                                                             \
    do {                                                                                           \
        const ncclResult_t result_ = (call);                                                       \
        if (result_ != ncclSuccess && result_ != ncclInProgress) return refused(result_, what);    \
    } while (0)

static gradd_status_t failed(cudaError_t error, const char *what) {
    cudaGetLastError();
    return GRADD_FAIL(PEER, "CUDA: %s: %s (%s, %d)", what, cudaGetErrorString(error),
                      cudaGetErrorName(error), (int)error);
}
#define CU(call, what)                                                                             \
    do {                                                                                           \
        const cudaError_t error_ = (call);                                                         \
        if (error_ != cudaSuccess) return failed(error_, what);                                    \
    } while (0)

/* ---- a communicator -------------------------------------------------------------------------- */

/* A piece of work: a vote, or a part. */
typedef struct comm_item_s {
    struct comm_item_s *next;
    cudaEvent_t event; /* Owned: behind which it begins, then behind which it has ended; or NULL */
    bool is_vote;
    uint64_t fingerprint;
    uint64_t *word;
    uint64_t value;
    bool last;
    int n;
    gradd_span_t *spans; /* behind the item */
} comm_item_t;

/* A list of items, the oldest first. */
typedef struct comm_list_s {
    comm_item_t *first, **end;
} comm_list_t;

struct gradd_comm_s {
    /* of all threads; the lock is held for some instructions */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    comm_list_t given;
    uint64_t ended;        /* see comm_ended */
    gradd_status_t failed; /* not 0: of no use any more, because */
    char why[GRADD_ERROR_BYTES];
    bool leaving, quiet, left; /* it is told to end; touches no memory; comm_leave has returned */
    /* of the thread that uses the queue */
    uint64_t round; /* the last one */
    /* of the communicator's thread */
    ncclUniqueId id;
    int rank, ranks;
    int64_t limit_ms, since_ms; /* since when it waits for what is first in `flying` */
    const volatile int *cancel;
    ncclComm_t handle;
    cudaStream_t stream, side; /* Owned: of averages, and of words */
    double *votes;             /* Owned: of the device */
    comm_list_t flying;        /* parts in the stream */
};

static pthread_mutex_t count_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t count_changed = PTHREAD_COND_INITIALIZER;
static int n_threads;

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void append(comm_list_t *list, comm_item_t *item) {
    item->next = NULL;
    *list->end = item;
    list->end = &item->next;
}

static comm_item_t *take_first(comm_list_t *list) {
    comm_item_t *item = list->first;
    if (!item) return NULL;
    list->first = item->next;
    if (!list->first) list->end = &list->first;
    return item;
}

static void drop(comm_item_t *item) {
    if (item->event) cudaEventDestroy(item->event);
    free(item);
}

static void drop_all(comm_list_t *list) {
    while (comm_item_t *item = take_first(list))
        drop(item);
}

/* ---- waiting for other ranks ----------------------------------------------------------------- */

static bool is_leaving(gradd_comm_t *c) {
    pthread_mutex_lock(&c->lock);
    const bool leaving = c->leaving;
    pthread_mutex_unlock(&c->lock);
    return leaving;
}

static gradd_status_t may_wait(gradd_comm_t *c, int64_t since_ms) {
    if (is_leaving(c) || (c->cancel && __atomic_load_n(c->cancel, __ATOMIC_RELAXED)))
        return GRADD_FAIL(STALE, "the session has ended");
    if (now_ms() - since_ms > c->limit_ms)
        return GRADD_FAIL(PEER,
                          "rank %d of %d has waited %lld ms for the other ranks, the limit: one of "
                          "them has ended, has failed, or has not come as far",
                          c->rank, c->ranks, (long long)c->limit_ms);
    return GRADD_OK;
}

/* What the library has done so far, of what it has begun. */
static gradd_status_t look(gradd_comm_t *c, bool *out_busy) {
    ncclResult_t state = ncclSuccess;
    NC(nccl.ncclCommGetAsyncError(c->handle, &state), "its state");
    NC(state, "a communicator");
    *out_busy = state == ncclInProgress;
    return GRADD_OK;
}

static gradd_status_t look_at_event(cudaEvent_t event, bool *out_busy) {
    const cudaError_t error = cudaEventQuery(event);
    if (error && error != cudaErrorNotReady) return failed(error, "an event");
    if (error) cudaGetLastError();
    *out_busy = error == cudaErrorNotReady;
    return GRADD_OK;
}

/* Waits for the library, and for an event if there is one. */
static gradd_status_t wait_until(gradd_comm_t *c, cudaEvent_t event) {
    const int64_t since = now_ms();
    for (useconds_t pause = SHORTEST_US;; pause *= pause < LONGEST_US ? 2 : 1) {
        bool busy;
        GRADD_TRY(look(c, &busy));
        if (!busy && event) GRADD_TRY(look_at_event(event, &busy));
        if (!busy) return GRADD_OK;
        GRADD_TRY(may_wait(c, since));
        usleep(pause);
    }
}

/* ---- work ------------------------------------------------------------------------------------ */

static gradd_status_t join(gradd_comm_t *c) {
    ncclConfig_t config = {sizeof config, NCCL_CONFIG_MAGIC, NCCL_CONFIG_VERSION, 0};
    CU(cudaSetDevice(0), "the GPU");
    CU(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking), "a stream");
    CU(cudaStreamCreateWithFlags(&c->side, cudaStreamNonBlocking), "a stream");
    CU(cudaMallocAsync((void **)&c->votes, VOTES * sizeof(double), c->stream),
       "memory of a communicator");
    NC(nccl.ncclCommInitRankConfig(&c->handle, c->ranks, c->id, c->rank, &config),
       "joining a communicator");
    return wait_until(c, NULL);
}

static gradd_status_t check_votes(gradd_comm_t *c) {
    double sums[VOTES];
    void *const before = gpu_call.stream;
    gpu_call.stream = c->stream;
    const gradd_status_t status = gpu_read(sums, c->votes, sizeof sums);
    gpu_call.stream = before;
    GRADD_TRY(status);
    for (int i = 0; i < VOTES; i += 2)
        if (sums[i] * sums[i] != sums[i + 1] * c->ranks)
            return GRADD_FAIL(PEER,
                              "the ranks do not begin the same backward: all must have the same "
                              "parameters and buffers, train the same of them, in groups of the "
                              "same size (GRADD_GROUP_BYTES), and run the same parts of the model "
                              "in the same order");
    return GRADD_OK;
}

static gradd_status_t vote(gradd_comm_t *c, const comm_item_t *item) {
    double own[VOTES];
    cudaEvent_t event;
    for (int i = 0; i < VOTES; i += 2) {
        own[i] = (double)(item->fingerprint >> (i / 2 * VOTE_BITS) & ((1u << VOTE_BITS) - 1));
        own[i + 1] = own[i] * own[i];
    }
    CU(cudaMemcpyAsync(c->votes, own, sizeof own, cudaMemcpyDefault, c->stream), "a copy");
    NC(nccl.ncclAllReduce(c->votes, c->votes, VOTES, ncclFloat64, ncclSum, c->handle, c->stream),
       "a vote");
    GRADD_TRY(wait_until(c, NULL)); /* the event must stand behind what the library has begun */
    CU(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
    const cudaError_t error = cudaEventRecord(event, c->stream);
    const gradd_status_t status = error ? failed(error, "an event") : wait_until(c, event);
    cudaEventDestroy(event);
    GRADD_TRY(status);
    return check_votes(c);
}

static ncclDataType_t type_of(gradd_dtype_t dtype) {
    return dtype == GRADD_DT_F16   ? ncclFloat16
           : dtype == GRADD_DT_F64 ? ncclFloat64
           : dtype == GRADD_DT_F32 ? ncclFloat32
                                   : ncclBfloat16;
}

static gradd_status_t average(gradd_comm_t *c, const comm_item_t *item) {
    NC(nccl.ncclGroupStart(), "averages");
    for (int i = 0; i < item->n; i++) {
        const gradd_span_t *s = &item->spans[i];
        const ncclResult_t result =
            nccl.ncclAllReduce(s->data, (void *)s->data, (size_t)s->n, type_of(s->dtype), ncclAvg,
                               c->handle, c->stream);
        if (result == ncclSuccess || result == ncclInProgress) continue;
        nccl.ncclGroupEnd();
        return refused(result, "an average");
    }
    NC(nccl.ncclGroupEnd(), "averages");
    return wait_until(c, NULL);
}

/* Gives a part to the stream. */
static gradd_status_t begin_part(gradd_comm_t *c, comm_item_t *item) {
    CU(cudaStreamWaitEvent(c->stream, item->event, 0), "an event");
    if (item->n) GRADD_TRY(average(c, item));
    CU(cudaEventRecord(item->event, c->stream), "an event");
    return GRADD_OK;
}

static gradd_status_t begin_item(gradd_comm_t *c, comm_item_t *item) {
    if (item->is_vote) {
        const gradd_status_t status = c->ranks > 1 ? vote(c, item) : GRADD_OK;
        drop(item);
        return status;
    }
    const gradd_status_t status = begin_part(c, item);
    if (!c->flying.first) c->since_ms = now_ms();
    append(&c->flying, item);
    return status;
}

static void end_round(gradd_comm_t *c) {
    __atomic_fetch_add(&c->ended, 1, __ATOMIC_RELEASE);
}

/* Raises the word of the oldest part if it has ended, else pauses. */
static gradd_status_t land(gradd_comm_t *c) {
    bool busy;
    comm_item_t *item = c->flying.first;
    GRADD_TRY(look(c, &busy));
    GRADD_TRY(look_at_event(item->event, &busy));
    if (busy) {
        GRADD_TRY(may_wait(c, c->since_ms));
        usleep(SHORTEST_US);
        return GRADD_OK;
    }
    gpu_call.stream = c->side;
    if (item->word) GRADD_TRY(gpu_store(item->word, item->value));
    if (item->last) CU(cudaStreamSynchronize(c->side), "a word");
    if (item->last) end_round(c);
    drop(take_first(&c->flying));
    c->since_ms = now_ms();
    return GRADD_OK;
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* The next item. Without one it waits for one, unless it may not: NULL then, or at the end. */
static comm_item_t *next_item(gradd_comm_t *c, bool wait) {
    pthread_mutex_lock(&c->lock);
    while (wait && !c->given.first && !c->leaving)
        pthread_cond_wait(&c->changed, &c->lock);
    comm_item_t *item = c->leaving ? NULL : take_first(&c->given);
    pthread_mutex_unlock(&c->lock);
    return item;
}

static void abort_all(gradd_comm_t *c) {
    if (c->handle) nccl.ncclCommAbort(c->handle);
    c->handle = NULL;
    if (c->stream) cudaStreamSynchronize(c->stream);
    if (c->side) cudaStreamSynchronize(c->side);
    cudaGetLastError();
    drop_all(&c->flying);
}

/* Keeps the failure: that of the calling thread. */
static void fail(gradd_comm_t *c, gradd_status_t status) {
    abort_all(c);
    pthread_mutex_lock(&c->lock);
    c->failed = status;
    snprintf(c->why, sizeof c->why, "%s", gradd_error_message());
    drop_all(&c->given);
    pthread_mutex_unlock(&c->lock);
    __atomic_store_n(&c->ended, GRADD_COMM_FAILED, __ATOMIC_RELEASE);
}

static void work(gradd_comm_t *c) {
    gradd_status_t status = join(c);
    if (!status) end_round(c);
    while (!status) {
        comm_item_t *item = next_item(c, !c->flying.first);
        if (item)
            status = begin_item(c, item);
        else if (!c->flying.first)
            break; /* it leaves, and nothing is to be done */
        else
            status = land(c);
    }
    if (status) fail(c, status);
    while (next_item(c, true)) {
    }
}

/* The other ranks may still read from this one what its averages have left for them. */
static void say_goodbye(gradd_comm_t *c) {
    const int64_t since = now_ms();
    ncclResult_t state = ncclInProgress;
    nccl.ncclCommFinalize(c->handle);
    while (state == ncclInProgress && now_ms() - since < GOODBYE_MS) {
        if (nccl.ncclCommGetAsyncError(c->handle, &state)) break;
        if (state == ncclInProgress) usleep(LONGEST_US);
    }
    if (state == ncclSuccess)
        nccl.ncclCommDestroy(c->handle);
    else
        nccl.ncclCommAbort(c->handle);
    c->handle = NULL;
}

static void destroy(gradd_comm_t *c) {
    drop_all(&c->given);
    drop_all(&c->flying);
    if (c->votes) cudaFreeAsync(c->votes, c->stream); /* cudaFree would wait for the whole GPU */
    if (c->stream) cudaStreamDestroy(c->stream);
    if (c->side) cudaStreamDestroy(c->side);
    cudaGetLastError();
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

static void count(int more) {
    pthread_mutex_lock(&count_lock);
    n_threads += more;
    pthread_cond_broadcast(&count_changed);
    pthread_mutex_unlock(&count_lock);
}

static void *serve(void *argument) {
    gradd_comm_t *c = (gradd_comm_t *)argument;
    work(c);
    pthread_mutex_lock(&c->lock);
    c->quiet = true;
    pthread_cond_broadcast(&c->changed);
    while (!c->left)
        pthread_cond_wait(&c->changed, &c->lock);
    pthread_mutex_unlock(&c->lock);
    if (c->handle) say_goodbye(c);
    destroy(c);
    count(-1);
    return NULL;
}

void gpu_comm_settle(void) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 2 * GOODBYE_MS / 1000;
    pthread_mutex_lock(&count_lock);
    while (n_threads && !pthread_cond_timedwait(&count_changed, &count_lock, &until)) {
    }
    pthread_mutex_unlock(&count_lock);
}

/* ---- the table's functions ------------------------------------------------------------------- */

gradd_status_t gpu_comm_id(uint8_t *out) {
    ncclUniqueId id;
    static_assert(sizeof id == GRADD_COMM_ID_BYTES);
    GRADD_TRY(open_library());
    NC(nccl.ncclGetUniqueId(&id), "an id");
    memcpy(out, &id, sizeof id);
    return GRADD_OK;
}

gradd_status_t gpu_comm_join(gradd_queue_t *, const gradd_comm_options_t *options,
                             gradd_comm_t **out) {
    pthread_t thread;
    GRADD_TRY(open_library());
    gradd_comm_t *c = (gradd_comm_t *)calloc(1, sizeof *c);
    if (!c) return GRADD_FAIL(NOMEM, "no memory for a communicator");
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    c->given.end = &c->given.first;
    c->flying.end = &c->flying.first;
    memcpy(&c->id, options->id, sizeof c->id);
    c->rank = options->rank;
    c->ranks = options->ranks;
    c->limit_ms = options->limit_ms;
    c->cancel = options->cancel;
    c->round = 1;
    count(1);
    const int error = pthread_create(&thread, NULL, serve, c);
    if (error) {
        count(-1);
        destroy(c);
        return GRADD_FAIL(NOMEM, "a thread for a communicator: %s", strerror(error));
    }
    pthread_detach(thread);
    *out = c;
    return GRADD_OK;
}

gradd_status_t gpu_comm_status(gradd_comm_t *c) {
    char why[GRADD_ERROR_BYTES];
    pthread_mutex_lock(&c->lock);
    const gradd_status_t status = c->failed;
    snprintf(why, sizeof why, "%s", c->why);
    pthread_mutex_unlock(&c->lock);
    return status ? gradd_fail_at(__FILE__, __LINE__, status, "%s", why) : GRADD_OK;
}

/* Gives an item to the thread, or frees it. */
static gradd_status_t give(gradd_comm_t *c, comm_item_t *item) {
    pthread_mutex_lock(&c->lock);
    const bool fine = !c->failed;
    if (fine) append(&c->given, item);
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    if (fine) return GRADD_OK;
    drop(item);
    return gpu_comm_status(c);
}

static gradd_status_t new_item(int n, comm_item_t **out) {
    comm_item_t *item = (comm_item_t *)calloc(1, sizeof *item + sizeof(gradd_span_t) * (size_t)n);
    if (!item) return GRADD_FAIL(NOMEM, "no memory for an average");
    item->n = n;
    item->spans = (gradd_span_t *)(item + 1);
    *out = item;
    return GRADD_OK;
}

gradd_status_t gpu_comm_begin(gradd_comm_t *c, uint64_t fingerprint, uint64_t *out_round) {
    comm_item_t *item;
    GRADD_TRY(new_item(0, &item));
    item->is_vote = true;
    item->fingerprint = fingerprint;
    GRADD_TRY(give(c, item));
    *out_round = ++c->round;
    return GRADD_OK;
}

static gradd_status_t record(cudaStream_t stream, comm_item_t *item) {
    CU(cudaEventCreateWithFlags(&item->event, cudaEventDisableTiming), "an event");
    CU(cudaEventRecord(item->event, stream), "an event");
    return GRADD_OK;
}

gradd_status_t gpu_comm_average(cudaStream_t behind, gradd_comm_t *c,
                                const gradd_comm_part_t *part) {
    comm_item_t *item = nullptr;
    for (int i = 0; i < part->n; i++)
        if (!gradd_dtype_is_float(part->spans[i].dtype))
            return GRADD_FAIL(UNSUPPORTED, "averages over processes: of floats, not of %s",
                              gradd_dtype_name(part->spans[i].dtype));
    GRADD_TRY(new_item(part->n, &item));
    for (int i = 0; i < part->n; i++)
        item->spans[i] = part->spans[i];
    item->word = part->word;
    item->value = part->value;
    item->last = part->last;
    const gradd_status_t status = record(behind, item);
    if (!status) return give(c, item);
    drop(item);
    return status;
}

const uint64_t *gpu_comm_ended(const gradd_comm_t *c) {
    return &c->ended;
}

void gpu_comm_leave(gradd_comm_t *c) {
    if (!c) return;
    pthread_mutex_lock(&c->lock);
    c->leaving = true;
    pthread_cond_broadcast(&c->changed);
    while (!c->quiet)
        pthread_cond_wait(&c->changed, &c->lock);
    c->left = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}
