/* Devices of the stand-in for CUDA (tests/sim): which the process sees, their memory, and counts.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/sim/cuda.h"
#include "tests/sim/sim.h"
#include "tests/test.h"

#define MIB ((size_t)1 << 20)

static int last_byte_of_uuid(int device) {
    CUuuid uuid;
    cudaDeviceProp found;
    CHECK(!cuDeviceGetUuid_v2(&uuid, device));
    CHECK(!cudaGetDeviceProperties(&found, device));
    CHECK_EQ_INT(uuid.bytes[15], found.uuid.bytes[15]);
    return uuid.bytes[15];
}

static void check_seen(int devices, int first) {
    int n = -1;
    CHECK_EQ_INT(cuDeviceGetCount(&n), devices ? 0 : CUDA_ERROR_NO_DEVICE);
    CHECK_EQ_INT(n, devices);
    if (devices) CHECK_EQ_INT(last_byte_of_uuid(0), first);
    CHECK_EQ_INT(cudaSetDevice(devices), cudaErrorInvalidDevice);
}

TEST(there_are_two_devices) {
    check_seen(2, 0);
    CHECK_EQ_INT(last_byte_of_uuid(1), 1);
}

TEST(a_number_chooses_a_device) {
    sim_see("1,0");
    check_seen(2, 1);
}

TEST(a_uuid_chooses_a_device) {
    sim_see("GPU-5e5e5e5e-5e5e-5e5e-5e5e-5e5e5e5e5e01");
    check_seen(1, 1);
}

TEST(an_unknown_device_hides_those_behind_it) {
    sim_see("7,0");
    check_seen(0, 0);
}

static void check_free(int device, size_t mib) {
    size_t left, total;
    CHECK(!cudaSetDevice(device));
    CHECK(!cuMemGetInfo_v2(&left, &total));
    CHECK_EQ_INT(left / MIB, mib);
    CHECK_EQ_INT(total / MIB, 8);
}

TEST(memory_is_that_of_its_device) {
    void *six, *more;
    setenv("GRADD_SIM_MEMORY_MB", "8", 1);
    CHECK(!cudaSetDevice(1));
    CHECK(!cudaMalloc(&six, 6 * MIB));
    CHECK_EQ_INT(cudaMalloc(&more, 3 * MIB), cudaErrorMemoryAllocation);
    check_free(1, 2);
    check_free(0, 8);
    CHECK(!cudaMalloc(&more, 3 * MIB));
    check_free(0, 5);
    CHECK(!cudaFree(six));
    check_free(1, 8);
}

TEST(created_memory_counts_where_it_is_mapped) {
    const CUmemAllocationProp prop = {
        CU_MEM_ALLOCATION_TYPE_PINNED,
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        {CU_MEM_LOCATION_TYPE_DEVICE, 1},
        NULL,
        {0}
    };
    const CUmemAccessDesc access = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    setenv("GRADD_SIM_MEMORY_MB", "8", 1);
    CHECK(!cuMemCreate(&handle, 4 * MIB, &prop, 0));
    CHECK(!cuMemAddressReserve(&at, 4 * MIB, 0, 0, 0));
    CHECK(!cuMemMap(at, 4 * MIB, 0, handle, 0));
    CHECK(!cuMemSetAccess(at, 4 * MIB, &access, 1));
    check_free(1, 4);
    check_free(0, 8);
    CHECK_EQ_INT(cuMemCreate(&handle, 6 * MIB, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(!cuMemUnmap(at, 4 * MIB));
    check_free(1, 8);
}

/* ---- counts ---------------------------------------------------------------------------------- */

static void kernel(void *ran) {
    if (!sim_kernel_fails()) (*(int *)ran)++;
}

TEST(waits_copies_and_kernels_are_counted) {
    char folder[] = "/tmp/gradd-sim-XXXXXX", path[64];
    uint64_t counts[4];
    cudaStream_t s;
    void *memory;
    int bytes[2], ran = 0;
    CHECK(mkdtemp(folder));
    setenv("GRADD_SIM_COUNTS", folder, 1);
    CHECK(!cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    CHECK(!cudaMalloc(&memory, sizeof bytes));
    CHECK(!cudaMemcpyAsync(memory, bytes, sizeof bytes, cudaMemcpyDefault, s));
    CHECK(!cudaMemcpyAsync(bytes, memory, sizeof bytes, cudaMemcpyDefault, s));
    sim_give(s, kernel, &ran);
    CHECK(!cuStreamSynchronize(s));
    sim_count(false);
    CHECK(!cudaStreamSynchronize(s));
    sim_count(true);
    snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK_EQ_INT(read(fd, counts, sizeof counts), sizeof counts);
    CHECK_EQ_INT(counts[0], 1);
    CHECK_EQ_INT(counts[1], 1);
    CHECK_EQ_INT(counts[2], sizeof bytes);
    CHECK_EQ_INT(counts[3], 1);
    close(fd), unlink(path), rmdir(folder);
}
