/* The rules of the stand-in for CUDA (tests/sim): what it finds in code that breaks them. */
#include "tests/sim/sim.h"

#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/test.h"

enum { BYTES = 8192 };

static cudaStream_t stream(void) {
    cudaStream_t made;
    CHECK(!cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return made;
}

static unsigned char *taken(cudaStream_t s) {
    void *memory;
    CHECK(!cudaMallocAsync(&memory, BYTES, s));
    return memory;
}

/* How a child ends that does this: a signal, or 0. */
static int end_of(void (*what)(void)) {
    int status;
    const pid_t child = fork();
    if (!child) {
        signal(SIGSEGV, SIG_DFL);
        what();
        _exit(0);
    }
    CHECK_EQ_INT(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void read_on_host(void) {
    cudaStream_t s = stream();
    volatile unsigned char *memory = taken(s);
    cudaMemsetAsync((void *)memory, 1, BYTES, s);
    cudaStreamSynchronize(s);
    (void)memory[5];
}

static void read_mapped_pages(void) {
    volatile char *pages =
        mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cudaHostRegister((void *)pages, BYTES, cudaHostRegisterMapped);
    (void)pages[5];
}

static void use_after_free(void) {
    cudaStream_t s = stream();
    unsigned char *memory = taken(s), mine[8];
    cudaFreeAsync(memory, s);
    cudaMemcpyAsync(mine, memory, sizeof mine, cudaMemcpyDefault, s);
    cudaStreamSynchronize(s);
}

static void read_behind_the_end(void) {
    cudaStream_t s = stream();
    unsigned char *memory = taken(s), mine[8];
    cudaMemcpyAsync(mine, memory + BYTES, sizeof mine, cudaMemcpyDefault, s);
    cudaStreamSynchronize(s);
}

static void free_twice(void) {
    cudaStream_t s = stream();
    unsigned char *memory = taken(s);
    cudaFreeAsync(memory, s);
    cudaFreeAsync(memory, s);
    cudaStreamSynchronize(s);
}

static void unregister(void) {
    char *pages = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cudaHostRegister(pages, BYTES, cudaHostRegisterMapped);
    cudaHostUnregister(pages);
    pages[5] = 1;
}

TEST(memory_of_the_device_is_closed_to_the_host) {
    CHECK_EQ_INT(end_of(read_on_host), SIGSEGV);
    CHECK_EQ_INT(end_of(read_mapped_pages), SIGSEGV);
    CHECK_EQ_INT(end_of(use_after_free), SIGSEGV);
    CHECK_EQ_INT(end_of(read_behind_the_end), SIGSEGV);
    CHECK_EQ_INT(end_of(free_twice), SIGABRT);
    CHECK_EQ_INT(end_of(unregister), 0);
}

/* A host that does not wait has the old bytes. Those of the process are taken at once. */
TEST(work_begins_late_and_keeps_its_order) {
    cudaStream_t s = stream();
    unsigned char *memory = taken(s), from[8] = {3, 3, 3, 3, 3, 3, 3, 3}, to[8] = {0}, later[8];
    CHECK(!cudaMemcpyAsync(to, memory, sizeof to, cudaMemcpyDefault, s));
    CHECK(!cudaMemcpyAsync(memory, from, sizeof from, cudaMemcpyDefault, s));
    CHECK(!cudaMemcpyAsync(later, memory, sizeof later, cudaMemcpyDefault, s));
    memset(from, 9, sizeof from);
    CHECK_EQ_INT(to[0], 0);
    CHECK_EQ_INT(sim_pending(), 3);
    CHECK(!cudaStreamSynchronize(s));
    CHECK_EQ_INT(to[0], 0xff); /* what new memory holds */
    CHECK_EQ_INT(later[7], 3);
    CHECK(!cudaFreeAsync(memory, s));
    CHECK(!cudaStreamDestroy(s));
    CHECK_EQ_INT(sim_bytes(), 0);
}

static void kernel(void *ran) {
    if (!sim_kernel_fails()) (*(int *)ran)++;
}

TEST(a_kernel_that_fails_takes_the_device_with_it) {
    cudaStream_t s = stream();
    int ran = 0;
    void *memory;
    sim_fail("kernel", 2);
    for (int i = 0; i < 4; i++)
        sim_give(s, kernel, &ran);
    CHECK_EQ_INT(cudaStreamSynchronize(s), cudaErrorLaunchFailure);
    CHECK_EQ_INT(ran, 1);
    CHECK_EQ_INT(cudaMalloc(&memory, 8), cudaErrorLaunchFailure);
    CHECK_EQ_INT(cudaGetLastError(), cudaErrorLaunchFailure);
    CHECK_EQ_INT(cudaGetLastError(), cudaErrorLaunchFailure);
}

/* A call that fails leaves its error for the thread's next question, as CUDA does. */
TEST(the_last_error_stays_until_it_is_read) {
    void *memory;
    sim_fail("cudaMalloc", 1);
    CHECK_EQ_INT(cudaMalloc(&memory, 8), cudaErrorMemoryAllocation);
    CHECK(!cudaMalloc(&memory, 8));
    CHECK_EQ_INT(cudaGetLastError(), cudaErrorMemoryAllocation);
    CHECK_EQ_INT(cudaGetLastError(), cudaSuccess);
    CHECK(!cudaFree(memory));
    CHECK_EQ_INT(cudaFree(memory), cudaErrorInvalidValue);
}

TEST(events_know_when_they_were) {
    cudaStream_t s = stream();
    cudaEvent_t from, to;
    float ms = -1;
    int ran = 0;
    CHECK(!cudaEventCreate(&from) && !cudaEventCreate(&to));
    CHECK_EQ_INT(sim_events(), 2);
    CHECK(!cudaEventRecord(from, s));
    sim_give(s, kernel, &ran);
    CHECK(!cudaEventRecord(to, s));
    CHECK_EQ_INT(cudaEventElapsedTime(&ms, from, to), cudaErrorNotReady);
    CHECK(!cudaEventSynchronize(to));
    CHECK_EQ_INT(ran, 1);
    CHECK(!cudaEventElapsedTime(&ms, from, to));
    CHECK(ms >= 0);
    cudaEventDestroy(from), cudaEventDestroy(to);
    CHECK(!cudaStreamDestroy(s));
}
