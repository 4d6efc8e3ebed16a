/* Expansions: every case of every row that has one, without a list of its own. Comparisons with
 * torch at edges (masked rows, saturation) are in tests/python/values/test_expansion_edges.py.
 *
 * forward: the operator written out in simpler ones, down to those that have no expansion, gives
 * all outputs of the kernel (of a composite: of its own expansion by one level), in f32 and f64.
 * gradient: in f64, through the expansion by the rules of the simpler operators, against the row's
 * own rule. bf16 and f16: the expansion on such inputs against the one on the same inputs in f32.
 * GRADD_TEST_OP=Name restricts all to one operator. */
#include "kernels/contract/registry.h"
#include "kernels/cpu/half.h"
#include "tests/c/eager.h"
#include "tests/c/tested_device.h"
#include "tests/test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct expand_job_s {
    const gradd_op_t *op;
    const gradd_case_t *spec;
    gradd_case_data_t data;
    eager_t e;
    eager_call_t call;
    gradd_val_t in[GRADD_OP_MAX_IN];
} expand_job_t;

static int failures, checked;

static double largest(const gradd_view_t *v) {
    double most = 0;
    for (int64_t i = 0, n = gradd_type_count(&v->type); i < n; i++)
        if (isfinite(eager_element(v, i))) most = fmax(most, fabs(eager_element(v, i)));
    return most;
}

/* tol is relative to the entry, or to `least` if that is larger. */
static gradd_status_t agree(const gradd_view_t *a, const gradd_view_t *b, double tol, double least,
                            const char *what) {
    if (!gradd_type_same_shape(&a->type, &b->type))
        return GRADD_FAIL(TENSOR, "%s: shapes differ", what);
    for (int64_t i = 0, n = gradd_type_count(&a->type); i < n; i++) {
        double x = eager_element(a, i), y = eager_element(b, i);
        if (x == y || (x != x && y != y)) continue;
        if (!(fabs(x - y) <= tol * fmax(least, fabs(y))))
            return GRADD_FAIL(TENSOR, "%s: element %lld is %.9g, expected %.9g", what, (long long)i,
                              x, y);
    }
    return GRADD_OK;
}

static void add_inputs(expand_job_t *job, eager_t *e, const gradd_view_t *in, gradd_val_t *out) {
    for (int i = 0; i < job->call.n_in; i++)
        out[i] = in[i].type.dtype ? eager_add(e, in[i], job->data.known[i]) : GRADD_NONE;
}

/* A row with a case that leaves outputs out has them here all the same. */
static int all_outputs(const expand_job_t *job) {
    const int n = job->data.n_out ? job->data.n_out : job->op->min_out;
    return job->op->max_out > n && !(job->op->flags & GRADD_OP_RANDOM) &&
                   !gradd_op_is_composite(job->op)
               ? job->op->max_out
               : n;
}

static gradd_status_t open_job(expand_job_t *job, gradd_dtype_t float_as) {
    GRADD_TRY(gradd_case_parse(job->spec->text, float_as, 42, &job->data));
    eager_begin(&job->e);
    job->call = (eager_call_t){
        .op = job->op,
        .attrs = {job->data.attrs, job->data.n_attrs},
        .in = job->data.in,
        .known = job->data.known,
        .n_in = job->data.n_in,
        .overwrite = -1
    };
    job->call.n_out = all_outputs(job);
    return GRADD_OK;
}

static void close_job(expand_job_t *job) {
    eager_end(&job->e);
    gradd_case_free(&job->data);
}

/* Down to what has no expansion. */
static gradd_status_t expand_fully(eager_t *e, const eager_call_t *call, const gradd_val_t *in,
                                   gradd_val_t *out) {
    e->expand_all = true;
    gradd_status_t status = eager_expand(e, call, in, out);
    e->expand_all = false;
    return status;
}

static gradd_status_t check_forward(expand_job_t *job) {
    gradd_view_t want[GRADD_OP_MAX_OUT];
    gradd_val_t out[GRADD_OP_MAX_OUT];
    const bool narrow = job->call.in[0].type.dtype == GRADD_DT_F32;
    double tol = job->spec->tol > 0 ? job->spec->tol : 1e-5;
    if (!narrow) tol = tol < 1e-9 ? tol : 1e-9;
    GRADD_TRY(eager_call(&job->e, &job->call, want));
    add_inputs(job, &job->e, job->call.in, job->in);
    GRADD_TRY(expand_fully(&job->e, &job->call, job->in, out));
    for (int j = 0; j < job->call.n_out; j++) {
        if (!want[j].type.dtype) continue;
        const gradd_view_t *got = &job->e.value[out[j]];
        if (!gradd_type_equal(&got->type, &want[j].type))
            return GRADD_FAIL(TENSOR, "output %d has another type", j);
        GRADD_TRY(agree(got, &want[j], tol, 1, "expansion"));
    }
    return GRADD_OK;
}

/* ---- gradients ---- */

typedef struct expand_diff_s {
    gradd_view_t out[GRADD_OP_MAX_OUT];
    gradd_val_t dout[GRADD_OP_MAX_OUT], din[GRADD_OP_MAX_IN];
    gradd_val_t expanded[GRADD_OP_MAX_OUT], through[GRADD_OP_MAX_IN];
    bool need[GRADD_OP_MAX_IN];
} expand_diff_t;

static gradd_view_t weights_like(expand_job_t *job, const gradd_type_t *type, int j) {
    gradd_view_t w = {.type = *type};
    w.data = gradd_case_alloc(&job->e.heap, (size_t)gradd_type_bytes(type) + 64);
    for (int64_t i = 0, n = gradd_type_count(type); i < n; i++)
        ((double *)w.data)[i] = 0.25 + fmod(0.6180339887 * (double)(i + 1) + 0.37 * j, 1.0);
    return w;
}

/* No gradient and a gradient of zeros are the same. */
static gradd_status_t same_gradient(expand_job_t *job, const expand_diff_t *d, int i) {
    const gradd_view_t *row = d->din[i] < 0 ? NULL : &job->e.value[d->din[i]];
    const gradd_view_t *got = d->through[i] < 0 ? NULL : &job->e.value[d->through[i]];
    if (!row || !got) {
        const gradd_view_t *other = row ? row : got;
        if (!other || largest(other) == 0) return GRADD_OK;
        return GRADD_FAIL(TENSOR, "gradient %d is missing or superfluous", i);
    }
    return agree(got, row, 1e-8, fmax(1, largest(row)), "gradient through the expansion");
}

/* Outputs that a rule refuses a gradient for are what it saves. */
static gradd_status_t check_gradient(expand_job_t *job) {
    static expand_diff_t d;
    memset(&d, 0, sizeof d);
    if (job->op->flags & GRADD_OP_NO_GRAD) return GRADD_OK;
    if (!gradd_op_is_composite(job->op)) job->call.n_out = job->op->min_out;
    GRADD_TRY(eager_call(&job->e, &job->call, d.out));
    add_inputs(job, &job->e, job->call.in, job->in);
    for (int i = 0; i < job->call.n_in; i++)
        d.need[i] = job->call.in[i].type.dtype == GRADD_DT_F64 && gradd_op_carries(job->op, i) &&
                    !(i < 32 && job->op->no_rule >> i & 1);
    if (d.out[0].type.dtype != GRADD_DT_F64) return GRADD_OK; /* a case with types of its own */
    for (int j = 0; j < job->call.n_out; j++)
        d.dout[j] = eager_add(&job->e, weights_like(job, &d.out[j].type, j), false);
    GRADD_TRY(
        eager_grad(&job->e, &job->call, &(eager_diff_t){d.out, job->in, d.dout, d.need}, d.din));
    job->e.record = true;
    gradd_status_t status = expand_fully(&job->e, &job->call, job->in, d.expanded);
    job->e.record = false;
    GRADD_TRY(status);
    const eager_ends_t ends = {d.expanded, d.dout, job->call.n_out,
                               job->in,    d.need, job->call.n_in};
    GRADD_TRY(eager_backward(&job->e, &ends, d.through));
    for (int i = 0; i < job->call.n_in; i++)
        if (d.need[i]) GRADD_TRY(same_gradient(job, &d, i));
    return GRADD_OK;
}

/* ---- bf16 and f16 ---- */

static gradd_view_t widened(expand_job_t *job, const gradd_view_t *v) {
    gradd_view_t wide = {.type = v->type};
    wide.type.dtype = GRADD_DT_F32;
    wide.data = gradd_case_alloc(&job->data, (size_t)gradd_type_bytes(&wide.type) + 64);
    gradd_half_widen(wide.data, v->data, v->type.dtype, gradd_type_count(&v->type));
    return wide;
}

/* Operands that the operator takes in f32 only, beside halves, such as statistics, are f32. */
static gradd_status_t check_half(expand_job_t *job) {
    gradd_view_t exact[GRADD_OP_MAX_IN];
    gradd_val_t in[GRADD_OP_MAX_IN], out[GRADD_OP_MAX_OUT], want[GRADD_OP_MAX_OUT];
    eager_call_t wide = job->call;
    for (int i = 0; i < job->call.n_in; i++) {
        exact[i] = job->data.in[i];
        if (!gradd_dtype_is_half(exact[i].type.dtype)) continue;
        const gradd_dtype_t half = exact[i].type.dtype;
        exact[i] = widened(job, &job->data.in[i]);
        if (!eager_takes(job->op, i, half)) job->data.in[i] = exact[i];
    }
    wide.in = exact;
    add_inputs(job, &job->e, job->call.in, job->in);
    add_inputs(job, &job->e, exact, in);
    GRADD_TRY(expand_fully(&job->e, &job->call, job->in, out));
    GRADD_TRY(expand_fully(&job->e, &wide, in, want));
    for (int j = 0; j < job->call.n_out; j++) {
        if (out[j] == GRADD_NONE) continue;
        const gradd_view_t *got = &job->e.value[out[j]];
        const gradd_dtype_t dtype = got->type.dtype;
        const double tol = dtype == GRADD_DT_BF16 ? 0x1p-8 : dtype == GRADD_DT_F16 ? 0x1p-11 : 1e-6;
        GRADD_TRY(agree(got, &job->e.value[want[j]], tol, 1e-3, "halves"));
    }
    return GRADD_OK;
}

/* ---- tests ---- */

static void every_case(gradd_status_t (*fn)(expand_job_t *job), gradd_dtype_t float_as) {
    const char *only = tested_op();
    static expand_job_t job;
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++) {
            const gradd_op_t *op = &gradd_op_families[f]->v[i];
            if (!op->expand || (only && strcmp(only, op->name))) continue;
            for (const gradd_case_t *spec = op->cases; spec->text; spec++) {
                job = (expand_job_t){.op = op, .spec = spec};
                gradd_status_t status = open_job(&job, float_as);
                if (!status) status = fn(&job);
                close_job(&job);
                checked++;
                /* a node that an operator says it cannot write out */
                if (!status || strstr(gradd_error_message(), "has no expansion")) continue;
                failures++;
                fprintf(stderr, "%s \"%s\" in %s: %s (%s)\n", op->name, spec->text,
                        gradd_dtype_name(float_as), gradd_error_message(), gradd_error_where());
            }
        }
}

TEST_LIMIT(an_expansion_has_the_operator_s_outputs, 60) {
    every_case(check_forward, GRADD_DT_F32);
    every_case(check_forward, GRADD_DT_F64);
    printf("%d runs\n", checked);
    CHECK(checked > 250 || tested_op());
    CHECK_EQ_INT(failures, 0);
    tested_cases(checked);
}

TEST_LIMIT(a_gradient_through_an_expansion_is_the_row_s, 60) {
    every_case(check_gradient, GRADD_DT_F64);
    printf("%d cases\n", checked);
    CHECK_EQ_INT(failures, 0);
    tested_cases(checked);
}

TEST_LIMIT(an_expansion_in_bf16_or_f16_computes_in_f32, 60) {
    every_case(check_half, GRADD_DT_BF16);
    every_case(check_half, GRADD_DT_F16);
    printf("%d cases\n", checked);
    CHECK_EQ_INT(failures, 0);
    tested_cases(checked);
}

/* ---- the driver itself ---- */

static gradd_status_t expand_wrongly(gradd_expand_t *x) {
    gradd_status_t status = x->op->grad ? gradd_op_by_name("Swish")->expand(x) : GRADD_OK;
    gradd_val_t in[2] = {x->out[0], x->out[0]};
    return status ? status
                  : x->b->emit(x->b, &(gradd_emit_t){"Mul", in, 2, NULL, 0}, &x->out[0], 1);
}

TEST(the_driver_notices_a_wrong_expansion) {
    static const gradd_case_t spec = {.text = "f32[2,3]"};
    gradd_op_t wrong = *gradd_op_by_name("Swish");
    static expand_job_t job;
    wrong.expand = expand_wrongly;
    job = (expand_job_t){.op = &wrong, .spec = &spec};
    CHECK_OK(open_job(&job, GRADD_DT_F64));
    CHECK_STATUS(GRADD_E_TENSOR, check_forward(&job));
    close_job(&job);
    CHECK_OK(open_job(&job, GRADD_DT_F64));
    CHECK_STATUS(GRADD_E_TENSOR, check_gradient(&job));
    close_job(&job);
}
