/* Memory of clients. See memory.h.
 *
 * Pages of the host are registered with the driver, so kernels read and write them over the bus.
 * Memory of the device that a client has made with cuMemCreate comes as a descriptor and outlives
 * the client; that of cudaMalloc comes as a handle, which the driver opens once and counts.
 *
 * Failures are returned, and never stay in the thread's last error, where the next call would find
 * them.
 */
#include "kernels/cuda/plugin/memory.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

/* ---- pages of the host ---- */

gradd_status_t gpu_map(gradd_queue_t *, int fd, size_t bytes, void **out) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), *there;
    if (memory == MAP_FAILED) return GRADD_FAIL(SHM, "cannot map %zu bytes", bytes);
    cudaError_t error = cudaHostRegister(memory, bytes, cudaHostRegisterMapped);
    if (!error) {
        error = cudaHostGetDevicePointer(&there, memory, 0);
        if (!error && there == memory) {
            *out = memory;
            return GRADD_OK;
        }
        cudaHostUnregister(memory);
    }
    munmap(memory, bytes);
    cudaGetLastError();
    if (error == cudaErrorMemoryAllocation)
        return GRADD_FAIL(NOMEM, "the GPU cannot map %zu bytes: no memory for it", bytes);
    if (error)
        return GRADD_FAIL(SHM, "the GPU cannot map %zu bytes: %s", bytes,
                          cudaGetErrorString(error));
    return GRADD_FAIL(UNSUPPORTED, "this GPU has addresses of its own");
}

void gpu_unmap(gradd_queue_t *, void *memory, size_t bytes) {
    cudaHostUnregister(memory);
    munmap(memory, bytes);
}

/* ---- the driver's functions ---- */

typedef struct driver_s {
    decltype(&cuMemImportFromShareableHandle) import;
    decltype(&cuMemRelease) release;
    decltype(&cuMemAddressReserve) reserve;
    decltype(&cuMemAddressFree) give_addresses;
    decltype(&cuMemMap) map;
    decltype(&cuMemUnmap) unmap;
    decltype(&cuMemSetAccess) set_access;
    decltype(&cuMemGetAddressRange) range;
} driver_t;

enum { DRIVER_VERSION = 12000 };

static bool find(const char *name, void *out) {
    cudaDriverEntryPointQueryResult found;
    return !cudaGetDriverEntryPointByVersion(name, (void **)out, DRIVER_VERSION, cudaEnableDefault,
                                             &found) &&
           found == cudaDriverEntryPointSuccess;
}

static bool find_all(driver_t *d) {
    return find("cuMemImportFromShareableHandle", &d->import) &&
           find("cuMemRelease", &d->release) && find("cuMemAddressReserve", &d->reserve) &&
           find("cuMemAddressFree", &d->give_addresses) && find("cuMemMap", &d->map) &&
           find("cuMemUnmap", &d->unmap) && find("cuMemSetAccess", &d->set_access) &&
           find("cuMemGetAddressRange", &d->range);
}

static driver_t functions;
static bool whole;

void gpu_find_driver(void) {
    whole = find_all(&functions);
    cudaGetLastError();
}

static gradd_status_t driver(const driver_t **out) {
    if (!whole) return GRADD_FAIL(UNSUPPORTED, "the GPU's driver cannot share memory");
    *out = &functions;
    return GRADD_OK;
}

/* ---- memory of the device ---- */

static gradd_status_t refused(const char *what, const gradd_lent_t *lent, int error) {
    cudaGetLastError();
    if (error == cudaErrorMemoryAllocation)
        return GRADD_FAIL(NOMEM, "the GPU cannot %s of %llu bytes: no memory for it", what,
                          (unsigned long long)lent->bytes);
    return GRADD_FAIL(SHM, "the GPU's driver refuses to %s of %llu bytes: %s (%d)", what,
                      (unsigned long long)lent->bytes, cudaGetErrorName((cudaError_t)error), error);
}

static int map_handle(const driver_t *d, CUmemGenericAllocationHandle handle, CUdeviceptr at,
                      size_t bytes) {
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    int error = d->map(at, bytes, 0, handle, 0);
    if (error) return error;
    error = d->set_access(at, bytes, &access, 1);
    if (error) d->unmap(at, bytes);
    return error;
}

/* The handle goes in any case: the mapping keeps the memory. */
static gradd_status_t open_created(const driver_t *d, const gradd_lent_t *lent, void **out) {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at = 0;
    int error =
        d->import(&handle, (void *)(intptr_t)lent->fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (error) return refused("open a descriptor", lent, error);
    error = d->reserve(&at, lent->bytes, 0, 0, 0);
    if (!error) {
        error = map_handle(d, handle, at, lent->bytes);
        if (error) d->give_addresses(at, lent->bytes);
    }
    d->release(handle);
    if (error) return refused("map memory", lent, error);
    *out = (void *)at;
    return GRADD_OK;
}

/* The client frees the memory next: it must not stay open because of one failure. What fails twice
 * is a lost device's, which the next request reports. */
static void close_handle(void *at) {
    if (cudaIpcCloseMemHandle(at)) cudaIpcCloseMemHandle(at);
}

static gradd_status_t open_handle(const driver_t *d, const gradd_lent_t *lent, void **out) {
    cudaIpcMemHandle_t handle;
    CUdeviceptr base = 0;
    size_t real = 0;
    void *at;
    memcpy(&handle, lent->handle, sizeof handle);
    const cudaError_t error = cudaIpcOpenMemHandle(&at, handle, cudaIpcMemLazyEnablePeerAccess);
    if (error) return refused("open a handle", lent, error);
    const int asked = d->range(&base, &real, (CUdeviceptr)at);
    if (!asked && (void *)base == at && real >= lent->bytes) {
        *out = at;
        return GRADD_OK;
    }
    close_handle(at);
    if (asked) return refused("measure memory", lent, asked);
    return GRADD_FAIL(SHM, "the handle's memory has %zu bytes, the message said %llu", real,
                      (unsigned long long)lent->bytes);
}

gradd_status_t gpu_open(gradd_queue_t *, const gradd_lent_t *lent, void **out) {
    const driver_t *d;
    GRADD_TRY(driver(&d));
    return lent->memory == GRADD_MEMORY_CUDA_VMM ? open_created(d, lent, out)
                                                 : open_handle(d, lent, out);
}

void gpu_close(gradd_queue_t *, gradd_memory_t memory, void *at, size_t bytes) {
    const driver_t *d;
    if (memory == GRADD_MEMORY_CUDA_IPC) {
        close_handle(at);
    } else if (!driver(&d)) {
        d->unmap((CUdeviceptr)at, bytes);
        d->give_addresses((CUdeviceptr)at, bytes);
    }
    cudaGetLastError();
}
