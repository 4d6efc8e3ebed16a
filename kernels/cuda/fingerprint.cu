/* Fingerprints of tensors on a GPU, the CPU's numbers, and rows that hold anything. See step.h. */
#include "kernels/cuda/step.h"
#include "kernels/math/fingerprint_formulas.h"

enum { THREADS = 256, LISTED = 4096 }; /* tensors that are looked at in one launch */

/* The scratch memory. */
typedef struct listed_s {
    gradd_bytes_t list[LISTED];
    uint64_t found[LISTED];
} listed_t;
static_assert(sizeof(listed_t) <= GPU_SCRATCH, "the list fits");

/* ---- some lines --------------------------------------------------------------------------------
 */

__global__ void GPU_BLOCK(THREADS) print_drawn(int n, int from, listed_t *l) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    const gradd_bytes_t t = l->list[i];
    const uint64_t lines = (t.bytes + GRADD_PRINT_LINE - 1) / GRADD_PRINT_LINE;
    uint64_t h = t.bytes;
    for (uint64_t k = 0; k < GRADD_PRINT_LINES && k < lines; k++) {
        const uint64_t at = gradd_print_place(lines, k, (uint64_t)(from + i)) * GRADD_PRINT_LINE;
        const size_t rest = t.bytes - at;
        h = gradd_print_join(h,
                             gradd_print_line((const unsigned char *)t.data + at,
                                              rest < GRADD_PRINT_LINE ? rest : GRADD_PRINT_LINE));
    }
    l->found[i] = h;
}

/* ---- all bytes ---------------------------------------------------------------------------------
 */

GPU_FN uint64_t word_at(const unsigned char *p) {
    uint64_t word;
    if ((uintptr_t)p % sizeof word == 0) return *(const uint64_t *)p;
    memcpy(&word, p, sizeof word);
    return word;
}

/* One block per piece; thread t takes the words t % 8 of every 32nd line. */
__global__ void GPU_BLOCK(THREADS)
    print_pieces(gradd_bytes_t t, uint64_t which, unsigned long long *sum) {
    GPU_SHARED(uint64_t, plain, THREADS);
    GPU_SHARED(uint64_t, keyed, THREADS);
    const size_t first = (size_t)blockIdx.x * GRADD_PRINT_PIECE, rest = t.bytes - first;
    const size_t bytes = rest < GRADD_PRINT_PIECE ? rest : GRADD_PRINT_PIECE;
    const size_t lines = bytes / GRADD_PRINT_LINE;
    const unsigned char *p = (const unsigned char *)t.data + first;
    const uint64_t key = gradd_print_mix(which << 40 ^ (uint64_t)blockIdx.x);
    const unsigned word = threadIdx.x % GRADD_PRINT_WORDS;
    const uint64_t start = gradd_print_mix(key + word);
    uint64_t a = 0, b = 0;
    for (size_t i = threadIdx.x / GRADD_PRINT_WORDS; i < lines; i += THREADS / GRADD_PRINT_WORDS) {
        const uint64_t w = word_at(p + i * GRADD_PRINT_LINE + word * 8);
        const uint64_t x = w ^ (start + i * GRADD_PRINT_STEP);
        a += w;
        b += (x & UINT32_MAX) * (x >> 32);
    }
    plain[threadIdx.x] = a;
    keyed[threadIdx.x] = b;
    __syncthreads();
    if (threadIdx.x) return;
    uint64_t h = 0;
    for (unsigned j = 0; j < GRADD_PRINT_WORDS; j++) {
        uint64_t sum_a = 0, sum_b = 0;
        for (unsigned k = j; k < THREADS; k += GRADD_PRINT_WORDS) {
            sum_a += plain[k];
            sum_b += keyed[k];
        }
        h = gradd_print_join(h + sum_a, sum_b + j);
    }
    const size_t end = lines * GRADD_PRINT_LINE;
    const uint64_t last = gradd_print_line(p + end, bytes - end) + key;
    atomicAdd(sum, (unsigned long long)gradd_print_join(h, last));
}

static gradd_status_t print_whole(const gradd_bytes_t *list, int n, int from, listed_t *there) {
    static const uint64_t zeros[LISTED] = {0};
    GRADD_TRY(gpu_write(there->found, zeros, sizeof zeros[0] * (size_t)n));
    for (int i = 0; i < n; i++) {
        const size_t pieces = (list[i].bytes + GRADD_PRINT_PIECE - 1) / GRADD_PRINT_PIECE;
        if (!pieces) continue;
        GPU_LAUNCH(print_pieces, (unsigned)pieces, THREADS, list[i], (uint64_t)(from + i),
                   (unsigned long long *)&there->found[i]);
    }
    return gpu_launched("a fingerprint");
}

gradd_status_t gpu_fingerprint(const gradd_bytes_t *list, int n, bool whole, uint64_t *out) {
    listed_t *there = (listed_t *)gpu_call.scratch;
    uint64_t found[LISTED], h = (uint64_t)n;
    for (int from = 0; from < n; from += LISTED) {
        const int some = n - from < LISTED ? n - from : LISTED;
        const gradd_bytes_t *part = list + from;
        if (whole) {
            GRADD_TRY(print_whole(part, some, from, there));
        } else {
            GRADD_TRY(gpu_write(there->list, part, sizeof *part * (size_t)some));
            GPU_LAUNCH(print_drawn, (unsigned)(some + THREADS - 1) / THREADS, THREADS, some, from,
                       there);
            GRADD_TRY(gpu_launched("a fingerprint"));
        }
        GRADD_TRY(gpu_read(found, there->found, sizeof found[0] * (size_t)some));
        for (int i = 0; i < some; i++)
            h = gradd_print_join(h, whole ? gradd_print_join(part[i].bytes, found[i]) : found[i]);
    }
    *out = h;
    return GRADD_OK;
}

/* ---- rows that hold anything -------------------------------------------------------------------
 */

/* A warp per row. */
template <class T>
__global__ void GPU_BLOCK(THREADS)
    find_touched(int64_t rows, int64_t width, const T *x, unsigned *bits) {
    const int64_t all = (int64_t)gridDim.x * (THREADS / GPU_WARP);
    const int64_t first = (int64_t)blockIdx.x * (THREADS / GPU_WARP) + threadIdx.x / GPU_WARP;
    for (int64_t r = first; r < rows; r += all) {
        bool any = false;
        for (int64_t i = threadIdx.x % GPU_WARP; i < width && !any; i += GPU_WARP)
            any = gpu_get(x[r * width + i]) != 0; /* zeros of either sign; NaN is something */
        any = __any_sync(GPU_ALL, any);
        if (any && threadIdx.x % GPU_WARP == 0) atomicOr(&bits[r / 32], 1u << r % 32);
    }
}

gradd_status_t gpu_touched(const gradd_span_t *span, int64_t width, uint64_t *bits) {
    enum { ROWS = GPU_SCRATCH * 8 };
    const int64_t rows = width ? span->n / width : 0;
    for (int64_t from = 0; from < rows; from += ROWS) {
        const int64_t some = rows - from < ROWS ? rows - from : ROWS;
        const size_t bytes = (size_t)(some + 63) / 64 * 8;
        memset(bits + from / 64, 0, bytes);
        GRADD_TRY(gpu_write(gpu_call.scratch, bits + from / 64, bytes));
        GRADD_TRY(gpu_switch(gpu_floats(), span->dtype, [&](auto t) {
            typedef typename decltype(t)::type T;
            GPU_LAUNCH((find_touched<T>), gpu_blocks(some, THREADS / GPU_WARP), THREADS, some,
                       width, (const T *)span->data + from * width, (unsigned *)gpu_call.scratch);
            return gpu_launched("touched rows");
        }));
        GRADD_TRY(gpu_read(bits + from / 64, gpu_call.scratch, bytes));
    }
    return GRADD_OK;
}
