/* The table of the CUDA device: one GPU, the first that the process sees. See
 * kernels/contract/backend.h.
 *
 * A queue is a stream. Memory comes from the driver's stream-ordered pool. A value that a kernel
 * refuses is recorded in a fault record of the queue, which wait() reads; an error of CUDA itself
 * ends the device, because its context is lost.
 *
 * memory.cu takes the memory of clients, comm.cu averages over processes. Nothing links libcuda:
 * the driver is found at run time.
 */
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/plugin/comm.h"
#include "kernels/cuda/plugin/memory.h"
#include "kernels/cuda/product.h"
#include "kernels/cuda/product/kept.h"
#include "kernels/cuda/product/measure.h"
#include "kernels/cuda/row/head.h"
#include "kernels/cuda/step.h"

struct gradd_queue_s {
    cudaStream_t stream;
    gradd_fault_t *fault; /* memory of the device */
    void *scratch;
    gradd_status_t lost; /* what ended the device */
    char why[256];
};

thread_local gpu_call_t gpu_call;
static int units;
static char device_name[256], device_uuid[48];

/* ---- failures ---- */

/* The error is reported here, so the next call must not find it. */
static gradd_status_t failed(cudaError_t error, const char *what) {
    cudaGetLastError();
    return GRADD_FAIL(DEVICE, "CUDA: %s: %s (%s, %d)", what, cudaGetErrorString(error),
                      cudaGetErrorName(error), (int)error);
}
#define CU(call, what)                                                                             \
    do {                                                                                           \
        const cudaError_t cu_error_ = (call);                                                      \
        if (cu_error_ != cudaSuccess) return failed(cu_error_, what);                              \
    } while (0)

/* A GPU says late that a kernel has failed, unless launches wait for their end. */
gradd_status_t gpu_launched(const char *what) {
    const cudaError_t error = cudaGetLastError();
    const char *blocking = getenv("CUDA_LAUNCH_BLOCKING");
    if (!error) return GRADD_OK;
    if (blocking && !strcmp(blocking, "1")) return failed(error, what);
    return GRADD_FAIL(DEVICE, "CUDA: %s, or work in front of it: %s (%s, %d)", what,
                      cudaGetErrorString(error), cudaGetErrorName(error), (int)error);
}

int gpu_shared_most(void) {
    int bytes = 0, device = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return bytes;
}

gradd_status_t gpu_write(void *to, const void *from, size_t bytes) {
    CU(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, (cudaStream_t)gpu_call.stream),
       "a copy");
    return GRADD_OK;
}

gradd_status_t gpu_read(void *to, const void *from, size_t bytes) {
    GRADD_TRY(gpu_write(to, from, bytes));
    CU(cudaStreamSynchronize((cudaStream_t)gpu_call.stream), "a wait");
    return GRADD_OK;
}

static void enter(gradd_queue_t *q, int launch) {
    gpu_call = {q->stream, q->fault, launch, units, q->scratch};
}

/* Keeps the failure that ended the device. */
static gradd_status_t noted(gradd_queue_t *q, gradd_status_t status) {
    if (status == GRADD_E_DEVICE && !q->lost) {
        q->lost = status;
        strncpy(q->why, gradd_error_message(), sizeof q->why - 1);
    }
    return status;
}

/* ---- queue ---- */

static void queue_destroy(gradd_queue_t *q) {
    if (!q) return;
    gpu_comm_settle();
    if (q->stream) cudaStreamSynchronize(q->stream);
    cudaFree(q->fault);
    cudaFree(q->scratch);
    if (q->stream) cudaStreamDestroy(q->stream);
    free(q);
}

static gradd_status_t fill_queue(gradd_queue_t *q) {
    CU(cudaStreamCreateWithFlags(&q->stream, cudaStreamNonBlocking), "a stream");
    CU(cudaMalloc((void **)&q->fault, sizeof *q->fault), "memory of a queue");
    CU(cudaMalloc(&q->scratch, GPU_SCRATCH), "memory of a queue");
    CU(cudaMemsetAsync(q->fault, 0, sizeof *q->fault, q->stream), "memory of a queue");
    return GRADD_OK;
}

static gradd_status_t queue_create(int threads, gradd_queue_t **out) {
    (void)threads;
    gradd_queue_t *q = (gradd_queue_t *)calloc(1, sizeof *q);
    if (!q) return GRADD_FAIL(NOMEM, "no memory for a queue");
    gradd_status_t status = fill_queue(q);
    if (status)
        queue_destroy(q);
    else
        *out = q;
    return status;
}

static gradd_status_t queue_enter(gradd_queue_t *q, int threads) {
    (void)threads;
    if (q->lost) return GRADD_FAIL(DEVICE, "%s", q->why);
    enter(q, -1);
    return GRADD_OK;
}

static gradd_status_t wait_for(gradd_queue_t *q, int *out_launch) {
    gradd_fault_t fault;
    enter(q, -1);
    GRADD_TRY(gpu_read(&fault, q->fault, sizeof fault));
    if (!fault.kind) return GRADD_OK;
    if (out_launch) *out_launch = fault.launch;
    CU(cudaMemsetAsync(q->fault, 0, sizeof fault, q->stream), "a fault record");
    CU(cudaStreamSynchronize(q->stream), "a wait");
    return gradd_fault_fail(&fault);
}

static gradd_status_t queue_wait(gradd_queue_t *q, int *out_launch) {
    if (out_launch) *out_launch = -1;
    if (q->lost) return GRADD_FAIL(DEVICE, "%s", q->why);
    return noted(q, wait_for(q, out_launch));
}

/* ---- memory ---- */

static gradd_status_t device_alloc(gradd_queue_t *q, size_t bytes, void **out) {
    const cudaError_t error = cudaMallocAsync(out, bytes + !bytes, q->stream);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError(); /* the next call must not find it */
        return GRADD_FAIL(NOMEM, "the GPU has no memory for %zu bytes", bytes);
    }
    if (error) return noted(q, failed(error, "memory"));
    return GRADD_OK;
}

static void device_free(gradd_queue_t *q, void *memory, size_t bytes) {
    (void)bytes;
    if (memory) cudaFreeAsync(memory, q->stream);
}

static gradd_status_t device_copy(gradd_queue_t *q, void *to, const void *from, size_t bytes) {
    if (!bytes) return GRADD_OK;
    enter(q, -1);
    return noted(q, gpu_write(to, from, bytes));
}

static gradd_status_t device_zero(gradd_queue_t *q, void *memory, size_t bytes) {
    const cudaError_t error = bytes ? cudaMemsetAsync(memory, 0, bytes, q->stream) : cudaSuccess;
    return error ? noted(q, failed(error, "zeros")) : GRADD_OK;
}

static gradd_status_t device_memory(int64_t *out_free, int64_t *out_total) {
    size_t left, total;
    CU(cudaMemGetInfo(&left, &total), "the memory that is left");
    *out_free = (int64_t)left;
    *out_total = (int64_t)total;
    return GRADD_OK;
}

/* ---- work ---- */

static gradd_status_t device_launch(gradd_queue_t *q, const gradd_kernel_t *kernel,
                                    const gradd_launch_t *launch) {
    enter(q, launch->launch);
    return noted(q, kernel->compute(launch));
}

static gradd_status_t device_find_nonfinite(gradd_queue_t *q, const gradd_view_t *view,
                                            gradd_nonfinite_t *out) {
    enter(q, -1);
    return noted(q, gpu_find_nonfinite(view, out));
}

static gradd_status_t device_fingerprint(gradd_queue_t *q, const gradd_bytes_t *list, int n,
                                         bool whole, uint64_t *out) {
    enter(q, -1);
    return noted(q, gpu_fingerprint(list, n, whole, out));
}

static gradd_status_t device_norm2(gradd_queue_t *q, const gradd_span_t *list, int n, double *out) {
    enter(q, -1);
    return noted(q, gpu_norm2(list, n, out));
}

static gradd_status_t device_adam(gradd_queue_t *q, const gradd_adam_t *hyper, float grad_scale,
                                  const gradd_adam_span_t *span) {
    enter(q, -1);
    return noted(q, gpu_adam(hyper, grad_scale, span));
}

static gradd_status_t device_commit(gradd_queue_t *q, const gradd_adam_commit_t *commit) {
    enter(q, -1);
    return noted(q, gpu_adam_commit(commit));
}

static gradd_status_t device_store(gradd_queue_t *q, uint64_t *word, uint64_t value) {
    enter(q, -1);
    return noted(q, gpu_store(word, value));
}

static gradd_status_t device_touched(gradd_queue_t *q, const gradd_span_t *span, int64_t width,
                                     uint64_t *bits) {
    enter(q, -1);
    return noted(q, gpu_touched(span, width, bits));
}

static gradd_status_t device_average(gradd_queue_t *q, gradd_comm_t *comm,
                                     const gradd_comm_part_t *part) {
    return gpu_comm_average(q->stream, comm, part);
}

/* ---- measuring ---- */

static struct {
    cudaStream_t stream;
    cudaEvent_t from, to;
    void *memory, *stream_before;
} measuring;

gpu_device_t gpu_device(void) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    return {device_name, driver};
}

static gradd_status_t measure_begin(size_t bytes) {
    CU(cudaDeviceSynchronize(), "a wait");
    CU(cudaStreamCreateWithFlags(&measuring.stream, cudaStreamNonBlocking), "a stream");
    CU(cudaEventCreate(&measuring.from), "an event");
    CU(cudaEventCreate(&measuring.to), "an event");
    CU(cudaMallocAsync(&measuring.memory, bytes, measuring.stream), "memory to measure");
    /* about 0.01 in f32 and bf16, 1 in f16 */
    CU(cudaMemsetAsync(measuring.memory, 0x3c, bytes, measuring.stream), "small numbers");
    return GRADD_OK;
}

gradd_status_t gpu_measure_begin(size_t bytes, void **out_memory) {
    measuring.stream_before = gpu_call.stream;
    const gradd_status_t status = measure_begin(bytes);
    if (status) {
        gpu_measure_end();
        return status;
    }
    gpu_call.stream = measuring.stream;
    *out_memory = measuring.memory;
    return GRADD_OK;
}

gradd_status_t gpu_measure(gradd_status_t (*work)(void *), void *argument, double *out_ms) {
    float ms;
    CU(cudaEventRecord(measuring.from, measuring.stream), "an event");
    GRADD_TRY(work(argument));
    CU(cudaEventRecord(measuring.to, measuring.stream), "an event");
    CU(cudaEventSynchronize(measuring.to), "a wait");
    CU(cudaEventElapsedTime(&ms, measuring.from, measuring.to), "a time");
    *out_ms = ms;
    return GRADD_OK;
}

void gpu_measure_end(void) {
    gpu_call.stream = measuring.stream_before;
    if (measuring.memory) cudaFreeAsync(measuring.memory, measuring.stream);
    if (measuring.from) cudaEventDestroy(measuring.from);
    if (measuring.to) cudaEventDestroy(measuring.to);
    if (measuring.stream) {
        cudaStreamSynchronize(measuring.stream);
        cudaStreamDestroy(measuring.stream);
    }
    measuring = {};
}

static bool multiplies(gradd_dtype_t dtype) {
    return gradd_dtype_is_float(dtype);
}

/* ---- the table ---- */

#define X(family) extern const gradd_kernels_t gradd_cuda_kernels_##family;
#include "cuda_list.inc"
#undef X

static const gradd_kernels_t *const kernels[] = {
#define X(family) &gradd_cuda_kernels_##family,
#include "cuda_list.inc"
#undef X
};

static const char *uuid(void) {
    return device_uuid;
}

/* As nvidia-smi and CUDA_VISIBLE_DEVICES have it. */
static void write_uuid(const cudaUUID_t *uuid) {
    int n = snprintf(device_uuid, sizeof device_uuid, "GPU");
    for (int i = 0; i < 16; i++)
        n += snprintf(device_uuid + n, sizeof device_uuid - (size_t)n, "%s%02x",
                      i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                      (unsigned char)uuid->bytes[i]);
}

static const gradd_backend_t table = {
    .abi = GRADD_BACKEND_ABI,
    .size = sizeof(gradd_backend_t),
    .name = "cuda",
    .map = gpu_map,
    .unmap = gpu_unmap,
    .queue_create = queue_create,
    .queue_destroy = queue_destroy,
    .queue_enter = queue_enter,
    .wait = queue_wait,
    .alloc = device_alloc,
    .free = device_free,
    .copy = device_copy,
    .zero = device_zero,
    .launch = device_launch,
    .find_nonfinite = device_find_nonfinite,
    .fingerprint = device_fingerprint,
    .norm2 = device_norm2,
    .adam = device_adam,
    .adam_commit = device_commit,
    .store = device_store,
    .library = gpu_product_library,
    .multiplies = multiplies,
    .kernels = kernels,
    .n_kernels = sizeof kernels / sizeof kernels[0],
    .touched = device_touched,
    .head_rows = GPU_HEAD_ROWS,
    .head_block = GPU_HEAD_BLOCK,
    .kept = gpu_kept_text,
    .open = gpu_open,
    .close = gpu_close,
    .uuid = uuid,
    .memory = device_memory,
    .comm_id = gpu_comm_id,
    .comm_join = gpu_comm_join,
    .comm_begin = gpu_comm_begin,
    .comm_average = device_average,
    .comm_ended = gpu_comm_ended,
    .comm_status = gpu_comm_status,
    .comm_leave = gpu_comm_leave,
};

/* A GPU that this build has code for. */
static gradd_status_t find_device(void) {
    int n = 0;
    cudaDeviceProp found;
    const cudaError_t error = cudaGetDeviceCount(&n);
    if (error) return failed(error, "no GPU");
    if (!n) return GRADD_FAIL(DEVICE, "CUDA: there is no GPU");
    CU(cudaGetDeviceProperties(&found, 0), "the GPU's properties");
    if (found.major < 8)
        return GRADD_FAIL(DEVICE, "CUDA: %s has compute capability %d.%d, expected at least 8.0",
                          found.name, found.major, found.minor);
    CU(cudaSetDevice(0), "the GPU");
    units = found.multiProcessorCount;
    write_uuid(&found.uuid);
    gpu_find_driver();
    snprintf(device_name, sizeof device_name, "%s", found.name);
    return GRADD_OK;
}

extern "C" __attribute__((visibility("default"))) gradd_status_t
gradd_plugin(uint32_t abi, const gradd_backend_t **out) {
    if (abi != GRADD_BACKEND_ABI)
        return GRADD_FAIL(VERSION, "the plug-in has version %u of the device table, expected %u",
                          GRADD_BACKEND_ABI, abi);
    GRADD_TRY(find_device());
    *out = &table;
    return GRADD_OK;
}
