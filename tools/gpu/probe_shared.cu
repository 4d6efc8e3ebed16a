/* Probes of two and three processes that share memory, events and words. See probe.cu. */
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/gpu/probe.h"

static void send_all(int to, const void *p, size_t n, int fd) {
    struct iovec part = {(void *)p, n};
    char room[CMSG_SPACE(sizeof(int))] = {0};
    struct msghdr m = {};
    m.msg_iov = &part;
    m.msg_iovlen = 1;
    if (fd >= 0) {
        m.msg_control = room;
        m.msg_controllen = sizeof room;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    CHECK(sendmsg(to, &m, 0) != (ssize_t)n);
}

static int take_all(int from, void *p, size_t n) {
    struct iovec part = {p, n};
    char room[CMSG_SPACE(sizeof(int))];
    struct msghdr m = {};
    int fd = -1;
    m.msg_iov = &part;
    m.msg_iovlen = 1;
    m.msg_control = room;
    m.msg_controllen = sizeof room;
    CHECK(recvmsg(from, &m, 0) != (ssize_t)n);
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    if (c) memcpy(&fd, CMSG_DATA(c), sizeof fd);
    return fd;
}

enum { BYTES = 64 << 20, ROUNDS = 200 };

/* Both sides of a pair, before either has touched CUDA. */
static int pair(int *out_peer) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends));
    const pid_t child = fork();
    CHECK(child < 0);
    if (!child) prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed parent leaves none behind */
    *out_peer = ends[child ? 0 : 1];
    close(ends[child ? 1 : 0]);
    return child;
}

static int finish_pair(int child) {
    int status = 0;
    if (!child) exit(0);
    waitpid(child, &status, 0);
    return status != 0;
}

typedef struct handles_s {
    cudaIpcMemHandle_t memory;
    cudaIpcEventHandle_t event;
} handles_t;

int probe_ipc(void) {
    int peer, word = 0;
    const int child = pair(&peer);
    void *memory;
    cudaEvent_t event;
    handles_t h;
    if (child) { /* the owner */
        CHECK(cudaMalloc(&memory, BYTES));
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess));
        CHECK(cudaIpcGetMemHandle(&h.memory, memory));
        CHECK(cudaIpcGetEventHandle(&h.event, event));
        fill<<<256, 256>>>((uint32_t *)memory, BYTES / 4, 7);
        CHECK(cudaEventRecord(event, 0));
        send_all(peer, &h, sizeof h, -1);
        take_all(peer, &word, sizeof word);
        expect(memory, BYTES, 11);
        const double began = now();
        for (int i = 0; i < ROUNDS; i++) {
            CHECK(cudaEventRecord(event, 0));
            send_all(peer, &word, sizeof word, -1);
            take_all(peer, &word, sizeof word);
        }
        printf("{\"probe\": \"ipc\", \"event_round_us\": %.1f}\n",
               1e6 * (now() - began) / (double)ROUNDS);
        return finish_pair(child);
    }
    take_all(peer, &h, sizeof h);
    CHECK(cudaIpcOpenMemHandle(&memory, h.memory, cudaIpcMemLazyEnablePeerAccess));
    CHECK(cudaIpcOpenEventHandle(&event, h.event));
    CHECK(cudaStreamWaitEvent(0, event, 0));
    expect(memory, BYTES, 7);
    fill<<<256, 256>>>((uint32_t *)memory, BYTES / 4, 11);
    CHECK(cudaDeviceSynchronize());
    send_all(peer, &word, sizeof word, -1);
    for (int i = 0; i < ROUNDS; i++) {
        take_all(peer, &word, sizeof word);
        CHECK(cudaStreamWaitEvent(0, event, 0));
        CHECK(cudaStreamSynchronize(0));
        send_all(peer, &word, sizeof word, -1);
    }
    CHECK(cudaIpcCloseMemHandle(memory));
    exit(0);
}

typedef CUresult (*create_t)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                             unsigned long long);
typedef CUresult (*export_t)(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                             unsigned long long);
typedef CUresult (*import_t)(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
typedef CUresult (*reserve_t)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
typedef CUresult (*map_t)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle,
                          unsigned long long);
typedef CUresult (*access_t)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);

static void *mapped(CUmemGenericAllocationHandle handle) {
    CUdeviceptr at;
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CHECK(((reserve_t)symbol("cuMemAddressReserve"))(&at, BYTES, 0, 0, 0));
    CHECK(((map_t)symbol("cuMemMap"))(at, BYTES, 0, handle, 0));
    CHECK(((access_t)symbol("cuMemSetAccess"))(at, BYTES, &access, 1));
    return (void *)at;
}

/* New memory of the device; *out_fd is its descriptor. */
static void *make_memory(int *out_fd) {
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp prop = {};
    CHECK(cudaFree(0));
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CHECK(((create_t)symbol("cuMemCreate"))(&handle, BYTES, &prop, 0));
    CHECK(((export_t)symbol("cuMemExportToShareableHandle"))(
        out_fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    return mapped(handle);
}

static void *open_memory(int fd) {
    CUmemGenericAllocationHandle handle;
    CHECK(cudaFree(0));
    CHECK(fd < 0);
    CHECK(((import_t)symbol("cuMemImportFromShareableHandle"))(
        &handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    return mapped(handle);
}

static void put(void *memory, uint32_t with) {
    fill<<<256, 256>>>((uint32_t *)memory, BYTES / 4, with);
    CHECK(cudaDeviceSynchronize());
}

/* The maker ends by SIGKILL, as a trainer may; the memory stays. */
static void make_and_wait(int peer) {
    int fd, word = 0;
    put(make_memory(&fd), 7);
    send_all(peer, &word, sizeof word, fd);
    pause();
}

/* Opens what comes, expects `before`, and writes `after`. */
static void open_and_write(int peer, uint32_t before, uint32_t after) {
    int word = 0;
    void *memory = open_memory(take_all(peer, &word, sizeof word));
    expect(memory, BYTES, before);
    put(memory, after);
    send_all(peer, &word, sizeof word, -1);
    exit(0);
}

int probe_vmm(void) {
    int peer, last, word = 0, status = 0;
    /* this process is the second one; the others begin before it has touched CUDA */
    const int maker = pair(&peer);
    if (!maker) make_and_wait(peer);
    const int third = pair(&last);
    if (!third) open_and_write(last, 11, 13);
    const int fd = take_all(peer, &word, sizeof word);
    void *memory = open_memory(fd);
    expect(memory, BYTES, 7);
    CHECK(kill(maker, SIGKILL));
    CHECK(waitpid(maker, &status, 0) != maker);
    expect(memory, BYTES, 7);
    put(memory, 11);
    send_all(last, &word, sizeof word, fd);
    take_all(last, &word, sizeof word);
    expect(memory, BYTES, 13);
    printf("{\"probe\": \"vmm\", \"bytes\": %d, \"outlives_its_maker\": true}\n", BYTES);
    return finish_pair(third);
}

/* ---- words ---- */

typedef CUresult (*give_t)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
enum { READY = 0, DONE = 16 }; /* positions, as in the client's page */

/* A page that both processes map, and the device's address of it. */
static CUdeviceptr registered(volatile uint64_t *page) {
    void *there;
    CHECK(cudaHostRegister((void *)page, 4096, cudaHostRegisterMapped));
    CHECK(cudaHostGetDevicePointer(&there, (void *)page, 0));
    return (CUdeviceptr)there;
}

static void poll_until(const volatile uint64_t *word, uint64_t value) {
    const double began = now();
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < value)
        CHECK(now() - began > 10);
}

/* The daemon's side: it polls `ready` for each turn, works in the shared memory, and raises `done`;
 * in the second half of the turns its stream does that. */
static void serve_turns(int peer, volatile uint64_t *page) {
    int word = 0;
    void *memory = open_memory(take_all(peer, &word, sizeof word));
    const CUdeviceptr at = registered(page);
    send_all(peer, &word, sizeof word, -1);
    for (uint64_t i = 1; i <= 2 * ROUNDS; i++) {
        poll_until(page + READY, i);
        fill<<<1, 256>>>((uint32_t *)memory, 256, (uint32_t)i);
        if (i > ROUNDS) {
            CHECK(((give_t)symbol("cuStreamWriteValue64"))(0, at + 8 * DONE, i, 0));
            continue;
        }
        CHECK(cudaStreamSynchronize(0));
        __atomic_store_n(page + DONE, i, __ATOMIC_RELEASE);
    }
    CHECK(cudaDeviceSynchronize());
    exit(0);
}

/* The client's side: nothing on the host waits; what the daemon has written is copied in turn. */
int probe_words(void) {
    int peer, fd, word = 0;
    const int shared = memfd_create("words", 0);
    uint32_t *copies;
    CHECK(ftruncate(shared, 4096));
    volatile uint64_t *page =
        (volatile uint64_t *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
    CHECK((void *)page == MAP_FAILED);
    const int child = pair(&peer);
    if (!child) serve_turns(peer, page);
    void *memory = make_memory(&fd);
    const CUdeviceptr at = registered(page);
    const give_t write = (give_t)symbol("cuStreamWriteValue64");
    const give_t wait = (give_t)symbol("cuStreamWaitValue64");
    CHECK(cudaMallocHost((void **)&copies, 2 * ROUNDS * sizeof *copies));
    put(memory, 0);
    send_all(peer, &word, sizeof word, fd);
    take_all(peer, &word, sizeof word);
    const double began = now();
    for (uint64_t i = 1; i <= 2 * ROUNDS; i++) {
        CHECK(write(0, at + 8 * READY, i, 0));
        CHECK(wait(0, at + 8 * DONE, i, CU_STREAM_WAIT_VALUE_GEQ));
        CHECK(cudaMemcpyAsync(copies + i - 1, memory, 4, cudaMemcpyDefault, 0));
    }
    const double given = now() - began;
    CHECK(cudaStreamSynchronize(0));
    const double took = now() - began;
    for (int i = 0; i < 2 * ROUNDS; i++)
        CHECK(copies[i] != (uint32_t)i + 1);
    printf("{\"probe\": \"words\", \"turn_us\": %.1f, \"host_us\": %.1f}\n",
           1e6 * took / (2 * ROUNDS), 1e6 * given / (2 * ROUNDS));
    return finish_pair(child);
}
