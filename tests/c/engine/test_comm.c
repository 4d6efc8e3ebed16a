/* Communicators of the CUDA plug-in's device, over the stand-ins for CUDA and NCCL: two processes,
 * each with a device. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/math/bf16.h"
#include "server/device/device.h"
#include "tests/sim/sim.h"
#include "tests/test.h"

enum { RANKS = 2, N = 40000, LIMIT_MS = 8000, SHORT_MS = 300 };

static uint8_t id[GRADD_COMM_ID_BYTES];

/* build/lib/libnccl_sim.so, beside build/bin. */
static void use_library(void) {
    char path[400], own[300];
    const ssize_t n = readlink("/proc/self/exe", own, sizeof own - 1);
    CHECK(n > 0);
    own[n] = 0;
    *strrchr(own, '/') = 0;
    snprintf(path, sizeof path, "%s/../lib/libnccl_sim.so", own);
    setenv("GRADD_NCCL", path, 1);
}

static const gradd_backend_t *backend(const char *name) {
    for (size_t i = 0; i < gradd_backend_count; i++)
        if (!strcmp(gradd_backends[i]->name, name)) return gradd_backends[i];
    test_fail(__FILE__, __LINE__, "no device %s", name);
}

static gradd_device_t *open_emulated(void) {
    const gradd_device_options_t options = {.name = "emu"};
    gradd_device_t *device;
    CHECK_OK(gradd_device_open(&options, &device));
    CHECK_OK(device->backend->queue_enter(device->queue, 0));
    return device;
}

/* One rank, and its tensors in memory of its device: f32 and bf16. */
typedef struct rank_s {
    int number;
    gradd_device_t *device;
    const gradd_backend_t *b;
    gradd_comm_t *comm;
    uint64_t round, *word;
    float *f32;
    gradd_bf16_t *bf16;
    float host[N];
    gradd_bf16_t half[N];
} rank_t;

static void wait_for_round(const rank_t *r, uint64_t round) {
    while (__atomic_load_n(r->b->comm_ended(r->comm), __ATOMIC_ACQUIRE) < round)
        usleep(100);
}

static void join_ranks(rank_t *r, int ranks, int limit_ms) {
    const gradd_comm_options_t o = {id, r->number, ranks, limit_ms, NULL};
    r->device = open_emulated();
    r->b = r->device->backend;
    CHECK_OK(r->b->comm_join(r->device->queue, &o, &r->comm));
    wait_for_round(r, 1);
}

static void fill(rank_t *r, int step) {
    void *memory;
    for (int i = 0; i < N; i++) {
        r->host[i] = (float)((i * 7 + step + r->number * 13) % 101) / 8;
        r->half[i] = gradd_f32_bf16((float)(i % 16 + r->number * 2));
    }
    if (!r->f32) {
        CHECK_OK(r->b->alloc(r->device->queue, sizeof r->host, &memory));
        r->f32 = memory;
        CHECK_OK(r->b->alloc(r->device->queue, sizeof r->half, &memory));
        r->bf16 = memory;
        CHECK_OK(r->b->alloc(r->device->queue, sizeof(uint64_t), &memory));
        r->word = memory;
        CHECK_OK(r->b->zero(r->device->queue, memory, sizeof(uint64_t)));
    }
    CHECK_OK(r->b->copy(r->device->queue, r->f32, r->host, sizeof r->host));
    CHECK_OK(r->b->copy(r->device->queue, r->bf16, r->half, sizeof r->half));
}

static void begin(rank_t *r, uint64_t fingerprint) {
    CHECK_OK(r->b->comm_begin(r->comm, fingerprint, &r->round));
}

/* In two parts: the first half of the floats and the halves, and the rest. */
static void average(rank_t *r) {
    const gradd_span_t spans[] = {
        {r->f32,         GRADD_DT_F32,  N / 2    },
        {r->bf16,        GRADD_DT_BF16, N        },
        {r->f32 + N / 2, GRADD_DT_F32,  N - N / 2}
    };
    const gradd_comm_part_t first = {spans, 2, r->word, 11, false},
                            last = {spans + 2, 1, r->word, 12, true};
    CHECK_OK(r->b->comm_average(r->device->queue, r->comm, &first));
    CHECK_OK(r->b->comm_average(r->device->queue, r->comm, &last));
}

static float mean_at(int i, int step, int ranks) {
    float sum = 0;
    for (int rank = 0; rank < ranks; rank++)
        sum += (float)((i * 7 + step + rank * 13) % 101) / 8 / (float)ranks;
    return sum;
}

static void check_average(rank_t *r, int step, int ranks) {
    uint64_t word;
    CHECK_OK(r->b->comm_status(r->comm));
    CHECK_OK(device_read(r->device, r->host, r->f32, sizeof r->host));
    CHECK_OK(device_read(r->device, r->half, r->bf16, sizeof r->half));
    CHECK_OK(device_read(r->device, &word, r->word, sizeof word));
    CHECK_EQ_INT(word, 12);
    for (int i = 0; i < N; i++) {
        CHECK(r->host[i] == mean_at(i, step, ranks));
        CHECK(gradd_bf16_f32(r->half[i]) == (float)(i % 16 + ranks - 1));
    }
}

static void leave(rank_t *r) {
    r->b->comm_leave(r->comm);
    gradd_device_close(r->device);
}

/* Each rank in a process of its own, forked before there are streams. */
static void run_ranks(void (*work)(rank_t *), void (*other)(rank_t *)) {
    pid_t children[RANKS];
    use_library();
    CHECK_OK(backend("emu")->comm_id(id));
    for (int i = 0; i < RANKS; i++) {
        children[i] = fork();
        if (children[i]) continue;
        static rank_t rank;
        rank.number = i;
        (i ? other : work)(&rank);
        _exit(0);
    }
    for (int i = 0; i < RANKS; i++) {
        int status;
        CHECK_EQ_INT(waitpid(children[i], &status, 0), children[i]);
        CHECK_EQ_INT(status, 0);
    }
}

static void average_thrice(rank_t *r) {
    join_ranks(r, RANKS, LIMIT_MS);
    for (int step = 0; step < 3; step++) {
        fill(r, step);
        begin(r, 0x123456789abcdefull);
        average(r);
        wait_for_round(r, r->round);
        CHECK_EQ_INT(r->round, step + 2);
        check_average(r, step, RANKS);
    }
    leave(r);
}

TEST(two_ranks_have_the_mean_of_both) {
    run_ranks(average_thrice, average_thrice);
}

/* The vote is over, and the queue works for some time before the tensors are there. */
static void average_late_tensors(rank_t *r) {
    join_ranks(r, RANKS, LIMIT_MS);
    fill(r, 0);
    begin(r, 1);
    usleep(50000);
    for (int k = 0; k < 5000; k++)
        CHECK_OK(r->b->zero(r->device->queue, r->f32, sizeof r->host));
    fill(r, 1);
    average(r);
    wait_for_round(r, r->round);
    check_average(r, 1, RANKS);
    leave(r);
}

TEST(averages_wait_for_the_queue) {
    run_ranks(average_late_tensors, average_late_tensors);
}

TEST(one_rank_keeps_its_bits) {
    static rank_t r;
    use_library();
    CHECK_OK(backend("emu")->comm_id(id));
    join_ranks(&r, 1, LIMIT_MS);
    fill(&r, 4);
    begin(&r, 1);
    average(&r);
    wait_for_round(&r, r.round);
    check_average(&r, 4, 1);
    leave(&r);
}

/* ---- what goes wrong ------------------------------------------------------------------------- */

static void check_failed(rank_t *r, gradd_status_t code, const char *what) {
    CHECK(__atomic_load_n(r->b->comm_ended(r->comm), __ATOMIC_ACQUIRE) == GRADD_COMM_FAILED);
    CHECK_STATUS(code, r->b->comm_status(r->comm));
    CHECK_ERROR_HAS(what);
    /* and so does all that follows */
    CHECK_STATUS(code, r->b->comm_begin(r->comm, 1, &r->round));
    CHECK_ERROR_HAS(what);
}

static void differ(rank_t *r) {
    uint64_t word;
    join_ranks(r, RANKS, LIMIT_MS);
    fill(r, 0);
    begin(r, (uint64_t)r->number << 40);
    average(r);
    wait_for_round(r, r->round);
    check_failed(r, GRADD_E_PEER, "do not begin the same backward");
    CHECK_OK(device_read(r->device, &word, r->word, sizeof word));
    CHECK_EQ_INT(word, 0);
    leave(r);
}

TEST(ranks_that_do_different_things_all_fail) {
    run_ranks(differ, differ);
}

static void miss_the_other(rank_t *r) {
    uint64_t word;
    join_ranks(r, RANKS, SHORT_MS);
    fill(r, 0);
    begin(r, 1);
    average(r);
    wait_for_round(r, r->round);
    check_failed(r, GRADD_E_PEER, "rank 0 of 2 has waited 300 ms for the other ranks");
    CHECK_OK(device_read(r->device, &word, r->word, sizeof word));
    CHECK_EQ_INT(word, 0);
    leave(r);
}

static void die(rank_t *r) {
    join_ranks(r, RANKS, LIMIT_MS);
    kill(getpid(), SIGKILL);
}

/* It begins its round, but something of its own fails before the last part. */
static void give_up(rank_t *r) {
    join_ranks(r, RANKS, LIMIT_MS);
    fill(r, 0);
    begin(r, 1);
    const gradd_span_t spans[] = {
        {r->f32,  GRADD_DT_F32,  N / 2},
        {r->bf16, GRADD_DT_BF16, N    }
    };
    const gradd_comm_part_t first = {spans, 2, r->word, 11, false};
    CHECK_OK(r->b->comm_average(r->device->queue, r->comm, &first));
    usleep(20000);
    leave(r);
}

/* The first part may be there, never the last. */
static void miss_the_last_part(rank_t *r) {
    uint64_t word;
    join_ranks(r, RANKS, SHORT_MS);
    fill(r, 0);
    begin(r, 1);
    average(r);
    wait_for_round(r, r->round);
    check_failed(r, GRADD_E_PEER, "has waited");
    CHECK_OK(device_read(r->device, &word, r->word, sizeof word));
    CHECK(word == 0 || word == 11);
    leave(r);
}

TEST(a_rank_that_gives_up_fails_the_turn_of_the_other) {
    run_ranks(miss_the_last_part, give_up);
}

static void end_without_joining(rank_t *r) {
    (void)r;
}

static void join_alone(rank_t *r) {
    join_ranks(r, RANKS, SHORT_MS);
    check_failed(r, GRADD_E_PEER, "has waited");
    leave(r);
}

TEST(a_rank_that_never_comes_fails_the_others) {
    run_ranks(join_alone, end_without_joining);
}

TEST(a_killed_rank_fails_the_others) {
    pid_t children[RANKS];
    int status;
    use_library();
    CHECK_OK(backend("emu")->comm_id(id));
    for (int i = 0; i < RANKS; i++) {
        children[i] = fork();
        if (children[i]) continue;
        static rank_t rank;
        rank.number = i;
        (i ? die : miss_the_other)(&rank);
        _exit(0);
    }
    CHECK_EQ_INT(waitpid(children[1], &status, 0), children[1]);
    CHECK(WIFSIGNALED(status));
    CHECK_EQ_INT(waitpid(children[0], &status, 0), children[0]);
    CHECK_EQ_INT(status, 0);
}

/* Waits for the other rank, which never begins, until it is told to leave. */
static void leave_meanwhile(rank_t *r) {
    join_ranks(r, RANKS, LIMIT_MS);
    fill(r, 0);
    begin(r, 1);
    average(r);
    leave(r);
}

TEST(leaving_does_not_wait_for_the_others) {
    run_ranks(leave_meanwhile, leave_meanwhile);
}

TEST(a_cancelled_session_does_not_wait_for_the_others) {
    static rank_t r;
    static volatile int cancel;
    use_library();
    r.device = open_emulated();
    r.b = r.device->backend;
    CHECK_OK(r.b->comm_id(id));
    const gradd_comm_options_t o = {id, 0, RANKS, LIMIT_MS, &cancel};
    CHECK_OK(r.b->comm_join(r.device->queue, &o, &r.comm));
    cancel = 1;
    wait_for_round(&r, 1);
    check_failed(&r, GRADD_E_STALE, "the session has ended");
    leave(&r);
}

static void check_call_fails(const char *call, const char *what) {
    static rank_t r;
    r = (rank_t){0};
    r.device = open_emulated();
    r.b = r.device->backend;
    CHECK_OK(r.b->comm_id(id));
    const gradd_comm_options_t o = {id, 0, 1, LIMIT_MS, NULL};
    sim_fail(call, 1);
    CHECK_OK(r.b->comm_join(r.device->queue, &o, &r.comm));
    wait_for_round(&r, 1);
    if (!r.b->comm_status(r.comm)) {
        fill(&r, 0);
        begin(&r, 1);
        average(&r);
        wait_for_round(&r, r.round);
    }
    check_failed(&r, GRADD_E_PEER, what);
    CHECK_EQ_INT(sim_left(), 0);
    leave(&r);
}

TEST(every_call_of_the_library_may_fail) {
    use_library();
    check_call_fails("ncclCommInitRankConfig", "joining a communicator: unhandled system error");
    check_call_fails("ncclCommGetAsyncError", "a communicator: remote process exited");
    check_call_fails("ncclAllReduce", "an average: unhandled system error");
    sim_fail("ncclGetUniqueId", 1);
    CHECK_STATUS(GRADD_E_PEER, backend("emu")->comm_id(id));
    CHECK_ERROR_HAS("an id: unhandled system error");
}

TEST(a_missing_library_is_named) {
    setenv("GRADD_NCCL", "/nowhere/libnccl.so.2", 1);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, backend("emu")->comm_id(id));
    CHECK_ERROR_HAS("NCCL cannot be loaded: /nowhere/libnccl.so.2");
    setenv("GRADD_NCCL", "libdl.so.2", 1);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, backend("emu")->comm_id(id));
    CHECK_ERROR_HAS("libdl.so.2 has no ncclGetUniqueId: NCCL 2.14 or newer is needed");
}

TEST(integers_are_not_averaged) {
    static rank_t r;
    use_library();
    CHECK_OK(backend("emu")->comm_id(id));
    join_ranks(&r, 1, LIMIT_MS);
    fill(&r, 0);
    begin(&r, 1);
    const gradd_span_t span = {r.f32, GRADD_DT_I32, 4};
    const gradd_comm_part_t part = {&span, 1, NULL, 0, true};
    CHECK_STATUS(GRADD_E_UNSUPPORTED, r.b->comm_average(r.device->queue, r.comm, &part));
    CHECK_ERROR_HAS("of floats, not of i32");
    leave(&r);
}

TEST(the_cpu_has_no_communicator) {
    CHECK(!backend("cpu")->comm_id);
}
