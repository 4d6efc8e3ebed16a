/* What a GPU and its driver do, asked before anything is built on it: one process, or two of the
 * same user that share memory.
 *
 *     probe ipc      a handle of cudaMalloc's memory, opened by another process; an event of it
 *     probe vmm      memory with a file descriptor, mapped by another process, which reads it when its
 *                    maker was killed, and by a third one after that
 *     probe words    numbers that a stream writes and waits for, and another process polls and writes
 *     probe streams  an event of a context, behind which a stream waits for all the others
 *     probe host     pages of a memfd, registered: what reading them costs
 *     probe copy     bytes per second within the device, and to and from the host
 *     probe half     bf16 and f16 from and to f32: all bits against the formulas of the CPU
 *     probe product  cuBLASLt's products of Llama's sizes, in bf16
 *
 * Prints lines of JSON; exit status 0 if everything held.
 */
#include <cublasLt.h>
#include <dlfcn.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/cuda/half.h"
#include "tools/gpu/probe.h"

enum { BYTES = 64 << 20 };

/* ---- one process ---- */

static double best(cudaEvent_t from, cudaEvent_t to, double *most, double bytes) {
    float ms;
    CHECK(cudaEventSynchronize(to));
    CHECK(cudaEventElapsedTime(&ms, from, to));
    const double rate = bytes / (1e-3 * ms) / 1e9;
    *most = rate > *most ? rate : *most;
    return rate;
}

static int probe_host(void) {
    const int fd = memfd_create("probe", 0);
    void *there, *mine;
    cudaEvent_t from, to;
    double most = 0;
    CHECK(ftruncate(fd, BYTES));
    void *pages = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(pages == MAP_FAILED);
    memset(pages, 0, BYTES);
    CHECK(cudaHostRegister(pages, BYTES, cudaHostRegisterMapped));
    CHECK(cudaHostGetDevicePointer(&there, pages, 0));
    CHECK(cudaMalloc(&mine, BYTES));
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    fill<<<256, 256>>>((uint32_t *)there, BYTES / 4, 3);
    CHECK(cudaDeviceSynchronize());
    CHECK(((uint32_t *)pages)[5] != 8);
    for (int i = 0; i < 5; i++) {
        CHECK(cudaEventRecord(from, 0));
        CHECK(cudaMemcpyAsync(mine, there, BYTES, cudaMemcpyDefault, 0));
        CHECK(cudaEventRecord(to, 0));
        best(from, to, &most, BYTES);
    }
    printf("{\"probe\": \"host\", \"same_address\": %d, \"copy_gb_s\": %.1f}\n", there == pages,
           most);
    return 0;
}

static int probe_copy(void) {
    const size_t bytes = (size_t)1 << 30;
    void *a, *b, *host;
    cudaEvent_t from, to;
    double rates[3] = {0, 0, 0};
    CHECK(cudaMalloc(&a, bytes));
    CHECK(cudaMalloc(&b, bytes));
    CHECK(cudaMallocHost(&host, bytes));
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < 3; k++) {
            CHECK(cudaEventRecord(from, 0));
            CHECK(
                cudaMemcpyAsync(k == 2 ? host : b, k == 1 ? host : a, bytes, cudaMemcpyDefault, 0));
            CHECK(cudaEventRecord(to, 0));
            best(from, to, &rates[k], (double)bytes * (k ? 1 : 2));
        }
    printf("{\"probe\": \"copy\", \"device_gb_s\": %.0f, \"to_device_gb_s\": %.1f, "
           "\"to_host_gb_s\": %.1f}\n",
           rates[0], rates[1], rates[2]);
    return 0;
}

/* ---- halves ---- */

enum { HALVES = 1 << 16, DRAWN = 1 << 20 };
static const uint32_t DRAWN_STEP = 4099; /* odd: bits of f32 all over the place */

/* What differs, of all halves and of all bits of f32, and whether the formulas do on this device.
 */
typedef struct halves_s {
    unsigned widen, narrow_f16, narrow_bf16, last_f32; /* how many; and one of f32 */
    uint32_t wide[HALVES];
    uint16_t f16[DRAWN], bf16[DRAWN];
} halves_t;

GRADD_HD uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

GRADD_HD float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

__global__ void widen_all(halves_t *to) {
    const uint32_t h = blockIdx.x * blockDim.x + threadIdx.x;
    const gradd_f16_t x = {(uint16_t)h};
    to->wide[h] = bits_of(gpu_f16_f32(x));
    if (to->wide[h] != bits_of(gradd_f16_f32(x))) atomicAdd(&to->widen, 1u);
}

__global__ void narrow_all(halves_t *to) {
    const uint64_t all = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t k = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; k < (uint64_t)1 << 32;
         k += all) {
        const float x = float_of((uint32_t)k);
        const bool f16 = gpu_f32_f16(x).bits != gradd_f32_f16(x).bits;
        const bool bf16 = gpu_f32_bf16(x).bits != gradd_f32_bf16(x).bits;
        if (f16) atomicAdd(&to->narrow_f16, 1u);
        if (bf16) atomicAdd(&to->narrow_bf16, 1u);
        if (f16 || bf16) to->last_f32 = (unsigned)k;
    }
}

__global__ void narrow_drawn(halves_t *to) {
    const uint32_t k = blockIdx.x * blockDim.x + threadIdx.x;
    to->f16[k] = gpu_f32_f16(float_of(k * DRAWN_STEP)).bits;
    to->bf16[k] = gpu_f32_bf16(float_of(k * DRAWN_STEP)).bits;
}

/* The formulas here and there agree if the instructions agree with both. */
static int probe_half(void) {
    halves_t *there, *here = (halves_t *)malloc(sizeof *here);
    unsigned widen = 0, narrow = 0;
    CHECK(!here);
    CHECK(cudaMalloc(&there, sizeof *there));
    CHECK(cudaMemset(there, 0, sizeof *there));
    widen_all<<<HALVES / 256, 256>>>(there);
    narrow_all<<<4096, 256>>>(there);
    narrow_drawn<<<DRAWN / 256, 256>>>(there);
    CHECK(cudaMemcpy(here, there, sizeof *here, cudaMemcpyDeviceToHost));
    for (uint32_t h = 0; h < HALVES; h++)
        widen += here->wide[h] != bits_of(gradd_f16_f32(gradd_f16_t{(uint16_t)h}));
    for (uint32_t k = 0; k < DRAWN; k++) {
        const float x = float_of(k * DRAWN_STEP);
        narrow += here->f16[k] != gradd_f32_f16(x).bits || here->bf16[k] != gradd_f32_bf16(x).bits;
    }
    printf("{\"probe\": \"half\", \"f16_to_f32\": %u, \"f32_to_f16\": %u, \"f32_to_bf16\": %u, "
           "\"last_f32\": \"%08x\", \"cpu_f16_to_f32\": %u, \"cpu_f32_to_halves\": %u}\n",
           here->widen, here->narrow_f16, here->narrow_bf16, here->last_f32, widen, narrow);
    return here->widen || here->narrow_f16 || here->narrow_bf16 || widen || narrow;
}

/* ---- products ---- */

/* What is used of cuBLASLt, opened by this probe alone: the others run where it is missing. */
static struct {
    decltype(&cublasLtCreate) create;
    decltype(&cublasLtMatmul) multiply;
    decltype(&cublasLtMatmulAlgoGetHeuristic) find;
    decltype(&cublasLtMatmulDescCreate) describe;
    decltype(&cublasLtMatmulDescSetAttribute) describe_more;
    decltype(&cublasLtMatmulPreferenceCreate) prefer;
    decltype(&cublasLtMatmulPreferenceSetAttribute) prefer_more;
    decltype(&cublasLtMatrixLayoutCreate) lay_out;
} blas;

static void open_blas(void) {
    const struct {
        const char *name;
        void *into;
    } wanted[] = {
        {"cublasLtCreate",                       &blas.create       },
        {"cublasLtMatmul",                       &blas.multiply     },
        {"cublasLtMatmulAlgoGetHeuristic",       &blas.find         },
        {"cublasLtMatmulDescCreate",             &blas.describe     },
        {"cublasLtMatmulDescSetAttribute",       &blas.describe_more},
        {"cublasLtMatmulPreferenceCreate",       &blas.prefer       },
        {"cublasLtMatmulPreferenceSetAttribute", &blas.prefer_more  },
        {"cublasLtMatrixLayoutCreate",           &blas.lay_out      }
    };
    void *library = dlopen("libcublasLt.so.13", RTLD_NOW);
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        void *found = library ? dlsym(library, wanted[i].name) : NULL;
        if (!found) {
            told_failure(library ? "dlsym" : "dlopen", __LINE__, -1, dlerror());
            exit(1);
        }
        memcpy(wanted[i].into, &found, sizeof found);
    }
}

/* y[m, n] = x[m, k] W[n, k]^T, all bf16. */
static void product(cublasLtHandle_t lt, int m, int n, int k, void *workspace, size_t bytes) {
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t w, x, y;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found[8];
    cudaEvent_t from, to;
    int n_found = 0;
    const cublasOperation_t turned = CUBLAS_OP_T;
    const float one = 1, zero = 0;
    void *at[3];
    double most = 0;
    CHECK(blas.describe(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CHECK(blas.describe_more(desc, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned));
    CHECK(blas.lay_out(&w, CUDA_R_16BF, k, n, k));
    CHECK(blas.lay_out(&x, CUDA_R_16BF, k, m, k));
    CHECK(blas.lay_out(&y, CUDA_R_16BF, n, m, n));
    CHECK(blas.prefer(&preference));
    CHECK(blas.prefer_more(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                           sizeof bytes));
    CHECK(cudaMalloc(&at[0], (size_t)2 * n * k));
    CHECK(cudaMalloc(&at[1], (size_t)2 * m * k));
    CHECK(cudaMalloc(&at[2], (size_t)2 * m * n));
    fill<<<256, 256>>>((uint32_t *)at[0], (size_t)n * k / 2, 0x3c003c00);
    fill<<<256, 256>>>((uint32_t *)at[1], (size_t)m * k / 2, 0x3b003b00);
    CHECK(blas.find(lt, desc, w, x, y, y, preference, 8, found, &n_found));
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    for (int a = 0; a < n_found; a++)
        for (int i = 0; i < 6; i++) {
            CHECK(cudaEventRecord(from, 0));
            CHECK(blas.multiply(lt, desc, &one, at[0], w, at[1], x, &zero, at[2], y, at[2], y,
                                &found[a].algo, workspace, bytes, 0));
            CHECK(cudaEventRecord(to, 0));
            best(from, to, &most, 2e3 * m * n * k / 1e3);
        }
    printf("{\"probe\": \"product\", \"m\": %d, \"n\": %d, \"k\": %d, \"algorithms\": %d, "
           "\"tflop_s\": %.0f}\n",
           m, n, k, n_found, most / 1e3);
    for (int i = 0; i < 3; i++)
        CHECK(cudaFree(at[i]));
}

static int probe_product(void) {
    static const int sizes[][2] = {
        {2048,   2048 },
        {3072,   2048 },
        {16384,  2048 },
        {2048,   8192 },
        {128256, 2048 }, /* 1 B */
        {4096,   4096 },
        {6144,   4096 },
        {28672,  4096 },
        {4096,   14336},
        {128256, 4096 }  /* 8 B */
    };
    const size_t bytes = (size_t)32 << 20;
    cublasLtHandle_t lt;
    void *workspace;
    open_blas();
    CHECK(blas.create(&lt));
    CHECK(cudaMalloc(&workspace, bytes));
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        product(lt, 8192, sizes[i][0], sizes[i][1], workspace, bytes);
    return 0;
}

/* ---- streams ---- */

enum { STREAMS = 64, ROUNDS = 200 }; /* as many as torch makes of two priorities */
typedef CUresult (*record_t)(CUcontext, CUevent);
typedef CUresult (*wait_value_t)(CUstream, CUdeviceptr, cuuint64_t, unsigned);

/* A stream that is late reads memory; another one, which waits for the event alone, writes there.
 * Then the price of such an event among streams that are idle. */
static int probe_streams(void) {
    cudaStream_t streams[STREAMS], *late = streams + STREAMS - 1;
    CUcontext context;
    cudaEvent_t event;
    volatile uint64_t *gate;
    void *memory, *copy, *there;
    const size_t bytes = 1024;
    for (int i = 0; i < STREAMS; i++)
        CHECK(cudaStreamCreateWithFlags(streams + i, cudaStreamNonBlocking));
    CHECK(((CUresult(*)(CUcontext *))symbol("cuCtxGetCurrent"))(&context));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaHostAlloc((void **)&gate, sizeof *gate, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&there, (void *)gate, 0));
    CHECK(cudaMalloc(&memory, bytes));
    CHECK(cudaMalloc(&copy, bytes));
    const record_t record = (record_t)symbol("cuCtxRecordEvent");
    *gate = 0;
    fill<<<1, 256, 0, *streams>>>((uint32_t *)memory, bytes / 4, 7);
    CHECK(cudaDeviceSynchronize());
    CHECK(((wait_value_t)symbol("cuStreamWaitValue64"))(*late, (CUdeviceptr)there, 1,
                                                        CU_STREAM_WAIT_VALUE_GEQ));
    CHECK(cudaMemcpyAsync(copy, memory, bytes, cudaMemcpyDefault, *late));
    CHECK(record(context, event));
    CHECK(cudaStreamWaitEvent(*streams, event, 0));
    fill<<<1, 256, 0, *streams>>>((uint32_t *)memory, bytes / 4, 9);
    usleep(100000); /* a stream that does not wait is done by then */
    CHECK(cudaStreamQuery(*streams) != cudaErrorNotReady);
    *gate = 1;
    CHECK(cudaDeviceSynchronize());
    expect(copy, bytes, 7);
    expect(memory, bytes, 9);
    const double began = now();
    for (int i = 0; i < ROUNDS; i++) {
        CHECK(record(context, event));
        CHECK(cudaStreamWaitEvent(*streams, event, 0));
    }
    printf("{\"probe\": \"streams\", \"host_us\": %.1f}\n", 1e6 * (now() - began) / ROUNDS);
    CHECK(cudaDeviceSynchronize());
    return 0;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        int (*run)(void);
    } probes[] = {
        {"ipc",     probe_ipc    },
        {"vmm",     probe_vmm    },
        {"words",   probe_words  },
        {"streams", probe_streams},
        {"host",    probe_host   },
        {"copy",    probe_copy   },
        {"half",    probe_half   },
        {"product", probe_product}
    };
    setvbuf(stdout, NULL, _IOLBF, 0); /* a limit of time takes no line that is written */
    for (size_t i = 0; i < sizeof probes / sizeof probes[0]; i++)
        if (argc == 2 && !strcmp(argv[1], probes[i].name)) return probes[i].run();
    fprintf(stderr, "usage: probe ipc|vmm|words|streams|host|copy|half|product\n");
    return 2;
}
