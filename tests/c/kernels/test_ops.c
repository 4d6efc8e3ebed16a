/* The operator driver: every case of every row, without a list of its own.
 *
 * forward: the shape rule holds; the kernel agrees with the operator's plain loop in f32 and f64,
 * is repeatable to the bit, also with shorter vectors, hardly depends on the thread count, may
 * overwrite the inputs that its row names, and leaves out outputs that are not wanted. gradient: in
 * f64, of a random weighting of the outputs, against central differences. GRADD_TEST_OP=Name
 * restricts both to one operator. */
#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"
#include "kernels/describe/dispatch.h"
#include "tests/c/eager.h"
#include "tests/c/tested_device.h"
#include "tests/test.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PROBES = 40, FEW_PROBES = 5, LARGE = 4096 };

typedef struct ops_job_s {
    const gradd_op_t *op;
    const gradd_case_t *spec;
    gradd_dtype_t float_as;
    gradd_case_data_t data;
    eager_t e;
    eager_call_t call;
} ops_job_t;

static int failures, checked, in_parts;

static gradd_status_t open_job(ops_job_t *job) {
    GRADD_TRY(gradd_case_parse(job->spec->text, job->float_as, 42, &job->data));
    eager_begin(&job->e);
    job->call = (eager_call_t){
        .op = job->op,
        .attrs = {job->data.attrs, job->data.n_attrs},
        .in = job->data.in,
        .known = job->data.known,
        .n_in = job->data.n_in,
        .n_out = job->data.n_out ? job->data.n_out : job->op->min_out,
        .overwrite = -1
    };
    return GRADD_OK;
}

static void close_job(ops_job_t *job) {
    eager_end(&job->e);
    gradd_case_free(&job->data);
}

/* Calls fn for every case whose row passes the filter and counts what fails. */
static void every_case(gradd_status_t (*fn)(ops_job_t *job), gradd_dtype_t float_as) {
    const char *only = tested_op();
    static ops_job_t job;
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++) {
            const gradd_op_t *op = &gradd_op_families[f]->v[i];
            if (only && strcmp(only, op->name)) continue;
            for (const gradd_case_t *spec = op->cases; spec && spec->text; spec++) {
                job = (ops_job_t){.op = op, .spec = spec, .float_as = float_as};
                gradd_status_t status = open_job(&job);
                if (!status) status = fn(&job);
                close_job(&job);
                checked++;
                if (!status) continue;
                failures++;
                fprintf(stderr, "%s \"%s\" in %s: %s (%s)\n", op->name, spec->text,
                        gradd_dtype_name(float_as), gradd_error_message(), gradd_error_where());
            }
        }
}

static bool same_bits(const gradd_view_t *a, const gradd_view_t *b) {
    size_t bytes = (size_t)gradd_type_bytes(&a->type);
    return gradd_type_equal(&a->type, &b->type) && (!bytes || !memcmp(a->data, b->data, bytes));
}

/* tol is relative to the entry or 1, whichever is larger; 0 = same bits. */
static gradd_status_t agree(const gradd_view_t *a, const gradd_view_t *b, double tol,
                            const char *what) {
    if (!gradd_type_equal(&a->type, &b->type)) return GRADD_FAIL(TENSOR, "%s: types differ", what);
    if (tol <= 0 || !gradd_dtype_is_float(a->type.dtype))
        return same_bits(a, b) ? GRADD_OK : GRADD_FAIL(TENSOR, "%s: bits differ", what);
    for (int64_t i = 0, n = gradd_type_count(&a->type); i < n; i++) {
        double x = eager_element(a, i), y = eager_element(b, i);
        if (x == y || (x != x && y != y)) continue;
        if (!(fabs(x - y) <= tol * fmax(1, fabs(y))))
            return GRADD_FAIL(TENSOR, "%s: element %lld is %.9g, expected %.9g", what, (long long)i,
                              x, y);
    }
    return GRADD_OK;
}

/* Runs a variation of the call and compares every wanted output. */
static gradd_status_t vary(ops_job_t *job, const eager_call_t *call, const gradd_view_t *want,
                           double tol, const char *what) {
    gradd_view_t got[GRADD_OP_MAX_OUT];
    void *entered = eager_enter(&job->e);
    gradd_status_t status = eager_call(&job->e, call, got);
    for (int j = 0; j < call->n_out && !status; j++)
        if (got[j].data && want[j].data) status = agree(&got[j], &want[j], tol, what);
    eager_leave(&job->e, entered);
    return status;
}

static gradd_status_t check_overwriting(ops_job_t *job, const gradd_view_t *out) {
    for (int k = 0; k < job->call.n_in && k < 32; k++) {
        eager_call_t call = job->call;
        const gradd_kernel_t *kernel = eager_kernel(&call);
        if (!kernel || !(kernel->inplace >> k & 1) || !call.in[k].type.dtype) continue;
        if (!gradd_type_equal(&job->data.in[k].type, &out[0].type)) continue;
        call.overwrite = k;
        GRADD_TRY(vary(job, &call, out, 0, "in place"));
    }
    return GRADD_OK;
}

static gradd_status_t check_dropping(ops_job_t *job, const gradd_view_t *out) {
    if (job->op->max_out > 8) return GRADD_OK; /* variadic outputs are not optional */
    for (int j = job->op->min_out; j < job->call.n_out; j++) {
        eager_call_t call = job->call;
        call.dropped = 1ull << j;
        GRADD_TRY(vary(job, &call, out, 0, "with an unwanted output"));
    }
    return GRADD_OK;
}

static gradd_status_t check_forward(ops_job_t *job) {
    gradd_view_t out[GRADD_OP_MAX_OUT];
    double tol = job->spec->tol > 0 ? job->spec->tol : 1e-5;
    if (job->float_as == GRADD_DT_F64) tol = tol < 1e-9 ? tol : 1e-9;
    omp_set_num_threads(tested_threads(2));
    GRADD_TRY(eager_call(&job->e, &job->call, out));
    GRADD_TRY(vary(job, &job->call, out, 0, "second run"));
    eager_call_t ref = job->call;
    ref.ref = true;
    if (job->spec->tol >= 0 && job->op->ref) GRADD_TRY(vary(job, &ref, out, tol, "reference"));
    gradd_narrow = true;
    gradd_status_t narrow = vary(job, &job->call, out, 0, "shorter vectors");
    gradd_narrow = false;
    GRADD_TRY(narrow);
    omp_set_num_threads(tested_threads(1));
    GRADD_TRY(vary(job, &job->call, out, tol, "one thread"));
    omp_set_num_threads(tested_threads(2));
    GRADD_TRY(check_overwriting(job, out));
    return check_dropping(job, out);
}

/* ---- gradients ---- */

/* Sum over outputs of w * (out - base), with the weights that the gradient starts from. Taking the
 * unperturbed result away first keeps the digits that a large sum would swallow. */
static gradd_status_t objective(ops_job_t *job, const gradd_view_t *weights,
                                const gradd_view_t *base, double *value) {
    gradd_view_t out[GRADD_OP_MAX_OUT];
    void *entered = eager_enter(&job->e);
    const gradd_status_t status = eager_call(&job->e, &job->call, out);
    *value = 0;
    for (int j = 0; j < job->call.n_out && !status; j++)
        for (int64_t i = 0; weights[j].data && i < gradd_type_count(&out[j].type); i++)
            *value += eager_element(&weights[j], i) *
                      (eager_element(&out[j], i) - eager_element(&base[j], i));
    eager_leave(&job->e, entered);
    return status;
}

static gradd_view_t weights_like(ops_job_t *job, const gradd_type_t *type, uint64_t seed) {
    gradd_view_t w = {.type = *type};
    int64_t n = gradd_type_count(type);
    w.data = gradd_case_alloc(&job->e.heap, (size_t)gradd_type_bytes(type) + 64);
    for (int64_t i = 0; i < n; i++) {
        double x = 0.25 + fmod(0.6180339887 * (double)(i + 1) + 0.37 * (double)seed, 1.0);
        if (type->dtype == GRADD_DT_F32)
            ((float *)w.data)[i] = (float)x;
        else
            ((double *)w.data)[i] = x;
    }
    return w;
}

typedef struct ops_diff_s {
    gradd_view_t out[GRADD_OP_MAX_OUT], weights[GRADD_OP_MAX_OUT];
    gradd_val_t in[GRADD_OP_MAX_IN], dout[GRADD_OP_MAX_OUT], din[GRADD_OP_MAX_IN];
    bool need[GRADD_OP_MAX_IN];
    bool narrow;  /* an output is f32: coarser differences */
    double scale; /* largest entry of all gradients */
} ops_diff_t;

static gradd_status_t probe(ops_job_t *job, ops_diff_t *d, int input) {
    gradd_view_t *x = &job->data.in[input];
    const gradd_view_t *got = d->din[input] == GRADD_NONE ? NULL : &job->e.value[d->din[input]];
    /* The rules are the same on every device, whose calls take longer than the CPU's. */
    const bool few = !tested_backend()->host || gradd_type_count(&x->type) > LARGE;
    int64_t n = gradd_type_count(&x->type), stride = n / (few ? FEW_PROBES : MAX_PROBES) + 1;
    double tol = job->spec->grad_tol > 0 ? job->spec->grad_tol : 1e-5;
    double h = d->narrow ? 0x1p-6 : 0x1p-20, *data = x->data;
    if (d->narrow && tol < 1e-3) tol = 1e-3;
    if (got && !gradd_type_equal(&got->type, &x->type))
        return GRADD_FAIL(TENSOR, "gradient %d has another type than the input", input);
    for (int64_t i = 0; i < n; i += stride) {
        double keep = data[i], above, below;
        data[i] = keep + h;
        GRADD_TRY(objective(job, d->weights, d->out, &above));
        data[i] = keep - h;
        GRADD_TRY(objective(job, d->weights, d->out, &below));
        data[i] = keep;
        double want = (above - below) / (2 * h), is = got ? eager_element(got, i) : 0;
        if (!(fabs(is - want) <= tol * fmax(1, fmax(fabs(want), d->scale))))
            return GRADD_FAIL(TENSOR,
                              "gradient of input %d, element %lld is %.9g, differences %.9g", input,
                              (long long)i, is, want);
    }
    return GRADD_OK;
}

/* A rule must give the same gradient when only that one is asked for. */
static gradd_status_t check_alone(ops_job_t *job, const ops_diff_t *d, int input) {
    bool need[GRADD_OP_MAX_IN] = {0};
    gradd_val_t din[GRADD_OP_MAX_IN];
    need[input] = true;
    GRADD_TRY(eager_grad(&job->e, &job->call, &(eager_diff_t){d->out, d->in, d->dout, need}, din));
    if ((din[input] == GRADD_NONE) != (d->din[input] == GRADD_NONE))
        return GRADD_FAIL(TENSOR, "gradient %d alone is missing or superfluous", input);
    if (din[input] == GRADD_NONE) return GRADD_OK;
    return agree(&job->e.value[din[input]], &job->e.value[d->din[input]], 1e-12, "gradient alone");
}

/* mask: the outputs a gradient arrives for */
static gradd_status_t differentiate(ops_job_t *job, ops_diff_t *d, uint64_t mask) {
    for (int j = 0; j < job->call.n_out; j++) {
        d->dout[j] = GRADD_NONE;
        d->weights[j].data = NULL;
        if (!(mask >> j & 1) || !gradd_dtype_is_float(d->out[j].type.dtype)) continue;
        if (d->out[j].type.dtype == GRADD_DT_F32) d->narrow = true;
        d->weights[j] = weights_like(job, &d->out[j].type, (uint64_t)j);
        d->dout[j] = eager_add(&job->e, d->weights[j], false);
    }
    GRADD_TRY(
        eager_grad(&job->e, &job->call, &(eager_diff_t){d->out, d->in, d->dout, d->need}, d->din));
    d->scale = 0;
    for (int i = 0; i < job->call.n_in; i++)
        for (int64_t k = 0; d->need[i] && d->din[i] != GRADD_NONE &&
                            k < gradd_type_count(&job->e.value[d->din[i]].type);
             k++)
            d->scale = fmax(d->scale, fabs(eager_element(&job->e.value[d->din[i]], k)));
    for (int i = 0; i < job->call.n_in; i++) {
        if (!d->need[i]) continue;
        GRADD_TRY(check_alone(job, d, i));
        GRADD_TRY(probe(job, d, i));
    }
    return GRADD_OK;
}

/* Which inputs of an operator were compared with differences: bit k is input k. Those of operators
 * that take many are alike from the third on. */
enum { MOST_OPS = 512, MANY = 10, ALIKE = 3 };
static struct {
    const gradd_op_t *op;
    uint32_t inputs;
} compared[MOST_OPS];

static uint32_t *compared_of(const gradd_op_t *op) {
    for (int i = 0; i < MOST_OPS; i++) {
        if (compared[i].op && compared[i].op != op) continue;
        compared[i].op = op;
        return &compared[i].inputs;
    }
    test_fail(__FILE__, __LINE__, "more than %d operators", MOST_OPS);
    return NULL;
}

/* What differences do not show: a gradient that is not that of the value, by definition; one that
 * the rule refuses. */
static const char *const not_shown[] = {"StraightThrough", "Trigamma"};

static bool is_shown(const gradd_op_t *op) {
    for (size_t i = 0; i < sizeof not_shown / sizeof not_shown[0]; i++)
        if (!strcmp(op->name, not_shown[i])) return false;
    return !(op->flags & (GRADD_OP_NO_GRAD | GRADD_OP_VIEW)) && !gradd_op_is_composite(op);
}

/* So a rule that forgets an operand is found: one that is left out is in the row's no_diff or
 * no_rule. */
static void check_compared(void) {
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t k = 0; k < gradd_op_families[f]->n; k++) {
            const gradd_op_t *op = &gradd_op_families[f]->v[k];
            const int n = op->max_in > MANY ? ALIKE : op->max_in;
            for (int i = 0; i < n && is_shown(op); i++)
                if (gradd_op_carries(op, i) && !(op->no_rule >> i & 1) &&
                    !(*compared_of(op) >> i & 1)) {
                    printf("%s: no case compares the gradient of input %d with differences\n",
                           op->name, i);
                    failures++;
                }
        }
}

static gradd_status_t check_gradient(ops_job_t *job) {
    static ops_diff_t d;
    bool any = false;
    memset(&d, 0, sizeof d);
    if ((job->op->flags & GRADD_OP_NO_GRAD) || job->spec->grad_tol < 0) return GRADD_OK;
    GRADD_TRY(eager_call(&job->e, &job->call, d.out));
    for (int i = 0; i < job->call.n_in; i++) {
        gradd_view_t *x = &job->data.in[i];
        d.need[i] = x->type.dtype == GRADD_DT_F64 &&
                    !(i < 32 && (job->op->no_diff | job->op->no_rule) >> i & 1);
        any |= d.need[i];
        if (d.need[i]) *compared_of(job->op) |= 1u << (i & 31);
        d.in[i] = x->type.dtype ? eager_add(&job->e, *x, job->data.known[i]) : GRADD_NONE;
    }
    int floats = 0;
    for (int j = 0; j < job->call.n_out; j++)
        floats += gradd_dtype_is_float(d.out[j].type.dtype);
    if (!any || !floats) return GRADD_OK;
    GRADD_TRY(differentiate(job, &d, UINT64_MAX));
    for (int j = 0; floats > 1 && j < job->call.n_out; j++)
        if (gradd_dtype_is_float(d.out[j].type.dtype)) GRADD_TRY(differentiate(job, &d, 1ull << j));
    return GRADD_OK;
}

/* ---- parts ---- */

/* The bits are those of the whole. (Products are too small here for parts that are another
 * primitive: test_gemm_parts.c.) */
static gradd_status_t check_parts(ops_job_t *job) {
    gradd_view_t out[GRADD_OP_MAX_OUT];
    eager_call_t call = job->call;
    for (int threads = 1; threads <= 2; threads++) { /* of one thread there are more parts */
        omp_set_num_threads(threads);
        GRADD_TRY(eager_call(&job->e, &job->call, out));
        for (call.parts = 2; call.parts <= 5; call.parts += 3)
            GRADD_TRY(vary(job, &call, out, 0, "in parts"));
    }
    in_parts += job->e.n_in_parts;
    return GRADD_OK;
}

/* ---- tests ---- */

TEST_LIMIT(forward_agrees_with_the_plain_loop, 60) {
    every_case(check_forward, GRADD_DT_F32);
    every_case(check_forward, GRADD_DT_F64);
    printf("%d runs\n", checked);
    CHECK_EQ_INT(failures, 0);
    tested_cases(checked);
}

/* A launch that makes way for others is made in parts. */
TEST_LIMIT(parts_are_the_whole, 60) {
    if (!tested_backend()->host) test_skip("only launches of the CPU are made in parts");
    every_case(check_parts, GRADD_DT_F32);
    printf("%d of %d launches in parts\n", in_parts, 4 * checked);
    CHECK_EQ_INT(failures, 0);
    CHECK(tested_op() || 5 * in_parts > 8 * checked);
    tested_cases(checked);
}

TEST_LIMIT(gradient_agrees_with_differences, 120) {
    omp_set_num_threads(tested_threads(1)); /* threads are the forward test's matter */
    every_case(check_gradient, GRADD_DT_F64);
    printf("%d cases\n", checked);
    if (!tested_op()) check_compared();
    CHECK_EQ_INT(failures, 0);
    tested_cases(checked);
}

/* The driver itself: a wrong derivative and a write past the end must not pass. */
static gradd_status_t wrong_grad(gradd_grad_t *g) {
    g->din[0] = g->dout[0];
    return GRADD_OK;
}

static gradd_status_t compute_overrun(const gradd_launch_t *r) {
    int64_t n = gradd_type_count(&r->out[0].type);
    memset(r->out[0].data, 0, (size_t)gradd_type_bytes(&r->out[0].type));
    ((char *)r->out[0].data)[n * (int64_t)gradd_dtype_bytes(r->out[0].type.dtype)] = 0;
    return GRADD_OK;
}

TEST(driver_detects_wrong_rows) {
    static const gradd_case_t spec = {.text = "f32[2,3]"};
    const gradd_op_t *exp_row = gradd_op_by_name("Exp");
    if (!exp_row) test_skip("no row 'Exp' in this build");
    static const gradd_kernel_t overrun = {"Exp", "overrun", .compute = compute_overrun};
    gradd_op_t wrong = *exp_row;
    wrong.grad = wrong_grad;
    static ops_job_t job;
    job = (ops_job_t){.op = &wrong, .spec = &spec, .float_as = GRADD_DT_F64};
    CHECK_OK(open_job(&job));
    CHECK_STATUS(GRADD_E_TENSOR, check_gradient(&job));
    close_job(&job);
    job = (ops_job_t){.op = exp_row, .spec = &spec, .float_as = GRADD_DT_F32};
    CHECK_OK(open_job(&job));
    job.call.kernel = &overrun;
    CHECK_STATUS(GRADD_E_INTERNAL, check_forward(&job));
    close_job(&job);
}

/* Values that index memory or would trap are refused by name, in forward and in gradient kernels.
 */
static void check_refused(const char *name, const char *text, const char *message) {
    gradd_case_t spec = {.text = text};
    gradd_view_t out[GRADD_OP_MAX_OUT];
    static ops_job_t job;
    job = (ops_job_t){.op = gradd_op_by_name(name), .spec = &spec, .float_as = GRADD_DT_F32};
    if (!job.op) test_skip("no row '%s' in this build", name);
    CHECK_OK(open_job(&job));
    CHECK_STATUS(GRADD_E_INDEX, eager_call(&job.e, &job.call, out));
    CHECK_ERROR_HAS(message);
    close_job(&job);
}

TEST(bad_values_at_run_time_are_refused) {
    check_refused("SoftmaxCrossEntropyLoss", "f32[2,3] i64[2]={0,3}",
                  "label 3 is out of range for 3 classes, at row 1");
    check_refused("SoftmaxCrossEntropyLoss", "f32[2,3] i64[2]={-100,0}",
                  "label -100 is out of range for 3 classes, at row 0");
    check_refused("SoftmaxCrossEntropyLossGrad", "f32[] f32[2,3] i32[2]={0,-1}",
                  "label -1 is out of range for 3 classes");
    check_refused("NegativeLogLikelihoodLoss", "f32[1,3] i64[1]={9}",
                  "label 9 is out of range for 3 classes, at row 0");
    check_refused("Div", "i64[3] i64[3]={1,2,0}", "division by zero, element 2");
    check_refused("Mod", "i32[2] i32[]={0}", "division by zero, element 0");
}

TEST(the_cpu_says_what_it_can) {
    gradd_view_t in = {
        {GRADD_DT_F32, 1, {3}},
        NULL
    };
    const gradd_infer_t c = {.op = gradd_op_by_name("Exp"), .n_in = 1, .n_out = 1, .in = &in};
    CHECK(gradd_cpu_can(&c));
    in.type.dtype = GRADD_DT_I64;
    CHECK(!gradd_cpu_can(&c));
}
