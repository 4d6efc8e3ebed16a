/* f32 and bf16 matrix products through the C API of oneDNN 3.x.
 *
 * Creating a primitive costs tens of microseconds to milliseconds (code is generated), so finished
 * ones are kept in a hash table under their whole description and the number of threads, together
 * with memory objects whose pointers are exchanged per call. The table is emptied when it is full:
 * a program sees a bounded set of shapes, and building one again is only slow, never wrong. */
#include "kernels/cpu/gemm_impl.h"

#ifdef GRADD_NO_ONEDNN

const char *gradd_gemm_library(void) {
    return "blocked";
}

bool gradd_gemm_bf16_native(void) {
    return false;
}

gradd_status_t gradd_gemm_onednn(const gradd_gemm_t *g, const void *a, const void *b,
                                 const void *bias, void *c, bool *done) {
    (void)g, (void)a, (void)b, (void)bias, (void)c;
    *done = false;
    return GRADD_OK;
}

#else

#include <dnnl.h>
#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 1024, MAX_ENTRIES = 2048 };

typedef struct key_s {
    gradd_gemm_t g;
    int64_t threads;
} gemm_key_t;

typedef struct entry_s {
    struct entry_s *next;
    gemm_key_t key;
    dnnl_primitive_t primitive; /* NULL: there is no fast implementation */
    dnnl_memory_t a, b, bias, c;
} entry_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static dnnl_engine_t engine;
static dnnl_stream_t stream;
static entry_t *table[BUCKETS];
static int n_entries;

const char *gradd_gemm_library(void) {
    static char text[32];
    const dnnl_version_t *v = dnnl_version();
    snprintf(text, sizeof text, "oneDNN %d.%d.%d", v->major, v->minor, v->patch);
    return text;
}

/* Beyond these instructions oneDNN multiplies bf16 by its reference loops, or as f32. */
bool gradd_gemm_bf16_native(void) {
    const unsigned needed = dnnl_cpu_isa_avx512_core_bf16;
    return ((unsigned)dnnl_get_effective_cpu_isa() & needed) == needed;
}

static gradd_status_t failed(dnnl_status_t status, const char *what) {
    if (status == dnnl_out_of_memory) return GRADD_FAIL(NOMEM, "oneDNN: %s", what);
    return GRADD_FAIL(INTERNAL, "oneDNN: %s failed with status %d", what, (int)status);
}
#define TRY_DNNL(expr)                                                                             \
    do {                                                                                           \
        dnnl_status_t dnnl_status_ = (expr);                                                       \
        if (dnnl_status_ != dnnl_success) return failed(dnnl_status_, #expr);                      \
    } while (0)

static void destroy(entry_t *e) {
    dnnl_memory_destroy(e->a);
    dnnl_memory_destroy(e->b);
    dnnl_memory_destroy(e->bias);
    dnnl_memory_destroy(e->c);
    dnnl_primitive_destroy(e->primitive);
    free(e);
}

static void empty_table(void) {
    for (int i = 0; i < BUCKETS; i++)
        for (entry_t *e = table[i], *next; e; e = next) {
            next = e->next;
            destroy(e);
        }
    memset(table, 0, sizeof table);
    n_entries = 0;
}

typedef struct descs_s {
    dnnl_memory_desc_t a, b, bias, c;
    dnnl_primitive_attr_t attr;
    dnnl_post_ops_t post;
    dnnl_primitive_desc_t pd;
} descs_t;

static void destroy_descs(descs_t *d) {
    dnnl_memory_desc_destroy(d->a);
    dnnl_memory_desc_destroy(d->b);
    dnnl_memory_desc_destroy(d->bias);
    dnnl_memory_desc_destroy(d->c);
    dnnl_post_ops_destroy(d->post);
    dnnl_primitive_attr_destroy(d->attr);
    dnnl_primitive_desc_destroy(d->pd);
}

static dnnl_data_type_t type_of(gradd_dtype_t dtype) {
    return dtype == GRADD_DT_BF16 ? dnnl_bf16 : dnnl_f32;
}

typedef struct matrix_s {
    gradd_dtype_t dtype;
    int64_t rows, cols, row_step, col_step;
} matrix_t;

/* Batch dimensions, then rows and columns. A stride of 0 is a dimension of 1, which broadcasts. */
static gradd_status_t describe(dnnl_memory_desc_t *out, const gradd_gemm_t *g,
                               const int64_t *batch_step, const matrix_t *m) {
    dnnl_dims_t dims, steps;
    int n = g->batch_rank;
    for (int i = 0; i < n; i++) {
        dims[i] = batch_step[i] ? g->batch[i] : 1;
        steps[i] = batch_step[i] ? batch_step[i] : m->rows * m->cols;
    }
    dims[n] = m->rows, dims[n + 1] = m->cols;
    steps[n] = m->row_step, steps[n + 1] = m->col_step;
    TRY_DNNL(dnnl_memory_desc_create_with_strides(out, n + 2, dims, type_of(m->dtype), steps));
    return GRADD_OK;
}

static gradd_status_t describe_all(const gradd_gemm_t *g, descs_t *d) {
    int64_t c_batch[GRADD_GEMM_BATCH_RANK], step = g->m * g->n;
    for (int i = g->batch_rank - 1; i >= 0; i--) {
        c_batch[i] = step;
        step *= g->batch[i];
    }
    const matrix_t a = {g->dtype, g->m, g->k, g->a_m, g->a_k};
    const matrix_t b = {g->dtype, g->k, g->n, g->b_k, g->b_n};
    const matrix_t c = {gradd_gemm_result(g), g->m, g->n, g->n, 1};
    const matrix_t bias = {g->dtype, 1, g->n, g->n, 1};
    GRADD_TRY(describe(&d->a, g, g->a_batch, &a));
    GRADD_TRY(describe(&d->b, g, g->b_batch, &b));
    GRADD_TRY(describe(&d->c, g, c_batch, &c));
    if (g->has_bias) {
        static const int64_t none[GRADD_GEMM_BATCH_RANK];
        GRADD_TRY(describe(&d->bias, g, none, &bias));
    }
    TRY_DNNL(dnnl_primitive_attr_create(&d->attr));
    TRY_DNNL(dnnl_post_ops_create(&d->post));
    if (g->alpha != 1)
        TRY_DNNL(dnnl_post_ops_append_eltwise(d->post, dnnl_eltwise_linear, (float)g->alpha, 0));
    if (g->accumulate) TRY_DNNL(dnnl_post_ops_append_sum(d->post, 1, 0, dnnl_data_type_undef));
    TRY_DNNL(dnnl_primitive_attr_set_post_ops(d->attr, d->post));
    return GRADD_OK;
}

/* Leaves e->primitive NULL if oneDNN has nothing, or only its plain reference loops. */
static gradd_status_t build(entry_t *e, descs_t *d) {
    const char *name = "";
    GRADD_TRY(describe_all(&e->key.g, d));
    dnnl_status_t status =
        dnnl_matmul_primitive_desc_create(&d->pd, engine, d->a, d->b, d->bias, d->c, d->attr);
    if (status == dnnl_unimplemented || status == dnnl_invalid_arguments) return GRADD_OK;
    if (status != dnnl_success) return failed(status, "matmul description");
    TRY_DNNL(dnnl_primitive_desc_query(d->pd, dnnl_query_impl_info_str, 0, &name));
    if (!strncmp(name, "ref", 3)) return GRADD_OK;
    TRY_DNNL(dnnl_memory_create(&e->a, d->a, engine, DNNL_MEMORY_NONE));
    TRY_DNNL(dnnl_memory_create(&e->b, d->b, engine, DNNL_MEMORY_NONE));
    TRY_DNNL(dnnl_memory_create(&e->c, d->c, engine, DNNL_MEMORY_NONE));
    if (e->key.g.has_bias)
        TRY_DNNL(dnnl_memory_create(&e->bias, d->bias, engine, DNNL_MEMORY_NONE));
    TRY_DNNL(dnnl_primitive_create(&e->primitive, d->pd));
    return GRADD_OK;
}

static uint64_t hash(const gemm_key_t *key) {
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof *key; i++)
        h = (h ^ ((const unsigned char *)key)[i]) * 0x100000001b3u;
    return h ^ h >> 32;
}

static gradd_status_t find(const gemm_key_t *key, entry_t **out) {
    entry_t **bucket = &table[hash(key) % BUCKETS];
    for (entry_t *e = *bucket; e; e = e->next)
        if (!memcmp(&e->key, key, sizeof *key)) {
            *out = e;
            return GRADD_OK;
        }
    if (!engine) {
        TRY_DNNL(dnnl_engine_create(&engine, dnnl_cpu, 0));
        TRY_DNNL(dnnl_stream_create(&stream, engine, dnnl_stream_default_flags));
    }
    if (n_entries >= MAX_ENTRIES) empty_table();
    entry_t *e = calloc(1, sizeof *e);
    if (!e) return GRADD_FAIL(NOMEM, "matrix product");
    descs_t d = {0};
    e->key = *key;
    gradd_status_t status = build(e, &d);
    destroy_descs(&d);
    if (status) {
        destroy(e);
        return status;
    }
    e->next = *bucket;
    *bucket = e;
    n_entries++;
    *out = e;
    return GRADD_OK;
}

static gradd_status_t execute(const entry_t *e, const void *a, const void *b, const void *bias,
                              void *c) {
    int n = 3;
    dnnl_exec_arg_t args[4] = {
        {DNNL_ARG_SRC,     e->a},
        {DNNL_ARG_WEIGHTS, e->b},
        {DNNL_ARG_DST,     e->c}
    };
    if (e->bias) args[n++] = (dnnl_exec_arg_t){DNNL_ARG_BIAS, e->bias};
    /* the library takes what it only reads as void * too */
    TRY_DNNL(dnnl_memory_set_data_handle(e->a, (void *)(uintptr_t)a));
    TRY_DNNL(dnnl_memory_set_data_handle(e->b, (void *)(uintptr_t)b));
    TRY_DNNL(dnnl_memory_set_data_handle(e->c, c));
    if (e->bias) TRY_DNNL(dnnl_memory_set_data_handle(e->bias, (void *)(uintptr_t)bias));
    TRY_DNNL(dnnl_primitive_execute(e->primitive, stream, n, args));
    TRY_DNNL(dnnl_stream_wait(stream));
    return GRADD_OK;
}

gradd_status_t gradd_gemm_onednn(const gradd_gemm_t *g, const void *a, const void *b,
                                 const void *bias, void *c, bool *done) {
    gemm_key_t key;
    entry_t *e = NULL;
    memset(&key, 0, sizeof key); /* padding is part of the key */
    memcpy(&key.g, g, sizeof *g);
    key.threads = omp_get_max_threads();
    pthread_mutex_lock(&lock);
    gradd_status_t status = find(&key, &e);
    *done = !status && e->primitive;
    if (*done) status = execute(e, a, b, bias, c);
    pthread_mutex_unlock(&lock);
    return status;
}

#endif
