/* Memory of the device that clients lend (shm/segment.h), on the CUDA plug-in's device over the
 * stand-in for CUDA. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "server/device/device.h"
#include "tests/sim/cuda.h"
#include "tests/sim/sim.h"
#include "tests/test.h"

enum { GRAIN = 2 << 20, SOME = 64 };

static const CUmemAllocationProp prop = {
    .type = CU_MEM_ALLOCATION_TYPE_PINNED,
    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}
};

/* As a client does: memory that the driver knows by a descriptor, and where this process has it. */
static void *create(int *out_fd) {
    const CUmemAccessDesc access = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    CHECK(!cuMemCreate(&handle, GRAIN, &prop, 0));
    CHECK(
        !cuMemExportToShareableHandle(out_fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    CHECK(!cuMemAddressReserve(&at, GRAIN, 0, 0, 0));
    CHECK(!cuMemMap(at, GRAIN, 0, handle, 0));
    CHECK(!cuMemSetAccess(at, GRAIN, &access, 1));
    CHECK(!cuMemRelease(handle));
    return (void *)(uintptr_t)at;
}

static gradd_device_t *open_emulated(void) {
    const gradd_device_options_t options = {.name = "emu"};
    gradd_device_t *device;
    CHECK_OK(gradd_device_open(&options, &device));
    return device;
}

static gradd_lent_t created(int fd, uint64_t bytes) {
    return (gradd_lent_t){GRADD_MEMORY_CUDA_VMM, fd, NULL, bytes};
}

TEST(created_memory_is_the_same_at_both_addresses) {
    int fd;
    char sent[SOME], got[SOME];
    void *mine = create(&fd);
    gradd_device_t *device = open_emulated();
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    const gradd_lent_t lent = created(fd, GRAIN);
    CHECK_OK(gradd_segment_borrow(&lent, device_mapper(device), &segment));
    CHECK(segment.base != mine);
    memset(sent, 7, sizeof sent);
    CHECK_OK(device_read(device, (char *)mine + 512, sent, sizeof sent));
    CHECK_OK(device_read(device, got, (char *)segment.base + 512, sizeof got));
    CHECK(!memcmp(sent, got, sizeof got));
    const size_t before = sim_bytes_mapped();
    gradd_segment_finish(&segment);
    CHECK_EQ_INT(before - sim_bytes_mapped(), GRAIN);
    gradd_device_close(device);
}

static void check_refused(gradd_device_t *device, const gradd_lent_t *lent, gradd_status_t code,
                          const char *what) {
    const size_t before = sim_bytes_mapped();
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    CHECK_STATUS(code, gradd_segment_borrow(lent, device_mapper(device), &segment));
    CHECK_ERROR_HAS(what);
    CHECK(!segment.base);
    CHECK_EQ_INT(sim_bytes_mapped(), before);
}

TEST(what_the_driver_does_not_take_is_refused) {
    int fd;
    create(&fd);
    gradd_device_t *device = open_emulated();
    gradd_lent_t lent = created(fd, 2 * GRAIN);
    check_refused(device, &lent, GRADD_E_SHM, "map memory of 4194304 bytes");
    lent.bytes = 5;
    check_refused(device, &lent, GRADD_E_SHM, "map memory of 5 bytes");
    lent.bytes = 0;
    check_refused(device, &lent, GRADD_E_LIMIT, "0 bytes");
    lent = created(STDIN_FILENO, GRAIN);
    check_refused(device, &lent, GRADD_E_SHM, "map memory");
    lent.fd = 4000;
    check_refused(device, &lent, GRADD_E_SHM, "open a descriptor");
    gradd_device_close(device);
}

TEST(every_call_for_created_memory_may_fail) {
    static const char *const calls[] = {"cuMemImportFromShareableHandle", "cuMemAddressReserve",
                                        "cuMemMap", "cuMemSetAccess"};
    int fd;
    create(&fd);
    gradd_device_t *device = open_emulated();
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    const gradd_lent_t lent = created(fd, GRAIN);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        const size_t before = sim_bytes_mapped();
        sim_fail(calls[i], 1);
        CHECK(gradd_segment_borrow(&lent, device_mapper(device), &segment) != GRADD_OK);
        CHECK_EQ_INT(sim_left(), 0);
        CHECK_EQ_INT(sim_bytes_mapped(), before);
        CHECK_OK(gradd_segment_borrow(&lent, device_mapper(device), &segment));
        gradd_segment_finish(&segment);
    }
    gradd_device_close(device);
}

TEST(a_device_without_memory_of_its_own_says_so) {
    const gradd_device_options_t options = {.name = "cpu"};
    gradd_device_t *device;
    CHECK_OK(gradd_device_open(&options, &device));
    const gradd_lent_t lent = created(STDIN_FILENO, GRAIN);
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    CHECK_STATUS(GRADD_E_UNSUPPORTED, gradd_segment_borrow(&lent, device_mapper(device), &segment));
    CHECK_ERROR_HAS("a memfd");
    gradd_device_close(device);
}

/* ---- handles --------------------------------------------------------------------------------- */

/* Another process, which has memory of cudaMalloc full of nines. */
typedef struct exporter_s {
    pid_t pid;
    cudaIpcMemHandle_t handle;
    int end; /* Owned; closed: it shall end */
} exporter_t;

static void export_memory(int told, int end) {
    void *memory;
    char byte;
    cudaStream_t s;
    cudaIpcMemHandle_t handle;
    if (cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) || cudaMalloc(&memory, SOME)) _exit(1);
    if (cudaMemsetAsync(memory, 9, SOME, s) || cudaStreamSynchronize(s)) _exit(2);
    if (cudaIpcGetMemHandle(&handle, memory)) _exit(3);
    if (write(told, &handle, sizeof handle) != sizeof handle) _exit(4);
    if (read(end, &byte, 1)) _exit(5);
    _exit(cudaFree(memory) ? 6 : 0);
}

static exporter_t start_exporter(void) {
    int told[2], end[2];
    exporter_t e;
    CHECK(!pipe(told) && !pipe(end));
    e.pid = fork();
    if (!e.pid) {
        close(end[1]);
        export_memory(told[1], end[0]);
    }
    CHECK_EQ_INT(read(told[0], &e.handle, sizeof e.handle), sizeof e.handle);
    close(told[0]), close(told[1]), close(end[0]);
    e.end = end[1];
    return e;
}

/* It frees its memory: by then nothing here may have it open. */
static void end_exporter(const exporter_t *e) {
    int status;
    close(e->end);
    CHECK_EQ_INT(waitpid(e->pid, &status, 0), e->pid);
    CHECK(WIFEXITED(status));
    CHECK_EQ_INT(WEXITSTATUS(status), 0);
}

TEST(a_handle_may_come_twice_and_is_closed_twice) {
    char got[SOME];
    const exporter_t e = start_exporter();
    gradd_device_t *device = open_emulated();
    gradd_segment_t one = GRADD_SEGMENT_INIT, two = GRADD_SEGMENT_INIT;
    const gradd_lent_t lent = {GRADD_MEMORY_CUDA_IPC, -1, &e.handle, SOME};
    CHECK_OK(gradd_segment_borrow(&lent, device_mapper(device), &one));
    CHECK_OK(gradd_segment_borrow(&lent, device_mapper(device), &two));
    CHECK(one.base == two.base);
    gradd_segment_finish(&one);
    CHECK_OK(device_read(device, got, two.base, sizeof got));
    CHECK_EQ_INT(got[SOME - 1], 9);
    gradd_segment_finish(&two);
    gradd_device_close(device);
    end_exporter(&e);
}

TEST(a_handle_that_claims_too_much_is_closed_again) {
    const exporter_t e = start_exporter();
    gradd_device_t *device = open_emulated();
    gradd_lent_t lent = {GRADD_MEMORY_CUDA_IPC, -1, &e.handle, GRAIN};
    check_refused(device, &lent, GRADD_E_SHM, "the message said 2097152");
    lent.bytes = SOME;
    sim_fail("cuMemGetAddressRange_v2", 1);
    check_refused(device, &lent, GRADD_E_SHM, "measure memory");
    sim_fail("cudaIpcOpenMemHandle", 1);
    check_refused(device, &lent, GRADD_E_SHM, "open a handle");
    gradd_device_close(device);
    end_exporter(&e);
}

TEST(a_handle_of_the_process_itself_is_refused) {
    void *memory;
    cudaIpcMemHandle_t handle;
    CHECK(!cudaMalloc(&memory, SOME));
    CHECK(!cudaIpcGetMemHandle(&handle, memory));
    gradd_device_t *device = open_emulated();
    gradd_lent_t lent = {GRADD_MEMORY_CUDA_IPC, -1, &handle, SOME};
    check_refused(device, &lent, GRADD_E_SHM, "cudaErrorDeviceUninitialized");
    memset(&handle, 'x', sizeof handle);
    check_refused(device, &lent, GRADD_E_SHM, "cudaErrorInvalidValue");
    gradd_device_close(device);
}
