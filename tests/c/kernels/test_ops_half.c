/* The operator driver in bf16 and f16: every case of every operator that a kernel runs in that
 * half, without a list of its own.
 *
 * forward: the kernel on rounded inputs against the operator's plain loop in f64 on the same
 * inputs; the result may differ by its own rounding and a little of f32 arithmetic, and is infinite
 * where rounding makes it so. One that multiplies bf16 where the processor can may differ from
 * that, and rounds on the way. It repeats to the bit and may overwrite the inputs that its row
 * names. gradient: the rule in the half, whose operators run as in a graph (natively, or in f32
 * between casts), against the rule in f64, with and without the processor's products. Inputs of a
 * case whose position takes no half (statistics) are f32. GRADD_TEST_OP=Name restricts both to one
 * operator. */
#include "kernels/contract/registry.h"
#include "kernels/cpu/attention/attention_pairs.h"
#include "kernels/cpu/half.h"
#include "kernels/describe/dispatch.h"
#include "tests/c/eager.h"
#include "tests/c/tested_device.h"
#include "tests/test.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct half_job_s {
    const gradd_op_t *op;
    const gradd_case_t *spec;
    gradd_case_data_t data;
    gradd_view_t exact[GRADD_OP_MAX_IN]; /* the inputs in f64 */
    eager_t e, e64;
    eager_call_t call, call64;
} half_job_t;

static int failures, checked, native;
static gradd_dtype_t half = GRADD_DT_BF16; /* that runs now */

/* Half of the last place, relative. */
static double rounding(gradd_dtype_t dtype) {
    return dtype == GRADD_DT_F16 ? 0x1p-11 : 0x1p-8;
}

static gradd_view_t converted(gradd_case_data_t *heap, const gradd_view_t *from,
                              gradd_dtype_t dtype) {
    gradd_view_t to = {.type = from->type};
    to.type.dtype = dtype;
    to.data = gradd_case_alloc(heap, (size_t)gradd_type_bytes(&to.type) + 64);
    for (int64_t i = 0, n = gradd_type_count(&to.type); i < n; i++) {
        double x = eager_element(from, i);
        if (dtype == GRADD_DT_F64)
            ((double *)to.data)[i] = x;
        else if (dtype == GRADD_DT_F32)
            ((float *)to.data)[i] = (float)x;
        else
            gradd_half_put((uint16_t *)to.data + i, dtype, (float)x);
    }
    return to;
}

/* *out_any: an input is a half in the end */
static gradd_status_t open_job(half_job_t *job, bool *out_any) {
    GRADD_TRY(gradd_case_parse(job->spec->text, half, 42, &job->data));
    gradd_case_data_t *d = &job->data;
    *out_any = false;
    for (int i = 0; i < d->n_in; i++) {
        job->exact[i] = d->in[i];
        const gradd_dtype_t own = d->in[i].type.dtype; /* a case may name the other */
        if (!gradd_dtype_is_half(own)) continue;
        job->exact[i] = converted(d, &d->in[i], GRADD_DT_F64);
        if (eager_takes(job->op, i, own))
            *out_any = true;
        else
            d->in[i] = converted(d, &d->in[i], GRADD_DT_F32);
    }
    eager_begin(&job->e);
    eager_begin(&job->e64);
    job->call = (eager_call_t){
        .op = job->op,
        .attrs = {d->attrs, d->n_attrs},
        .in = d->in,
        .known = d->known,
        .n_in = d->n_in,
        .n_out = d->n_out ? d->n_out : job->op->min_out,
        .overwrite = -1
    };
    *out_any &= !eager_widens(&job->call);
    job->call64 = job->call;
    job->call64.in = job->exact;
    job->call64.ref = true;
    return GRADD_OK;
}

static void close_job(half_job_t *job) {
    eager_end(&job->e);
    eager_end(&job->e64);
    gradd_case_free(&job->data);
}

/* tol is relative to the entry, or to `scale` if that is larger. */
static gradd_status_t agree(const gradd_view_t *a, const gradd_view_t *b, double tol, double scale,
                            const char *what) {
    if (!gradd_type_same_shape(&a->type, &b->type))
        return GRADD_FAIL(TENSOR, "%s: shapes differ", what);
    for (int64_t i = 0, n = gradd_type_count(&a->type); i < n; i++) {
        double x = eager_element(a, i), y = eager_element(b, i);
        if (x == y || (x != x && y != y)) continue;
        if (a->type.dtype == GRADD_DT_F16 && isinf(x) && x * y > 0 && fabs(y) * (1 + tol) >= 65519)
            continue; /* nothing is larger */
        if (!(fabs(x - y) <= tol * fmax(fabs(y), scale) + 3e-5))
            return GRADD_FAIL(TENSOR, "%s: element %lld is %.9g, expected %.9g", what, (long long)i,
                              x, y);
    }
    return GRADD_OK;
}

static gradd_status_t same(const gradd_view_t *a, const gradd_view_t *b, const char *what) {
    size_t bytes = (size_t)gradd_type_bytes(&a->type);
    if (!gradd_type_equal(&a->type, &b->type) || (bytes && memcmp(a->data, b->data, bytes)))
        return GRADD_FAIL(TENSOR, "%s: bits differ", what);
    return GRADD_OK;
}

static gradd_status_t check_again(half_job_t *job, const eager_call_t *call,
                                  const gradd_view_t *out, const char *what) {
    gradd_view_t got[GRADD_OP_MAX_OUT];
    GRADD_TRY(eager_call(&job->e, call, got));
    for (int j = 0; j < call->n_out; j++)
        if (got[j].data && out[j].data) GRADD_TRY(same(&got[j], &out[j], what));
    return GRADD_OK;
}

static double largest(const gradd_view_t *v) {
    double most = 0;
    for (int64_t i = 0, n = gradd_type_count(&v->type); i < n; i++)
        if (isfinite(eager_element(v, i))) most = fmax(most, fabs(eager_element(v, i)));
    return most;
}

/* Against f64. `narrow` is the result of f32 arithmetic, `out` that of the processor's products. */
static gradd_status_t check_values(half_job_t *job, const gradd_view_t *narrow,
                                   const gradd_view_t *out) {
    gradd_view_t want[GRADD_OP_MAX_OUT];
    GRADD_TRY(eager_call(&job->e64, &job->call64, want));
    for (int j = 0; j < job->call.n_out; j++) {
        if (!out[j].data || !want[j].data) continue;
        if (job->spec->bf16_tol > 0) {
            const double most = fmax(largest(&want[j]), 1e-3);
            const double tol = job->spec->bf16_tol * rounding(half) * 0x1p8;
            GRADD_TRY(agree(&out[j], &want[j], tol, most, "f64, rounded inside"));
            continue;
        }
        const bool rounded = gradd_dtype_is_half(out[j].type.dtype);
        const double tol = job->spec->tol + (rounded ? rounding(out[j].type.dtype) : 3e-5);
        GRADD_TRY(agree(&narrow[j], &want[j], tol, 0, "f64"));
        if (!memcmp(narrow[j].data, out[j].data, (size_t)gradd_type_bytes(&out[j].type))) continue;
        native++;
        GRADD_TRY(agree(&out[j], &want[j], tol, rounded ? largest(&want[j]) : 1,
                        "f64, with products of bf16"));
    }
    return GRADD_OK;
}

static gradd_status_t check_forward(half_job_t *job) {
    gradd_view_t out[GRADD_OP_MAX_OUT], narrow[GRADD_OP_MAX_OUT];
    omp_set_num_threads(tested_threads(2));
    gradd_narrow = true;
    gradd_status_t status = eager_call(&job->e, &job->call, narrow);
    gradd_narrow = false;
    GRADD_TRY(status);
    GRADD_TRY(eager_call(&job->e, &job->call, out));
    GRADD_TRY(check_again(job, &job->call, out, "second run"));
    for (int k = 0; k < job->call.n_in && k < 32; k++) {
        eager_call_t call = job->call;
        call.overwrite = k;
        const gradd_kernel_t *kernel = eager_kernel(&call);
        if (kernel && (kernel->inplace >> k & 1) &&
            gradd_type_equal(&call.in[k].type, &out[0].type))
            GRADD_TRY(check_again(job, &call, out, "in place"));
    }
    return job->spec->tol < 0 ? GRADD_OK : check_values(job, narrow, out); /* < 0: random numbers */
}

/* ---- gradients ---- */

typedef struct half_diff_s {
    gradd_view_t out[GRADD_OP_MAX_OUT], out64[GRADD_OP_MAX_OUT];
    gradd_val_t in[GRADD_OP_MAX_IN], dout[GRADD_OP_MAX_OUT], din[GRADD_OP_MAX_IN];
    gradd_val_t in64[GRADD_OP_MAX_IN], dout64[GRADD_OP_MAX_OUT], din64[GRADD_OP_MAX_IN];
    bool need[GRADD_OP_MAX_IN];
} half_diff_t;

/* The same weights on both sides, exact in the half. */
static void add_weights(half_job_t *job, half_diff_t *d, int j) {
    gradd_view_t flat = {.type = d->out[j].type};
    flat.type.dtype = GRADD_DT_F64;
    int64_t n = gradd_type_count(&flat.type);
    double *w = gradd_case_alloc(&job->e.heap, (size_t)gradd_type_bytes(&flat.type) + 64);
    for (int64_t i = 0; i < n; i++)
        w[i] = 0.25 + fmod(0.6180339887 * (double)(i + 1) + 0.37 * j, 1.0);
    flat.data = w;
    gradd_view_t narrow = converted(&job->e.heap, &flat, half);
    d->dout[j] = eager_add(&job->e, converted(&job->e.heap, &narrow, d->out[j].type.dtype), false);
    d->dout64[j] = eager_add(&job->e64, converted(&job->e64.heap, &narrow, GRADD_DT_F64), false);
}

static gradd_status_t compare_gradients(half_job_t *job, const half_diff_t *d) {
    for (int i = 0; i < job->call.n_in; i++) {
        if (!d->need[i]) continue;
        if ((d->din[i] == GRADD_NONE) != (d->din64[i] == GRADD_NONE))
            return GRADD_FAIL(TENSOR, "gradient %d is missing or superfluous", i);
        if (d->din[i] == GRADD_NONE) continue;
        const gradd_view_t *got = &job->e.value[d->din[i]];
        if (!gradd_type_equal(&got->type, &job->data.in[i].type))
            return GRADD_FAIL(TENSOR, "gradient %d is %s", i, gradd_dtype_name(got->type.dtype));
        const gradd_view_t *want = &job->e64.value[d->din64[i]];
        GRADD_TRY(agree(got, want, 8 * rounding(got->type.dtype), fmax(1, largest(want)),
                        "gradient in f64"));
    }
    return GRADD_OK;
}

static gradd_status_t check_gradient(half_job_t *job) {
    static half_diff_t d;
    memset(&d, 0, sizeof d);
    bool any = false;
    if ((job->op->flags & GRADD_OP_NO_GRAD) || job->spec->grad_tol < 0) return GRADD_OK;
    GRADD_TRY(eager_call(&job->e, &job->call, d.out));
    job->call64.ref = false;
    GRADD_TRY(eager_call(&job->e64, &job->call64, d.out64));
    for (int i = 0; i < job->call.n_in; i++) {
        const gradd_view_t *x = &job->data.in[i];
        d.need[i] = job->exact[i].type.dtype == GRADD_DT_F64 && x->type.dtype != GRADD_DT_F64 &&
                    !(i < 32 && (job->op->no_diff | job->op->no_rule) >> i & 1);
        any |= d.need[i];
        d.in[i] = x->type.dtype ? eager_add(&job->e, *x, job->data.known[i]) : GRADD_NONE;
        d.in64[i] =
            x->type.dtype ? eager_add(&job->e64, job->exact[i], job->data.known[i]) : GRADD_NONE;
    }
    bool floats = false;
    for (int j = 0; j < job->call.n_out; j++) {
        d.dout[j] = d.dout64[j] = GRADD_NONE;
        bool saved = j && d.out[j].type.dtype == GRADD_DT_F32; /* a statistic has no gradient */
        if (!gradd_dtype_is_float(d.out[j].type.dtype) || saved) continue;
        add_weights(job, &d, j);
        floats = true;
    }
    if (!any || !floats) return GRADD_OK;
    GRADD_TRY(eager_grad(&job->e, &job->call, &(eager_diff_t){d.out, d.in, d.dout, d.need}, d.din));
    GRADD_TRY(eager_grad(&job->e64, &job->call64,
                         &(eager_diff_t){d.out64, d.in64, d.dout64, d.need}, d.din64));
    return compare_gradients(job, &d);
}

/* ---- tests ---- */

static void every_case(gradd_status_t (*fn)(half_job_t *job)) {
    const char *only = tested_op();
    static half_job_t job;
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++) {
            const gradd_op_t *op = &gradd_op_families[f]->v[i];
            if (only && strcmp(only, op->name)) continue;
            for (const gradd_case_t *spec = op->cases; spec && spec->text; spec++) {
                bool any = false;
                job = (half_job_t){.op = op, .spec = spec};
                gradd_status_t status = open_job(&job, &any);
                if (!status && any) status = fn(&job);
                close_job(&job);
                checked += any;
                if (!status) continue;
                failures++;
                fprintf(stderr, "%s \"%s\" in %s: %s (%s)\n", op->name, spec->text,
                        gradd_dtype_name(half), gradd_error_message(), gradd_error_where());
            }
        }
}

TEST_LIMIT(forward_in_bf16_agrees_with_f64, 60) {
    every_case(check_forward);
    printf("%d cases, %d results with products of bf16\n", checked, native);
    CHECK(native || !attn_pairs_ready() || tested_op());
    CHECK(checked > 300 || tested_op());
    CHECK_EQ_INT(failures, 0);
    tested_cases(checked);
}

TEST_LIMIT(forward_in_f16_agrees_with_f64, 60) {
    half = GRADD_DT_F16;
    every_case(check_forward);
    printf("%d cases\n", checked);
    CHECK(checked > 300 || tested_op());
    CHECK_EQ_INT(failures, 0);
    tested_cases(checked);
}

TEST_LIMIT(gradient_in_f16_agrees_with_f64, 60) {
    half = GRADD_DT_F16;
    omp_set_num_threads(tested_threads(2));
    every_case(check_gradient);
    printf("%d cases\n", checked);
    CHECK_EQ_INT(failures, 0);
    tested_cases(checked);
}

TEST_LIMIT(gradient_in_bf16_agrees_with_f64, 60) {
    omp_set_num_threads(tested_threads(2));
    every_case(check_gradient);
    omp_set_num_threads(tested_threads(1));
    gradd_narrow = true;
    every_case(check_gradient);
    gradd_narrow = false;
    printf("%d cases\n", checked);
    CHECK_EQ_INT(failures, 0);
    tested_cases(checked);
}
