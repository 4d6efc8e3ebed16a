/* A stand-in for NVIDIA's header of that name: the calls of the driver that trainers make, and
 * those for memory apart from addresses, with the same names, meaning and numbers. sim.h describes
 * the device behind it. */
#ifndef GRADD_TESTS_SIM_CUDA_H
#define GRADD_TESTS_SIM_CUDA_H

#include <stdint.h>

#include "tests/sim/cuda_runtime.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cudaError_enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_SUPPORTED = 801,
} CUresult;
typedef int CUdevice;
typedef cudaUUID_t CUuuid;
typedef cudaStream_t CUstream;
typedef cudaEvent_t CUevent;
typedef unsigned long long CUdeviceptr, CUmemGenericAllocationHandle;
enum {
    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_STREAM_WAIT_VALUE_GEQ = 0,
};

typedef struct CUmemLocation_st {
    int type, id;
} CUmemLocation;
typedef struct CUmemAllocationProp_st {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} CUmemAllocationProp;
typedef struct CUmemAccessDesc_st {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

typedef struct CUctx_st *CUcontext;

CUresult cuInit(unsigned flags);
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device);
CUresult cuCtxPushCurrent_v2(CUcontext context);
CUresult cuCtxPopCurrent_v2(CUcontext *out);
CUresult cuGetErrorName(CUresult error, const char **out);
CUresult cuDeviceGetCount(int *out);
CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device);
CUresult cuMemGetInfo_v2(size_t *out_free, size_t *out_total);
CUresult cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags);
CUresult cuMemHostUnregister(void *at);
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *at, unsigned flags);
CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t bytes, CUstream stream);
CUresult cuStreamCreate(CUstream *out, unsigned flags);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr at, uint64_t value, unsigned flags);
CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr at, uint64_t value, unsigned flags);
CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr at);
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuCtxSynchronize(void);
CUresult cuCtxRecordEvent(CUcontext context, CUevent event);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
CUresult cuEventCreate(CUevent *out, unsigned flags);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventSynchronize(CUevent event);
CUresult cuEventDestroy_v2(CUevent event);
CUresult cuIpcGetMemHandle(cudaIpcMemHandle_t *out, CUdeviceptr at);
CUresult cuIpcGetEventHandle(cudaIpcEventHandle_t *out, CUevent event);
CUresult cuIpcOpenEventHandle(CUevent *out, cudaIpcEventHandle_t handle);

CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop, int option);
CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes,
                     const CUmemAllocationProp *prop, unsigned long long flags);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *shared, int type);
CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t align, CUdeviceptr wanted,
                             unsigned long long flags);
CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes);
CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags);
CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t n);
CUresult cuMemUnmap(CUdeviceptr at, size_t bytes);
#define cuMemGetAddressRange cuMemGetAddressRange_v2
CUresult cuMemGetAddressRange_v2(CUdeviceptr *out_base, size_t *out_bytes, CUdeviceptr at);

#ifdef __cplusplus
}
#endif
#endif
