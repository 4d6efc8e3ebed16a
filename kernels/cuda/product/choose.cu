/* See choose.h. */
#include "kernels/cuda/product/choose.h"

#include <stdio.h>

#include "kernels/cuda/product/kept.h"
#include "kernels/cuda/product/measure.h"

enum {
    WORKSPACE = 32 << 20, /* what the library may use at most */
    PROPOSALS = 8,
    ROUNDS = 4, /* of one run of each */
    BLOCK_BYTES = 256
};

/* Of runs of one product: no further round, and no further run. */
static const double enough_ms = 50, most_ms = 200;

/* ---- proposals ------------------------------------------------------------------------------- */

static gradd_status_t prefer(const gpu_align_t *align, cublasLtMatmulPreferenceOpaque_t *out) {
    const uint64_t most = WORKSPACE;
    const struct {
        cublasLtMatmulPreferenceAttributes_t of;
        uint32_t bytes;
    } aligned[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align->b}, /* sides change places */
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align->a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align->c},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align->c},
    };
    GPU_LT(cublasLtMatmulPreferenceInit(out), "a preference");
    GPU_LT(cublasLtMatmulPreferenceSetAttribute(out, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                &most, sizeof most),
           "a limit of scratch memory");
    for (const auto &one : aligned)
        GPU_LT(cublasLtMatmulPreferenceSetAttribute(out, one.of, &one.bytes, sizeof one.bytes),
               "an alignment");
    return GRADD_OK;
}

/* The library's, the likely fastest first; at least one. */
typedef struct proposals_s {
    gpu_choice_t v[PROPOSALS];
    int n;
} proposals_t;

static gradd_status_t propose(const gradd_gemm_t *g, gpu_lt_t lt, const gpu_align_t *align,
                              int wanted, proposals_t *out) {
    cublasLtHandle_t handle;
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t found[PROPOSALS];
    int n = 0;
    GRADD_TRY(gpu_lt_handle(&handle));
    GRADD_TRY(prefer(align, &preference));
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle, &lt.desc, &lt.a, &lt.b, &lt.c, &lt.c, &preference, wanted, found, &n);
    out->n = 0;
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < n; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS)
            out->v[out->n++] = gpu_choice_t{*align, found[i].algo, found[i].workspaceSize};
    if (out->n) return GRADD_OK;
    return GRADD_FAIL(UNSUPPORTED, "cuBLASLt has no product of %s [%lld, %lld] and [%lld, %lld]",
                      gradd_dtype_name(g->dtype), (long long)g->m, (long long)g->k, (long long)g->k,
                      (long long)g->n);
}

/* ---- measuring ------------------------------------------------------------------------------- */

typedef struct product_trial_s {
    const gradd_gemm_t *g;
    const gpu_lt_t *lt;
    gpu_product_call_t call;
    const gpu_choice_t *choice;
} product_trial_t;

/* Bytes that a matrix spans, in whole blocks. */
static size_t span(const int64_t (*sizes_and_steps)[2], int n, gradd_dtype_t dtype) {
    int64_t last = 0;
    for (int i = 0; i < n; i++)
        last += (sizes_and_steps[i][0] - 1) * sizes_and_steps[i][1];
    const size_t bytes = (size_t)(last + 1) * gradd_dtype_bytes(dtype);
    return (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
}

/* Operands of their own. */
static gradd_status_t take_memory(product_trial_t *t) {
    const gradd_gemm_t *g = t->g;
    gpu_product_call_t *out = &t->call;
    const int last = g->batch_rank - 1;
    const int64_t batch = last >= 0 ? g->batch[last] : 1;
    const int64_t a[][2] = {
        {g->m,  g->a_m                          },
        {g->k,  g->a_k                          },
        {batch, last >= 0 ? g->a_batch[last] : 0}
    };
    const int64_t b[][2] = {
        {g->k,  g->b_k                          },
        {g->n,  g->b_n                          },
        {batch, last >= 0 ? g->b_batch[last] : 0}
    };
    const int64_t c[][2] =
        {
            {batch * g->m * g->n, 1}
    },
                  bias[][2] = {{g->n, 1}};
    const size_t bytes[4] = {span(a, 3, g->dtype), span(b, 3, g->dtype),
                             span(c, 1, gradd_gemm_result(g)), span(bias, 1, g->dtype)};
    const size_t kept = t->lt->after == GPU_AFTER_GELU_KEPT ? bytes[2] : 0;
    void *memory;
    GRADD_TRY(
        gpu_measure_begin(bytes[0] + bytes[1] + bytes[2] + bytes[3] + kept + WORKSPACE, &memory));
    out->a = memory;
    out->b = (char *)out->a + bytes[0];
    out->c = (char *)out->b + bytes[1];
    out->bias = (char *)out->c + bytes[2];
    out->kept = (char *)out->bias + bytes[3];
    out->workspace = (char *)out->kept + kept;
    return GRADD_OK;
}

static gradd_status_t run(void *argument) {
    const product_trial_t *t = (const product_trial_t *)argument;
    GPU_LT(gpu_lt_multiply(t->g, t->lt, t->choice, &t->call), "a product");
    return GRADD_OK;
}

/* One run of each that is left; a refusal, and twice the time of the best, end a proposal. False:
 * there was no time for all. */
static bool run_round(product_trial_t *t, const proposals_t *from, double *best, double *spent) {
    double least = -1;
    for (int i = 0; i < from->n; i++) {
        double ms = 0;
        if (best[i] < 0) continue;
        if (*spent > most_ms) return false;
        t->choice = &from->v[i];
        if (gpu_measure(run, t, &ms)) {
            best[i] = -1;
            continue;
        }
        *spent += ms;
        if (!best[i] || ms < best[i]) best[i] = ms;
        if (least < 0 || best[i] < least) least = best[i];
    }
    for (int i = 0; i < from->n; i++)
        if (best[i] > 2 * least) best[i] = -1;
    return true;
}

/* The fastest by its shortest run; the first where nothing can be measured. */
static int measure(const gradd_gemm_t *g, const gpu_lt_t *lt, const proposals_t *from) {
    double best[PROPOSALS] = {0}, spent = 0;
    product_trial_t t = {g, lt};
    int first = 0;
    if (take_memory(&t)) return 0;
    for (int round = 0; round < ROUNDS && spent <= enough_ms; round++)
        if (!run_round(&t, from, best, &spent)) break;
    gpu_measure_end();
    for (int i = 1; i < from->n; i++)
        if (best[i] > 0 && (best[first] <= 0 || best[i] < best[first])) first = i;
    return first;
}

/* ---- kept choices ---------------------------------------------------------------------------- */

/* All that decides what the library can do, and how fast. */
static void name_problem(const gradd_gemm_t *g, gpu_after_t after, const gpu_align_t *align,
                         char *out) {
    static const char *const behind[] = {"", " gelu", " gelu kept"};
    const int last = g->batch_rank - 1;
    snprintf(out, GPU_KEPT_KEY,
             "%s>%s %lldx%lldx%lld a %lld,%lld b %lld,%lld batch %lld a %lld b %lld%s%s%s "
             "align %u,%u,%u",
             gradd_dtype_name(g->dtype), gradd_dtype_name(gradd_gemm_result(g)), (long long)g->m,
             (long long)g->n, (long long)g->k, (long long)g->a_m, (long long)g->a_k,
             (long long)g->b_k, (long long)g->b_n, last >= 0 ? (long long)g->batch[last] : 1,
             last >= 0 ? (long long)g->a_batch[last] : 0,
             last >= 0 ? (long long)g->b_batch[last] : 0, g->has_bias ? " bias" : "",
             g->accumulate ? " onto" : "", behind[after], align->a, align->b, align->c);
}

static bool is_worth(const gradd_gemm_t *g) {
    const double batch = g->batch_rank ? (double)g->batch[g->batch_rank - 1] : 1;
    return 2 * batch * (double)g->m * (double)g->n * (double)g->k >= gpu_kept_least();
}

/* Takes it if the library does. */
static bool take(gpu_lt_t lt, const gpu_kept_t *kept, gpu_choice_t *out) {
    cublasLtHandle_t handle;
    cublasLtMatmulHeuristicResult_t found = {};
    cublasLtMatmulAlgo_t algo;
    static_assert(sizeof algo == sizeof *kept, "its bytes");
    memcpy(&algo, kept, sizeof algo);
    if (gpu_lt_handle(&handle) ||
        cublasLtMatmulAlgoCheck(handle, &lt.desc, &lt.a, &lt.b, &lt.c, &lt.c, &algo, &found) !=
            CUBLAS_STATUS_SUCCESS ||
        found.state != CUBLAS_STATUS_SUCCESS || found.workspaceSize > WORKSPACE)
        return false;
    out->algo = algo;
    out->workspace = found.workspaceSize;
    return true;
}

gradd_status_t gpu_lt_choose(const gradd_gemm_t *g, const gpu_lt_t *lt, bool measured,
                             gpu_choice_t *out) {
    char key[GPU_KEPT_KEY];
    gpu_kept_t kept;
    proposals_t from;
    const bool tuned = measured && is_worth(g);
    if (tuned) name_problem(g, lt->after, &out->align, key);
    if (tuned && gpu_kept_find(key, &kept) && take(*lt, &kept, out)) return GRADD_OK;
    GRADD_TRY(propose(g, *lt, &out->align, tuned ? PROPOSALS : 1, &from));
    *out = from.v[0];
    if (from.n == 1 || !gpu_kept_ready()) return GRADD_OK;
    memcpy(&kept, &from.v[measure(g, lt, &from)].algo, sizeof kept);
    if (gpu_kept_add(key, &kept)) take(*lt, &kept, out);
    return GRADD_OK;
}
