/* f32 and bf16 matrix products through the C API of oneDNN 3.x.
 *
 * A primitive is created once (which generates code), with memory objects whose pointers are
 * replaced at each call. Its scratch memory is the caller's. */
#include "kernels/cpu/gemm/gemm_impl.h"

#ifdef GRADD_NO_ONEDNN

const char *gradd_gemm_library(void) {
    return "blocked";
}

bool gradd_gemm_bf16_native(void) {
    return false;
}

gradd_status_t gradd_primitive_create(const gradd_gemm_t *g, gradd_primitive_t **out) {
    (void)g;
    *out = NULL;
    return GRADD_OK;
}

void gradd_primitive_destroy(gradd_primitive_t *p) {
    (void)p;
}

size_t gradd_primitive_workspace(const gradd_primitive_t *p) {
    (void)p;
    return 0;
}

gradd_status_t gradd_primitive_compute(const gradd_primitive_t *p, const void *a, const void *b,
                                       const void *bias, void *c, void *workspace) {
    (void)p, (void)a, (void)b, (void)bias, (void)c, (void)workspace;
    return GRADD_FAIL(INTERNAL, "built without oneDNN");
}

bool gradd_sgemm_fits(const gradd_gemm_t *g) {
    (void)g;
    return false;
}

gradd_status_t gradd_sgemm(const gradd_gemm_t *g, const gradd_gemm_operands_t *o,
                           gradd_k_range_t range, bool adds) {
    (void)g, (void)o, (void)range, (void)adds;
    return GRADD_FAIL(INTERNAL, "built without oneDNN");
}

#else

#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/onednn.h"

struct gradd_primitive_s {
    dnnl_primitive_t primitive;
    dnnl_stream_t stream; /* the calling thread */
    dnnl_memory_t a, b, bias, c, workspace;
    size_t workspace_bytes;
};

const char *gradd_gemm_library(void) {
    return gradd_dnnl_name();
}

/* Beyond these instructions oneDNN multiplies bf16 by its reference loops, or as f32. */
bool gradd_gemm_bf16_native(void) {
    const unsigned needed = dnnl_cpu_isa_avx512_core_bf16;
    return ((unsigned)dnnl_get_effective_cpu_isa() & needed) == needed;
}

void gradd_primitive_destroy(gradd_primitive_t *p) {
    if (!p) return;
    dnnl_memory_destroy(p->a);
    dnnl_memory_destroy(p->b);
    dnnl_memory_destroy(p->bias);
    dnnl_memory_destroy(p->c);
    dnnl_memory_destroy(p->workspace);
    dnnl_primitive_destroy(p->primitive);
    dnnl_stream_destroy(p->stream);
    free(p);
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
    /* The step of a dimension of 1 means nothing, but the library reads a layout out of it. */
    steps[n] = m->rows > 1 ? m->row_step : m->cols * m->col_step;
    steps[n + 1] = m->cols > 1 ? m->col_step : 1;
    GRADD_TRY_DNNL(
        dnnl_memory_desc_create_with_strides(out, n + 2, dims, gradd_dnnl_type(m->dtype), steps));
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
    const matrix_t c = {gradd_gemm_result(g), g->m, g->n, g->c_m ? g->c_m : g->n, 1};
    const matrix_t bias = {g->dtype, 1, g->n, g->n, 1};
    GRADD_TRY(describe(&d->a, g, g->a_batch, &a));
    GRADD_TRY(describe(&d->b, g, g->b_batch, &b));
    GRADD_TRY(describe(&d->c, g, c_batch, &c));
    if (g->has_bias) {
        static const int64_t none[GRADD_GEMM_BATCH_RANK];
        GRADD_TRY(describe(&d->bias, g, none, &bias));
    }
    GRADD_TRY_DNNL(dnnl_primitive_attr_create(&d->attr));
    GRADD_TRY_DNNL(dnnl_post_ops_create(&d->post));
    if (g->alpha != 1)
        GRADD_TRY_DNNL(
            dnnl_post_ops_append_eltwise(d->post, dnnl_eltwise_linear, (float)g->alpha, 0));
    if (g->accumulate)
        GRADD_TRY_DNNL(dnnl_post_ops_append_sum(d->post, 1, 0, dnnl_data_type_undef));
    GRADD_TRY_DNNL(dnnl_primitive_attr_set_post_ops(d->attr, d->post));
    GRADD_TRY_DNNL(dnnl_primitive_attr_set_scratchpad_mode(d->attr, dnnl_scratchpad_mode_user));
    return GRADD_OK;
}

static gradd_status_t make_memory(const gradd_gemm_t *g, const descs_t *d, dnnl_engine_t engine,
                                  gradd_primitive_t *p) {
    const_dnnl_memory_desc_t workspace =
        dnnl_primitive_desc_query_md(d->pd, dnnl_query_scratchpad_md, 0);
    p->workspace_bytes = dnnl_memory_desc_get_size(workspace);
    GRADD_TRY_DNNL(dnnl_memory_create(&p->a, d->a, engine, DNNL_MEMORY_NONE));
    GRADD_TRY_DNNL(dnnl_memory_create(&p->b, d->b, engine, DNNL_MEMORY_NONE));
    GRADD_TRY_DNNL(dnnl_memory_create(&p->c, d->c, engine, DNNL_MEMORY_NONE));
    GRADD_TRY_DNNL(dnnl_memory_create(&p->workspace, workspace, engine, DNNL_MEMORY_NONE));
    if (g->has_bias)
        GRADD_TRY_DNNL(dnnl_memory_create(&p->bias, d->bias, engine, DNNL_MEMORY_NONE));
    return GRADD_OK;
}

/* Leaves p->primitive NULL if oneDNN has nothing, or only its plain reference loops. */
static gradd_status_t build(const gradd_gemm_t *g, descs_t *d, gradd_primitive_t *p) {
    const char *kind = "";
    dnnl_engine_t engine;
    GRADD_TRY(gradd_dnnl_engine(&engine));
    GRADD_TRY(describe_all(g, d));
    dnnl_status_t status =
        dnnl_matmul_primitive_desc_create(&d->pd, engine, d->a, d->b, d->bias, d->c, d->attr);
    if (status == dnnl_unimplemented || status == dnnl_invalid_arguments) return GRADD_OK;
    if (status != dnnl_success) return gradd_dnnl_failed(status, "matmul description");
    GRADD_TRY_DNNL(dnnl_primitive_desc_query(d->pd, dnnl_query_impl_info_str, 0, &kind));
    if (!strncmp(kind, "ref", 3)) return GRADD_OK;
    GRADD_TRY(make_memory(g, d, engine, p));
    GRADD_TRY_DNNL(dnnl_stream_create(&p->stream, engine, dnnl_stream_default_flags));
    GRADD_TRY_DNNL(dnnl_primitive_create(&p->primitive, d->pd));
    return GRADD_OK;
}

gradd_status_t gradd_primitive_create(const gradd_gemm_t *g, gradd_primitive_t **out) {
    gradd_primitive_t *p = calloc(1, sizeof *p);
    if (!p) return GRADD_FAIL(NOMEM, "matrix product");
    descs_t d = {0};
    gradd_status_t status = build(g, &d, p);
    destroy_descs(&d);
    if (status || !p->primitive) {
        gradd_primitive_destroy(p);
        p = NULL;
    }
    if (!status) *out = p;
    return status;
}

size_t gradd_primitive_workspace(const gradd_primitive_t *p) {
    return p->workspace_bytes;
}

gradd_status_t gradd_primitive_compute(const gradd_primitive_t *p, const void *a, const void *b,
                                       const void *bias, void *c, void *workspace) {
    int n = 4;
    dnnl_exec_arg_t args[5] = {
        {DNNL_ARG_SRC,        p->a        },
        {DNNL_ARG_WEIGHTS,    p->b        },
        {DNNL_ARG_DST,        p->c        },
        {DNNL_ARG_SCRATCHPAD, p->workspace}
    };
    if (p->bias) args[n++] = (dnnl_exec_arg_t){DNNL_ARG_BIAS, p->bias};
    /* the library takes what it only reads as void * too */
    GRADD_TRY_DNNL(dnnl_memory_set_data_handle(p->a, (void *)(uintptr_t)a));
    GRADD_TRY_DNNL(dnnl_memory_set_data_handle(p->b, (void *)(uintptr_t)b));
    GRADD_TRY_DNNL(dnnl_memory_set_data_handle(p->c, c));
    GRADD_TRY_DNNL(dnnl_memory_set_data_handle(p->workspace, workspace));
    if (p->bias) GRADD_TRY_DNNL(dnnl_memory_set_data_handle(p->bias, (void *)(uintptr_t)bias));
    GRADD_TRY_DNNL(dnnl_primitive_execute(p->primitive, p->stream, n, args));
    GRADD_TRY_DNNL(dnnl_stream_wait(p->stream));
    return GRADD_OK;
}

/* One of the two steps is 1, and lines do not overlap. */
static bool is_matrix(int64_t rows, int64_t columns, int64_t row_step, int64_t column_step) {
    return (column_step == 1 && row_step >= columns) || (row_step == 1 && column_step >= rows);
}

bool gradd_sgemm_fits(const gradd_gemm_t *g) {
    return g->dtype == GRADD_DT_F32 && !g->batch_rank && is_matrix(g->m, g->k, g->a_m, g->a_k) &&
           is_matrix(g->k, g->n, g->b_k, g->b_n);
}

gradd_status_t gradd_sgemm(const gradd_gemm_t *g, const gradd_gemm_operands_t *o,
                           gradd_k_range_t range, bool adds) {
    const bool a_rows = g->a_k == 1 && g->a_m >= g->k, b_rows = g->b_n == 1 && g->b_k >= g->n;
    const float *a = (const float *)o->a + range.from * g->a_k;
    const float *b = (const float *)o->b + range.from * g->b_k;
    GRADD_TRY_DNNL(dnnl_sgemm(a_rows ? 'N' : 'T', b_rows ? 'N' : 'T', g->m, g->n,
                              range.to - range.from, (float)g->alpha, a, a_rows ? g->a_m : g->a_k,
                              b, b_rows ? g->b_k : g->b_n, adds, o->c, g->c_m ? g->c_m : g->n));
    return GRADD_OK;
}

#endif
