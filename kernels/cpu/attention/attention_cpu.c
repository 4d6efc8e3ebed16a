/* Attention: division of the work among threads, for the element types. See attention_cpu.h.
 *
 * Forward tasks are blocks of 64 queries of one head. Backward tasks are heads of keys, each with
 * all its queries, so that every sum has one owner. Where that gives too few tasks, keys and
 * queries are walked over separately, at the price of computing the scores twice; the sums have the
 * same order and so the same bits either way. */
#include "kernels/cpu/attention/attention_cpu.h"

#include <math.h>
#include <omp.h>
#include <string.h>

#include "kernels/contract/backend.h"
#include "kernels/cpu/attention/attention_bits.h"
#include "kernels/cpu/attention/attention_pairs.h"
#include "kernels/cpu/attention/attention_runs.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/panel.h"
#include "kernels/cpu/row_lanes.h"
#include "kernels/describe/dispatch.h"
#include "kernels/math/vec.h"

enum { TILE = GRADD_ATTN_TILE, KEYS_PER_TASK = 4 * TILE };
enum { BY_QUERY = 1, BY_KEY = 2 }; /* what is summed: dq and dbias; dk and dv */
typedef enum flip_e { FLIP_MOVE, FLIP_SCALE, FLIP_ADD } flip_t;

/* One side of a product: numbers, or pairs of bf16. */
typedef struct operand_s {
    const void *at;
    int64_t row, sum; /* steps from row to row (left side only) and along the sum */
} operand_t;

/* bf16 in rows that are whole pairs, as all strides are then, which are multiples of the widths. */
bool gradd_attn_pairs(const gradd_attn_t *p) {
    return ATTN_PAIRS && p->dtype == GRADD_DT_BF16 && !((p->d | p->d_v) & 1) && attn_pairs_ready();
}

/* exp of what is not above 0, without subnormal results, which are slow. */
static inline float exp_f32(float x) {
    return x < -87.0f ? 0.0f : gradd_vexpf(x);
}

/* in this order: steps of a tile, what is made of them, their gradients */
#define REAL    float
#define LANES   16
#define NAME(x) x##_f32
#define EXP     exp_f32
#define TANH    gradd_vtanhf
#include "kernels/cpu/attention/attention_tile.h"

#include "kernels/cpu/attention/attention_block.h"

#include "kernels/cpu/attention/attention_grad.h"
#undef REAL
#undef LANES
#undef NAME
#undef EXP
#undef TANH
#define REAL    double
#define LANES   8
#define NAME(x) x##_f64
#define EXP     exp
#define TANH    tanh
#include "kernels/cpu/attention/attention_tile.h"

#include "kernels/cpu/attention/attention_block.h"

#include "kernels/cpu/attention/attention_grad.h"

static int64_t blocks_of(int64_t n, int64_t size) {
    return (n + size - 1) / size;
}

/* ---- scratch --------------------------------------------------------------------------------- */

static int64_t most_tasks(const gradd_attn_t *p, bool backward) {
    int64_t queries = p->batch * p->heads * blocks_of(p->n_q, TILE);
    int64_t keys = p->batch * p->kv_heads * blocks_of(p->n_k, KEYS_PER_TASK);
    return backward && keys > queries ? keys : queries;
}

static int slots(const gradd_attn_t *p, bool backward) {
    int64_t tasks = most_tasks(p, backward);
    int64_t threads = p->threads > 0 ? p->threads : gradd_cpu_threads();
    return (int)(tasks < threads ? tasks : threads);
}

static size_t share(const gradd_attn_t *p, bool backward) {
    workspace_t_f32 w32;
    workspace_t_f64 w64;
    if (p->dtype == GRADD_DT_F64) return share_f64(p, backward, NULL, &w64) * sizeof(double);
    return share_f32(p, backward, NULL, &w32) * sizeof(float);
}

size_t gradd_attn_workspace(const gradd_attn_t *p, bool backward) {
    return share(p, backward) * (size_t)slots(p, backward);
}

/* ---- tasks ----------------------------------------------------------------------------------- */

typedef struct attention_job_s {
    const gradd_attn_t *p;
    char *workspace;
    size_t share; /* bytes per thread */
    bool backward, pairs;
    int threads;
} attention_job_t;

typedef void (*task_fn)(const attention_job_t *job, int64_t task, void *workspace);

static attention_job_t make_job(const gradd_attn_t *p, void *workspace, bool backward) {
    return (attention_job_t){.p = p,
                             .workspace = workspace,
                             .share = share(p, backward),
                             .backward = backward,
                             .pairs = p->pairs,
                             .threads = slots(p, backward)};
}

/* The n-th block of queries. */
static attn_block_t nth_block(const gradd_attn_t *p, int64_t task) {
    const int64_t blocks = blocks_of(p->n_q, TILE), head = task / blocks;
    const int64_t first = task % blocks * TILE;
    return (attn_block_t){head / p->heads, head % p->heads, first,
                          p->n_q - first < TILE ? p->n_q - first : TILE};
}

#define TASKS(S)                                                                                   \
    static void forward_task_##S(const attention_job_t *job, int64_t task, void *workspace) {      \
        const attn_block_t block = nth_block(job->p, task);                                        \
        forward_block_##S(job->p, &block, workspace);                                              \
    }                                                                                              \
                                                                                                   \
    /* all heads of keys that share elements of dbias, or one head of keys */                      \
    static void heads_task_##S(const attention_job_t *job, int64_t task, void *workspace) {        \
        const gradd_attn_t *p = job->p;                                                            \
        const bool by_batch = !p->dbias || p->bias.batch, by_head = !p->dbias || p->bias.head;     \
        const int64_t columns = by_head ? p->kv_heads : 1;                                         \
        const int64_t row = task / columns, column = task % columns;                               \
        const int64_t last_b = by_batch ? row + 1 : p->batch;                                      \
        const int64_t last_h = by_head ? column + 1 : p->kv_heads;                                 \
        for (int64_t b = by_batch ? row : 0; b < last_b; b++)                                      \
            for (int64_t h = by_head ? column : 0; h < last_h; h++) {                              \
                const attn_block_t keys = {b, h, 0, p->n_k};                                       \
                backward_keys_##S(p, &keys, BY_QUERY | BY_KEY, workspace);                         \
            }                                                                                      \
    }                                                                                              \
                                                                                                   \
    static void keys_task_##S(const attention_job_t *job, int64_t task, void *workspace) {         \
        const gradd_attn_t *p = job->p;                                                            \
        const int64_t parts = blocks_of(p->n_k, KEYS_PER_TASK), head = task / parts;               \
        const int64_t first = task % parts * KEYS_PER_TASK, rest = p->n_k - first;                 \
        const attn_block_t keys = {head / p->kv_heads, head % p->kv_heads, first,                  \
                                   rest < KEYS_PER_TASK ? rest : KEYS_PER_TASK};                   \
        backward_keys_##S(p, &keys, BY_KEY, workspace);                                            \
    }                                                                                              \
                                                                                                   \
    static void queries_task_##S(const attention_job_t *job, int64_t task, void *workspace) {      \
        span_t_##S s = {.block = nth_block(job->p, task), .to = job->p->n_k, .what = BY_QUERY};    \
        backward_block_##S(job->p, &s, workspace);                                                 \
    }                                                                                              \
                                                                                                   \
    static void compute_##S(const attention_job_t *job, task_fn fn, int64_t first, int64_t end) {  \
        _Pragma("omp parallel num_threads(job->threads) if (end - first > 1)") {                   \
            workspace_t_##S w;                                                                     \
            void *mine = job->workspace + job->share * (size_t)omp_get_thread_num();               \
            share_##S(job->p, job->backward, mine, &w);                                            \
            w.pairs = job->pairs;                                                                  \
            _Pragma("omp for schedule(dynamic)") for (int64_t task = first; task < end; task++)    \
                fn(job, task, &w);                                                                 \
        }                                                                                          \
    }

TASKS(f32)
TASKS(f64)

/* ---- entry points ---------------------------------------------------------------------------- */

/* Tasks of one kind; those of several kinds are done one kind after the other. */
typedef struct stage_s {
    task_fn f32, f64;
    int64_t tasks;
} stage_t;

enum { STAGES = 2 };

/* Returns how many there are. */
static int list_stages(const gradd_attn_t *p, bool backward, int threads, stage_t stages[STAGES]) {
    const int64_t queries = most_tasks(p, false);
    const int64_t keys = p->batch * p->kv_heads * blocks_of(p->n_k, KEYS_PER_TASK);
    const int64_t rows = p->dbias && !p->bias.batch ? 1 : p->batch;
    const int64_t heads = rows * (p->dbias && !p->bias.head ? 1 : p->kv_heads);
    int n = 0;
    if (!backward) {
        stages[0] = (stage_t){forward_task_f32, forward_task_f64, queries};
        return 1;
    }
    if (p->dbias || heads >= threads) {
        stages[0] = (stage_t){heads_task_f32, heads_task_f64, heads};
        return 1;
    }
    if (p->dk.data || p->dv.data) stages[n++] = (stage_t){keys_task_f32, keys_task_f64, keys};
    if (p->dq.data) stages[n++] = (stage_t){queries_task_f32, queries_task_f64, queries};
    return n;
}

/* Parts are made of turns, in each of which all threads have a task. */
static int64_t turns_of(const stage_t *stage, int threads) {
    return (stage->tasks + threads - 1) / threads;
}

int gradd_attn_parts(const gradd_attn_t *p, bool backward, int parts) {
    stage_t stages[STAGES];
    gradd_attn_t all = *p; /* results are not known yet: a part of what is left out has no work */
    const int threads = slots(p, backward);
    int64_t turns = 0;
    if (!most_tasks(p, backward)) return 0;
    all.dq.data = all.dk.data = all.dv.data = stages;
    for (int i = 0, n = list_stages(&all, backward, threads, stages); i < n; i++)
        turns += turns_of(&stages[i], threads);
    return parts < turns ? parts : (int)turns;
}

static int64_t clamp(int64_t at, int64_t most) {
    return at < 0 ? 0 : at < most ? at : most;
}

/* Those of the part. */
static gradd_status_t run_stages(const gradd_attn_t *p, bool backward, void *workspace) {
    stage_t stages[STAGES];
    if (!most_tasks(p, backward)) return GRADD_OK;
    const attention_job_t job = make_job(p, workspace, backward);
    const int n = list_stages(p, backward, job.threads, stages);
    int64_t all = 0, before = 0;
    for (int i = 0; i < n; i++)
        all += turns_of(&stages[i], job.threads);
    const int64_t parts = p->parts > 1 ? p->parts : 1;
    const int64_t from = all * p->part / parts, to = all * (p->part + 1) / parts;
    for (int i = 0; i < n; i++) {
        const int64_t first = clamp((from - before) * job.threads, stages[i].tasks);
        const int64_t end = clamp((to - before) * job.threads, stages[i].tasks);
        before += turns_of(&stages[i], job.threads);
        if (first >= end) continue;
        if (p->dtype == GRADD_DT_F64)
            compute_f64(&job, stages[i].f64, first, end);
        else
            compute_f32(&job, stages[i].f32, first, end);
    }
    return GRADD_OK;
}

gradd_status_t gradd_attn_forward(const gradd_attn_t *p, void *workspace) {
    return run_stages(p, false, workspace);
}

gradd_status_t gradd_attn_backward(const gradd_attn_t *p, void *workspace) {
    return run_stages(p, true, workspace);
}
