/* Memory that is created apart from its addresses, and shared by descriptors. See sim.h. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/sim/cuda.h"
#include "tests/sim/internal.h"

enum { GRAIN = 2 << 20 };

typedef struct sim_physical_s {
    int fd;
    size_t bytes;
} sim_physical_t;

static sim_physical_t *physical(CUmemGenericAllocationHandle handle) {
    return (sim_physical_t *)(uintptr_t)handle;
}

static CUresult hand_out(int fd, size_t bytes, CUmemGenericAllocationHandle *out) {
    sim_physical_t *p = malloc(sizeof *p);
    if (fd < 0 || !p) return CUDA_ERROR_OUT_OF_MEMORY;
    *p = (sim_physical_t){fd, bytes};
    *out = (CUmemGenericAllocationHandle)(uintptr_t)p;
    return CUDA_SUCCESS;
}

#define DRIVER_CALL(error)                                                                         \
    do {                                                                                           \
        if (sim_refuses(__func__)) return CUDA_ERROR_NOT_SUPPORTED;                                \
        if (sim_hits(__func__)) return error;                                                      \
    } while (0)

CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop, int option) {
    (void)prop, (void)option;
    *out = GRAIN;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes,
                     const CUmemAllocationProp *prop, unsigned long long flags) {
    DRIVER_CALL(CUDA_ERROR_OUT_OF_MEMORY);
    if (flags || !bytes || bytes % GRAIN || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        prop->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    const int device = sim_device_number(prop->location.id);
    if (device < 0) return CUDA_ERROR_INVALID_DEVICE;
    if (sim_bytes_of(device) + bytes > sim_memory_limit()) return CUDA_ERROR_OUT_OF_MEMORY;
    return hand_out(sim_file("gradd-sim", bytes), bytes, out);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    close(physical(handle)->fd);
    free(physical(handle));
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags) {
    DRIVER_CALL(CUDA_ERROR_NOT_SUPPORTED);
    if (flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    *(int *)out = fcntl(physical(handle)->fd, F_DUPFD_CLOEXEC, 0);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *shared, int type) {
    struct stat st;
    const int fd = (int)(intptr_t)shared;
    DRIVER_CALL(CUDA_ERROR_INVALID_HANDLE);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fstat(fd, &st) || st.st_size % GRAIN)
        return CUDA_ERROR_INVALID_VALUE;
    return hand_out(fcntl(fd, F_DUPFD_CLOEXEC, 0), (size_t)st.st_size, out);
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t align, CUdeviceptr wanted,
                             unsigned long long flags) {
    DRIVER_CALL(CUDA_ERROR_OUT_OF_MEMORY);
    if (flags || align || wanted || !bytes || bytes % GRAIN) return CUDA_ERROR_INVALID_VALUE;
    void *at = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *out = (CUdeviceptr)(uintptr_t)at;
    return at == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
    if (sim_memory_find((void *)(uintptr_t)at, NULL)) return CUDA_ERROR_INVALID_VALUE;
    munmap((void *)(uintptr_t)at, bytes);
    return CUDA_SUCCESS;
}

/* Not to be touched before cuMemSetAccess. */
CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    void *there = (void *)(uintptr_t)at;
    DRIVER_CALL(CUDA_ERROR_OUT_OF_MEMORY);
    if (flags || offset || bytes != physical(handle)->bytes) return CUDA_ERROR_INVALID_VALUE;
    if (mmap(there, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical(handle)->fd, 0) ==
        MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t n) {
    char *there = (char *)(uintptr_t)at;
    DRIVER_CALL(CUDA_ERROR_INVALID_VALUE);
    const int device = sim_device_number(access->location.id);
    if (n != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE || device < 0)
        return CUDA_ERROR_INVALID_VALUE;
    return sim_memory_add(&(sim_block_t){there, bytes, bytes, SIM_MAPPED, -1, device})
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

/* Also of memory to which access was not given. */
CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
    void *there = (void *)(uintptr_t)at;
    sim_block_t b;
    sim_wait_all();
    if (sim_memory_remove(there, SIM_MAPPED, &b) && b.bytes != bytes)
        return CUDA_ERROR_INVALID_VALUE;
    mmap(there, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *out_base, size_t *out_bytes, CUdeviceptr at) {
    sim_block_t b;
    DRIVER_CALL(CUDA_ERROR_NOT_FOUND);
    if (!sim_memory_find((void *)(uintptr_t)at, &b)) return CUDA_ERROR_NOT_FOUND;
    *out_base = (CUdeviceptr)(uintptr_t)b.at;
    *out_bytes = b.bytes;
    return CUDA_SUCCESS;
}
