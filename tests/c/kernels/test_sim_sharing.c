/* Memory and events of the stand-in for CUDA (tests/sim) between processes. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shm/fdpass.h"
#include "tests/sim/cuda.h"
#include "tests/sim/sim.h"
#include "tests/test.h"

enum { GRAIN = 2 << 20, SOME = 64 };

static cudaStream_t stream(void) {
    cudaStream_t made;
    CHECK(!cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return made;
}

/* A child that does this; it ends with 0, or with a signal. */
static pid_t start(void (*what)(void *), void *argument) {
    const pid_t child = fork();
    if (child) return child;
    what(argument);
    _exit(0);
}

static int end_of(pid_t child) {
    int status;
    CHECK_EQ_INT(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
}

static int first_byte(const void *memory, cudaStream_t s) {
    unsigned char byte = 0;
    CHECK(!cudaMemcpyAsync(&byte, memory, 1, cudaMemcpyDefault, s));
    CHECK(!cudaStreamSynchronize(s));
    sim_settings()->pause_us = 0;
    return byte;
}

/* ---- memory of cuMemCreate ------------------------------------------------------------------- */

static const CUmemAllocationProp prop = {
    .type = CU_MEM_ALLOCATION_TYPE_PINNED,
    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}
};
static const CUmemAccessDesc access_all = {
    {CU_MEM_LOCATION_TYPE_DEVICE, 0},
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE
};

static void *map(CUmemGenericAllocationHandle handle) {
    CUdeviceptr at;
    CHECK(!cuMemAddressReserve(&at, GRAIN, 0, 0, 0));
    CHECK(!cuMemMap(at, GRAIN, 0, handle, 0));
    CHECK(!cuMemSetAccess(at, GRAIN, &access_all, 1));
    return (void *)(uintptr_t)at;
}

static void *import(int fd) {
    CUmemGenericAllocationHandle handle;
    CHECK(!cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    void *at = map(handle);
    CHECK(!cuMemRelease(handle));
    close(fd);
    return at;
}

static void *create(int *out_fd) {
    CUmemGenericAllocationHandle handle;
    CHECK(!cuMemCreate(&handle, GRAIN, &prop, 0));
    CHECK(
        !cuMemExportToShareableHandle(out_fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    void *at = map(handle);
    CHECK(!cuMemRelease(handle)); /* the mapping keeps it */
    return at;
}

static void unmap(void *at) {
    CHECK(!cuMemUnmap((CUdeviceptr)(uintptr_t)at, GRAIN));
    CHECK(!cuMemAddressFree((CUdeviceptr)(uintptr_t)at, GRAIN));
}

static void write_seven(void *argument) {
    cudaStream_t s = stream();
    void *at = import(*(int *)argument);
    cudaMemsetAsync(at, 7, SOME, s);
    cudaStreamSynchronize(s);
    unmap(at);
}

TEST(two_processes_map_the_memory_of_one) {
    int fd;
    void *at = create(&fd);
    CHECK_EQ_INT(end_of(start(write_seven, &fd)), 0);
    CHECK_EQ_INT(first_byte(at, stream()), 7);
    CHECK(cuMemAddressFree((CUdeviceptr)(uintptr_t)at, GRAIN)); /* still mapped */
    unmap(at);
}

/* Sends what it has created, and is killed. */
static void create_and_die(void *argument) {
    int fd;
    cudaStream_t s = stream();
    void *at = create(&fd);
    cudaMemsetAsync(at, 5, SOME, s);
    cudaStreamSynchronize(s);
    gradd_fd_send(*(int *)argument, "x", 1, &fd, 1);
    raise(SIGKILL);
}

TEST(memory_outlives_the_process_that_created_it) {
    int pair[2], fd = -1;
    char byte[1];
    gradd_fd_packet_t packet = {.data = byte, .capacity = 1, .fds = &fd, .max_fds = 1};
    gradd_fd_event_t event;
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
    CHECK_EQ_INT(end_of(start(create_and_die, &pair[1])), SIGKILL);
    CHECK_OK(gradd_fd_recv(pair[0], &packet, &event));
    CHECK_EQ_INT(packet.n_fds, 1);
    CHECK_EQ_INT(first_byte(import(fd), stream()), 5);
}

/* ---- handles --------------------------------------------------------------------------------- */

typedef struct sim_offer_s {
    cudaIpcMemHandle_t handle;
    cudaIpcEventHandle_t event;
    int ready[2];   /* a pipe: the child has opened it */
    int offered[2]; /* a pipe: the rest of this, for a child that was started before */
    bool waits;
} sim_offer_t;

static void open_and_write(void *argument) {
    const sim_offer_t *offer = argument;
    void *at, *again;
    cudaStream_t s = stream();
    if (cudaIpcOpenMemHandle(&at, offer->handle, cudaIpcMemLazyEnablePeerAccess)) _exit(1);
    if (cudaIpcOpenMemHandle(&again, offer->handle, cudaIpcMemLazyEnablePeerAccess)) _exit(2);
    if (at != again) _exit(3);
    cudaMemsetAsync(at, 9, SOME, s);
    cudaStreamSynchronize(s);
    if (cudaIpcCloseMemHandle(at) || cudaIpcCloseMemHandle(at)) _exit(4);
    if (!cudaIpcCloseMemHandle(at)) _exit(5);
}

static void *offer_memory(sim_offer_t *offer) {
    void *memory;
    CHECK(!cudaMalloc(&memory, SOME));
    CHECK(!cudaIpcGetMemHandle(&offer->handle, (char *)memory + 8)); /* of the whole block */
    return memory;
}

TEST(a_handle_is_opened_once_and_counted) {
    sim_offer_t offer;
    void *memory = offer_memory(&offer), *mine;
    CHECK_EQ_INT(end_of(start(open_and_write, &offer)), 0);
    CHECK_EQ_INT(first_byte(memory, stream()), 9);
    CHECK_EQ_INT(cudaIpcOpenMemHandle(&mine, offer.handle, cudaIpcMemLazyEnablePeerAccess),
                 cudaErrorDeviceUninitialized);
    CHECK(!cudaFree(memory));
}

TEST(some_memory_has_no_handle) {
    int fd;
    void *pooled;
    cudaIpcMemHandle_t handle;
    cudaStream_t s = stream();
    CHECK_EQ_INT(cudaIpcGetMemHandle(&handle, create(&fd)), cudaErrorInvalidValue);
    CHECK(!cudaMallocAsync(&pooled, SOME, s));
    CHECK_EQ_INT(cudaIpcGetMemHandle(&handle, pooled), cudaErrorInvalidValue);
}

static void open_and_stay(void *argument) {
    const sim_offer_t *offer = argument;
    void *at;
    if (cudaIpcOpenMemHandle(&at, offer->handle, cudaIpcMemLazyEnablePeerAccess)) _exit(1);
    if (write(offer->ready[1], "x", 1) != 1) _exit(2);
    pause();
}

static void free_memory(void *memory) {
    cudaFree(memory);
}

static pid_t start_staying(sim_offer_t *offer) {
    char byte;
    CHECK(!pipe(offer->ready));
    const pid_t child = start(open_and_stay, offer);
    CHECK_EQ_INT(read(offer->ready[0], &byte, 1), 1);
    return child;
}

TEST(memory_that_is_open_elsewhere_must_not_be_freed) {
    sim_offer_t offer;
    void *memory = offer_memory(&offer);
    const pid_t other = start_staying(&offer);
    CHECK_EQ_INT(end_of(start(free_memory, memory)), SIGABRT);
    kill(other, SIGKILL);
    CHECK_EQ_INT(end_of(other), SIGKILL);
    CHECK(!cudaFree(memory)); /* the process that had it open is gone */
}

/* ---- events ---------------------------------------------------------------------------------- */

static void read_behind_an_event(void *argument) {
    sim_offer_t *offer = argument;
    if (read(offer->offered[0], offer, sizeof *offer) != sizeof *offer) _exit(100);
    cudaStream_t s = stream();
    cudaEvent_t event;
    void *at;
    unsigned char byte = 0;
    sim_settings()->pause_us = 1;
    if (cudaIpcOpenMemHandle(&at, offer->handle, cudaIpcMemLazyEnablePeerAccess)) _exit(101);
    if (cudaIpcOpenEventHandle(&event, offer->event)) _exit(102);
    if (offer->waits && cudaStreamWaitEvent(s, event, 0)) _exit(103);
    cudaMemcpyAsync(&byte, at, 1, cudaMemcpyDefault, s);
    cudaStreamSynchronize(s);
    _exit(byte);
}

/* What the child reads while a stream here still has to write. */
static int read_elsewhere(bool waits) {
    sim_offer_t offer = {.waits = waits};
    CHECK(!pipe(offer.offered));
    const pid_t child = start(read_behind_an_event, &offer);
    cudaStream_t s = stream();
    cudaEvent_t event;
    void *memory = offer_memory(&offer);
    CHECK(!cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess));
    CHECK(!cudaIpcGetEventHandle(&offer.event, event));
    CHECK(!cudaMemsetAsync(memory, 1, SOME, s));
    CHECK(!cudaStreamSynchronize(s));
    sim_settings()->pause_us = 400000;
    CHECK(!cudaMemsetAsync(memory, 2, SOME, s));
    CHECK(!cudaEventRecord(event, s));
    CHECK_EQ_INT(write(offer.offered[1], &offer, sizeof offer), sizeof offer);
    const int byte = end_of(child);
    CHECK(!cudaStreamDestroy(s));
    sim_settings()->pause_us = 0;
    return byte;
}

TEST(streams_of_two_processes_are_ordered_by_events_alone) {
    CHECK_EQ_INT(read_elsewhere(true), 2);
    CHECK_EQ_INT(read_elsewhere(false), 1);
}

static void hang(void *unused) {
    (void)unused;
    pause();
}

static void record_and_die(void *argument) {
    cudaStream_t s = stream();
    sim_give(s, hang, NULL);
    cudaEventRecord(*(cudaEvent_t *)argument, s);
    raise(SIGKILL);
}

TEST(an_event_of_a_process_that_has_ended_is_over) {
    cudaEvent_t event;
    cudaStream_t s = stream();
    CHECK(!cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess));
    CHECK_EQ_INT(end_of(start(record_and_die, &event)), SIGKILL);
    CHECK(!cudaStreamWaitEvent(s, event, 0));
    CHECK(!cudaStreamSynchronize(s));
    CHECK(!cudaEventSynchronize(event));
}
