/* Calls of the driver that are those of the runtime by another name: errors have the same numbers.
 * See sim.h. */
#include <stdint.h>
#include <string.h>

#include "tests/sim/cuda.h"
#include "tests/sim/internal.h"

#define SAME(name, call, ...)                                                                      \
    CUresult name(__VA_ARGS__) {                                                                   \
        return (CUresult)(call);                                                                   \
    }

CUresult cuInit(unsigned flags) {
    int n;
    return flags ? CUDA_ERROR_INVALID_VALUE : (CUresult)cudaGetDeviceCount(&n);
}

CUresult cuGetErrorName(CUresult error, const char **out) {
    *out = cudaGetErrorName((cudaError_t)error);
    return CUDA_SUCCESS;
}

SAME(cuDeviceGetCount, cudaGetDeviceCount(out), int *out)
SAME(cuMemGetInfo_v2, cudaMemGetInfo(out_free, out_total), size_t *out_free, size_t *out_total)
SAME(cuMemHostRegister_v2, cudaHostRegister(at, bytes, flags), void *at, size_t bytes,
     unsigned flags)
SAME(cuMemHostUnregister, cudaHostUnregister(at), void *at)
SAME(cuMemHostGetDevicePointer_v2, cudaHostGetDevicePointer((void **)out, at, flags),
     CUdeviceptr *out, void *at, unsigned flags)
SAME(cuMemsetD8Async, cudaMemsetAsync((void *)at, value, bytes, stream), CUdeviceptr at,
     unsigned char value, size_t bytes, CUstream stream)
SAME(cuStreamCreate, cudaStreamCreateWithFlags(out, flags), CUstream *out, unsigned flags)
SAME(cuStreamDestroy_v2, cudaStreamDestroy(stream), CUstream stream)
SAME(cuMemAlloc_v2, cudaMalloc((void **)out, bytes), CUdeviceptr *out, size_t bytes)
SAME(cuMemFree_v2, cudaFree((void *)at), CUdeviceptr at)
SAME(cuMemcpyAsync, cudaMemcpyAsync((void *)to, (void *)from, bytes, cudaMemcpyDefault, stream),
     CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
SAME(cuCtxSynchronize, cudaDeviceSynchronize(), void)
SAME(cuStreamSynchronize, cudaStreamSynchronize(stream), CUstream stream)
SAME(cuStreamWaitEvent, cudaStreamWaitEvent(stream, event, flags), CUstream stream, CUevent event,
     unsigned flags)
SAME(cuEventCreate, cudaEventCreateWithFlags(out, flags), CUevent *out, unsigned flags)
SAME(cuEventRecord, cudaEventRecord(event, stream), CUevent event, CUstream stream)
SAME(cuEventSynchronize, cudaEventSynchronize(event), CUevent event)
SAME(cuEventDestroy_v2, cudaEventDestroy(event), CUevent event)
SAME(cuIpcGetMemHandle, cudaIpcGetMemHandle(out, (void *)at), cudaIpcMemHandle_t *out,
     CUdeviceptr at)
SAME(cuIpcGetEventHandle, cudaIpcGetEventHandle(out, event), cudaIpcEventHandle_t *out,
     CUevent event)
SAME(cuIpcOpenEventHandle, cudaIpcOpenEventHandle(out, handle), CUevent *out,
     cudaIpcEventHandle_t handle)

CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device) {
    cudaDeviceProp found;
    const cudaError_t error = cudaGetDeviceProperties(&found, device);
    if (!error) memcpy(out, &found.uuid, sizeof *out);
    return (CUresult)error;
}

/* ---- contexts: of each device its own ----------------------------------------------------------
 */

enum { MOST_PUSHED = 8 };
static _Thread_local int pushed[MOST_PUSHED], n_pushed; /* devices of before */

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    cudaDeviceProp found;
    const cudaError_t error = cudaGetDeviceProperties(&found, device);
    *out = (CUcontext)(intptr_t)(device + 1);
    return (CUresult)error;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (!context || n_pushed == MOST_PUSHED) return CUDA_ERROR_INVALID_VALUE;
    cudaGetDevice(&pushed[n_pushed]);
    const cudaError_t error = cudaSetDevice((int)(intptr_t)context - 1);
    if (!error) n_pushed++;
    return (CUresult)error;
}

CUresult cuCtxPopCurrent_v2(CUcontext *out) {
    if (!n_pushed) return CUDA_ERROR_INVALID_VALUE;
    int device;
    cudaGetDevice(&device);
    *out = (CUcontext)(intptr_t)(device + 1);
    return (CUresult)cudaSetDevice(pushed[--n_pushed]);
}

/* ---- functions by name ----------------------------------------------------------------------- */

#define NAMED(name) {#name, (void (*)(void))name}
static const struct {
    const char *name;
    void (*function)(void);
} functions[] = {
    NAMED(cuMemImportFromShareableHandle),
    NAMED(cuMemRelease),
    NAMED(cuMemAddressReserve),
    NAMED(cuMemAddressFree),
    NAMED(cuMemMap),
    NAMED(cuMemUnmap),
    NAMED(cuMemSetAccess),
    {"cuMemGetAddressRange", (void (*)(void))cuMemGetAddressRange_v2},
};

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult *out_found) {
    (void)version, (void)flags;
    SIM_CALL(cudaErrorInvalidValue);
    *out_found = cudaDriverEntryPointSymbolNotFound;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (strcmp(symbol, functions[i].name)) continue;
        memcpy(out, &functions[i].function, sizeof *out);
        *out_found = cudaDriverEntryPointSuccess;
    }
    return cudaSuccess;
}
