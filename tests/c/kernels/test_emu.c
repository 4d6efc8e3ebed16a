/* Kernels of kernels/cuda on the emulated GPU: every case of every operator that has one, in every
 * element type that it takes.
 *
 * The threads of a block go on in four orders; all must give the same bits, and so must a result
 * that takes the place of an operand. Against the operator's plain loop in f64, an element may be
 * off by twice what the CPU's kernel is off at most, plus one rounding; one named "mma" by the
 * case's bf16_tol as well; kernels named "map", "move" and "random" give the CPU's bits. Operands,
 * results and scratch are allocations of their own, with a fence behind: a sanitizer sees every
 * element beyond. GRADD_TEST_OP=Name tries one operator alone, GRADD_TEST_EVERY=N each N-th case,
 * GRADD_TEST_GPU=cuda a plug-in in the emulation's place. */
#include "kernels/contract/plugin.h"
#include "kernels/contract/registry.h"
#include "kernels/cpu/half.h"
#include "tests/c/eager.h"
#include "tests/c/tested_device.h"
#include "tests/emu/device.h"
#include "tests/emu/order.h"
#include "tests/test.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FENCE = 16, ORDERS = 4 };
static const long orders[ORDERS] = {0, 2, 3, 41};

typedef struct emu_job_s {
    const gradd_op_t *op;
    const gradd_case_t *spec;
    const char *dtype;
    bool rounds; /* operands are halves */
    gradd_case_data_t data;
    eager_t cpu, exact;
    eager_call_t call, call_cpu, call64;
    gradd_view_t in_emu[GRADD_OP_MAX_IN], in_cpu[GRADD_OP_MAX_IN], in64[GRADD_OP_MAX_IN];
    gradd_view_t want[GRADD_OP_MAX_OUT], near[GRADD_OP_MAX_OUT]; /* plain loop in f64; the CPU's */
} emu_job_t;

static int failures, checked, exactly;
static const gradd_backend_t *real; /* in place of the emulation; NULL = that */

/* In f64 the plain loop, which some of the CPU's kernels are, is off as well: as much as sums of
 * some thousands in another order. */
static double step_of(gradd_dtype_t dtype) {
    if (gradd_dtype_is_half(dtype)) return dtype == GRADD_DT_BF16 ? 0x1p-8 : 0x1p-11;
    return dtype == GRADD_DT_F64 ? 0x1p-46 : 0x1p-23;
}

/* ---- one call on the emulated GPU ---- */

static void *fenced(size_t bytes) {
    unsigned char *p = malloc(bytes + FENCE);
    CHECK(p != NULL);
    memset(p, 0xff, bytes);
    memset(p + bytes, 0xa5, FENCE);
    return p;
}

static bool is_fenced(const void *p, size_t bytes) {
    for (size_t i = 0; i < FENCE; i++)
        if (((const unsigned char *)p)[bytes + i] != 0xa5) return false;
    return true;
}

typedef struct there_s {
    gradd_view_t in[GRADD_OP_MAX_IN], out[GRADD_OP_MAX_OUT];
    int n_in, n_out, overwrite;
    void *workspace;
    size_t workspace_bytes;
} there_t;

static void take_operands(const eager_call_t *call, const gradd_infer_t *c, there_t *t) {
    t->n_in = call->n_in;
    t->n_out = call->n_out;
    t->overwrite = call->overwrite;
    for (int i = 0; i < call->n_in; i++) {
        const size_t bytes = (size_t)gradd_type_bytes(&call->in[i].type);
        t->in[i] = call->in[i];
        if (!call->in[i].type.dtype) continue;
        t->in[i].data = i == call->overwrite ? fenced(bytes) : malloc(bytes + !bytes);
        if (bytes) memcpy(t->in[i].data, call->in[i].data, bytes);
    }
    for (int j = 0; j < call->n_out; j++) {
        t->out[j] = (gradd_view_t){.type = c->out[j]};
        if (!c->out[j].dtype || call->dropped >> j & 1) continue;
        t->out[j].data = j == 0 && call->overwrite >= 0
                             ? t->in[call->overwrite].data
                             : fenced((size_t)gradd_type_bytes(&c->out[j]));
    }
}

static void free_operands(there_t *t) {
    for (int i = 0; i < t->n_in; i++)
        free(t->in[i].data);
    for (int j = 0; j < t->n_out; j++)
        if (j || t->overwrite < 0) free(t->out[j].data);
    free(t->workspace);
    *t = (there_t){0};
}

static gradd_status_t check_fences(const there_t *t) {
    for (int j = 0; j < t->n_out; j++)
        if (t->out[j].data && !is_fenced(t->out[j].data, (size_t)gradd_type_bytes(&t->out[j].type)))
            return GRADD_FAIL(INTERNAL, "a write behind output %d", j);
    if (t->workspace && !is_fenced(t->workspace, t->workspace_bytes))
        return GRADD_FAIL(INTERNAL, "a write behind the scratch memory");
    return GRADD_OK;
}

/* Runs the call with the first kernel that takes it; *out_kernel NULL: there is none. */
static gradd_status_t run_there(const emu_job_t *job, const eager_call_t *call, there_t *t,
                                const gradd_kernel_t **out_kernel) {
    gradd_view_t seen[GRADD_OP_MAX_IN];
    gradd_type_t types[GRADD_OP_MAX_OUT];
    gradd_prepared_t prepared;
    for (int i = 0; i < call->n_in; i++) {
        seen[i] = call->in[i];
        if (!call->known || !call->known[i]) seen[i].data = NULL;
    }
    gradd_infer_t c = {
        call->op, call->attrs, eager_opset(call->op), call->n_in, call->n_out, seen, types, 1, 0};
    GRADD_TRY(gradd_op_infer(&c));
    const gradd_backend_t *gpu = real ? real : &gradd_backend_emu;
    const gradd_kernel_t *kernel = *out_kernel = gradd_backend_kernel(gpu, &c);
    *t = (there_t){0};
    if (!kernel) return GRADD_OK;
    take_operands(call, &c, t);
    GRADD_TRY(gradd_kernel_prepare(kernel, &c, &prepared));
    t->workspace_bytes = prepared.workspace;
    if (prepared.workspace) t->workspace = fenced(prepared.workspace);
    const gradd_launch_t r = {.op = call->op,
                              .attrs = call->attrs,
                              .opset = c.opset,
                              .n_in = call->n_in,
                              .n_out = call->n_out,
                              .in = t->in,
                              .out = t->out,
                              .workspace = t->workspace,
                              .state = prepared.state,
                              .seed = 7,
                              .node = job->cpu.node,
                              .threads = 1};
    gradd_status_t status = real ? tested_call_on(real, kernel, &r, prepared.workspace, FENCE)
                                 : emu_compute(kernel, &r);
    gradd_kernel_unprepare(kernel, &prepared);
    return status ? status : check_fences(t);
}

/* ---- comparisons ---- */

static gradd_status_t same(const gradd_view_t *a, const gradd_view_t *b, const char *what, int j) {
    const size_t bytes = (size_t)gradd_type_bytes(&a->type);
    if (!a->data || !b->data) return GRADD_OK;
    if (gradd_type_equal(&a->type, &b->type) && (!bytes || !memcmp(a->data, b->data, bytes)))
        return GRADD_OK;
    for (int64_t i = 0, n = gradd_type_count(&a->type); i < n; i++)
        if (eager_element(a, i) != eager_element(b, i))
            return GRADD_FAIL(TENSOR, "%s: output %d, element %lld is %.9g, not %.9g", what, j,
                              (long long)i, eager_element(a, i), eager_element(b, i));
    return GRADD_FAIL(TENSOR, "%s: output %d has other bits", what, j);
}

/* Signs of zero and payloads of NaN are a kernel's own. */
static bool same_values(const gradd_view_t *a, const gradd_view_t *b) {
    for (int64_t i = 0, n = gradd_type_count(&a->type); i < n; i++)
        if (eager_element(a, i) != eager_element(b, i) &&
            !(isnan(eager_element(a, i)) && isnan(eager_element(b, i))))
            return false;
    return true;
}

/* Too large for f16, or nearly: infinite, or the largest there are. */
static bool overflows(gradd_dtype_t dtype, double x, double y) {
    return dtype == GRADD_DT_F16 && fabs(y) > 65000 && x * y > 0 && fabs(x) > 65000;
}

/* The most that finite elements differ by; -1: one is finite and the other is not. */
static double apart(const gradd_view_t *a, const gradd_view_t *b, double *out_largest) {
    double most = 0;
    *out_largest = 0;
    for (int64_t i = 0, n = gradd_type_count(&b->type); i < n; i++) {
        const double x = eager_element(a, i), y = eager_element(b, i);
        if (isfinite(y)) *out_largest = fmax(*out_largest, fabs(y));
        if (x == y || (isnan(x) && isnan(y)) || overflows(a->type.dtype, x, y)) continue;
        if (!isfinite(x) || !isfinite(y)) return -1;
        most = fmax(most, fabs(x - y));
    }
    return most;
}

static bool is_exact(const emu_job_t *job, const gradd_kernel_t *kernel) {
    /* a GPU's exp, log and the like in f64 are not the host's */
    if (real && !strcmp(kernel->name, "map") && !strcmp(job->dtype, "f64")) return false;
    for (int i = 0; i < job->call.n_in; i++)
        if (job->in_emu[i].type.dtype != job->in_cpu[i].type.dtype) return false;
    return !strcmp(kernel->name, "map") || !strcmp(kernel->name, "move") ||
           !strcmp(kernel->name, "random");
}

/* Normal numbers are a logarithm and a cosine in f64 of bits that are the CPU's. */
static gradd_status_t check_exactly(const emu_job_t *job, const there_t *t, int j) {
    double largest;
    if (same_values(&t->out[j], &job->near[j])) return GRADD_OK;
    const double off = apart(&t->out[j], &job->near[j], &largest);
    if (real && !strncmp(job->call.op->name, "RandomNormal", 12) && off >= 0 &&
        off <= 2 * step_of(t->out[j].type.dtype) * largest)
        return GRADD_OK;
    return same(&t->out[j], &job->near[j], "the CPU's bits", j);
}

/* Kernels that store halves between their steps: what these round is chance, on both sides. */
static bool rounds_between(const gradd_kernel_t *kernel) {
    return !strcmp(kernel->name, "mma") || !strcmp(kernel->name, "in chunks");
}

static gradd_status_t check_values(const emu_job_t *job, const there_t *t,
                                   const gradd_kernel_t *kernel) {
    for (int j = 0; j < t->n_out; j++) {
        double largest, unused;
        if (!t->out[j].data || !job->near[j].data) continue;
        if (is_exact(job, kernel)) {
            exactly++;
            GRADD_TRY(check_exactly(job, t, j));
            continue;
        }
        if (job->spec->tol < 0 || !job->want[j].data) continue;
        const double ours = apart(&t->out[j], &job->want[j], &largest);
        const double cpu = apart(&job->near[j], &job->want[j], &unused);
        /* in f64 the plain loop is no better than what it judges */
        const double roundings = t->out[j].type.dtype == GRADD_DT_F64 ? 64 : 1;
        double most = 2 * cpu + roundings * step_of(t->out[j].type.dtype) * largest;
        if (t->out[j].type.dtype == GRADD_DT_F16) most += 0x1p-25; /* half of a subnormal step */
        if (job->rounds && rounds_between(kernel)) most = fmax(most, job->spec->bf16_tol * largest);
        if (ours > most || (ours < 0 && cpu >= 0))
            return GRADD_FAIL(TENSOR, "output %d is off by %.3g, the CPU's by %.3g of %.3g", j,
                              ours, cpu, largest);
    }
    return GRADD_OK;
}

static gradd_status_t check_again(const emu_job_t *job, const eager_call_t *call,
                                  const there_t *first, const char *what) {
    const gradd_kernel_t *kernel;
    there_t t = {0};
    gradd_status_t status = run_there(job, call, &t, &kernel);
    for (int j = 0; j < call->n_out && !status; j++)
        status = same(&t.out[j], &first->out[j], what, j);
    free_operands(&t);
    return status;
}

static gradd_status_t check_variants(emu_job_t *job, const there_t *first,
                                     const gradd_kernel_t *kernel) {
    for (int k = 1; k < (real ? 2 : ORDERS); k++) {
        emu_set_order(orders[k]);
        GRADD_TRY(check_again(job, &job->call, first, "another order of threads"));
    }
    emu_set_order(0);
    for (int k = 0; k < job->call.n_in && k < 32; k++) {
        eager_call_t call = job->call;
        call.overwrite = k;
        if (kernel->inplace >> k & 1 && gradd_type_equal(&call.in[k].type, &first->out[0].type))
            GRADD_TRY(check_again(job, &call, first, "in place"));
    }
    for (int j = job->op->min_out; j < job->call.n_out; j++) {
        eager_call_t call = job->call;
        call.dropped = 1u << j;
        GRADD_TRY(check_again(job, &call, first, "without an output"));
    }
    return GRADD_OK;
}

/* ---- jobs ---- */

static gradd_view_t widened(gradd_case_data_t *heap, const gradd_view_t *from) {
    gradd_view_t to = {.type = from->type};
    to.type.dtype = GRADD_DT_F64;
    to.data = gradd_case_alloc(heap, (size_t)gradd_type_bytes(&to.type) + 64);
    for (int64_t i = 0, n = gradd_type_count(&to.type); i < n; i++)
        ((double *)to.data)[i] = eager_element(from, i);
    return to;
}

static bool emu_takes(const gradd_op_t *op, int input, gradd_dtype_t dtype) {
    for (size_t f = 0; f < gradd_backend_emu.n_kernels; f++)
        for (size_t i = 0; i < gradd_backend_emu.kernels[f]->n; i++) {
            const gradd_kernel_t *kernel = &gradd_backend_emu.kernels[f]->v[i];
            if (!strcmp(kernel->op, op->name) && gradd_kernel_takes(kernel, op, input, dtype))
                return true;
        }
    return false;
}

static bool takes_none(const gradd_op_t *op, int input, gradd_dtype_t dtype) {
    (void)op, (void)input, (void)dtype;
    return false;
}

/* Operands that a device's rows do not take in a half (statistics, for some) are f32, as in a
 * graph.
 */
static void take_wide(emu_job_t *job, bool (*takes)(const gradd_op_t *, int, gradd_dtype_t),
                      gradd_view_t *to) {
    gradd_case_data_t *d = &job->data;
    for (int i = 0; i < d->n_in; i++) {
        to[i] = d->in[i];
        const gradd_dtype_t half = to[i].type.dtype;
        if (!gradd_dtype_is_half(half) || takes(job->op, i, half)) continue;
        to[i].type.dtype = GRADD_DT_F32;
        to[i].data = gradd_case_alloc(d, (size_t)gradd_type_bytes(&to[i].type) + 64);
        gradd_half_widen(to[i].data, d->in[i].data, half, gradd_type_count(&to[i].type));
    }
}

static gradd_status_t open_job(emu_job_t *job, gradd_dtype_t dtype) {
    GRADD_TRY(gradd_case_parse(job->spec->text, dtype, 42, &job->data));
    gradd_case_data_t *d = &job->data;
    job->dtype = gradd_dtype_name(dtype);
    take_wide(job, eager_takes, job->in_cpu);
    take_wide(job, emu_takes, job->in_emu);
    job->rounds = gradd_dtype_is_half(dtype);
    eager_begin(&job->cpu);
    eager_begin(&job->exact);
    for (int i = 0; i < d->n_in; i++) {
        const gradd_dtype_t t = d->in[i].type.dtype;
        const bool narrow = t == GRADD_DT_F32 || gradd_dtype_is_half(t);
        job->in64[i] = narrow ? widened(d, &d->in[i]) : d->in[i];
    }
    job->call = (eager_call_t){
        .op = job->op,
        .attrs = {d->attrs, d->n_attrs},
        .in = job->in_emu,
        .known = d->known,
        .n_in = d->n_in,
        .n_out = d->n_out ? d->n_out : job->op->min_out,
        .overwrite = -1
    };
    job->call_cpu = job->call64 = job->call;
    job->call_cpu.in = job->in_cpu;
    if (eager_widens(&job->call_cpu)) take_wide(job, takes_none, job->in_cpu);
    job->call64.in = job->in64;
    job->call64.ref = job->op->ref != NULL;
    return GRADD_OK;
}

static void close_job(emu_job_t *job) {
    eager_end(&job->cpu);
    eager_end(&job->exact);
    gradd_case_free(&job->data);
}

static gradd_status_t check(emu_job_t *job) {
    const gradd_kernel_t *kernel = NULL;
    there_t t = {0};
    gradd_status_t status = run_there(job, &job->call, &t, &kernel);
    if (kernel) {
        checked++;
        if (!status) status = eager_call(&job->cpu, &job->call_cpu, job->near);
        if (!status && !is_exact(job, kernel) && job->spec->tol >= 0)
            status = eager_call(&job->exact, &job->call64, job->want);
        if (!status) status = check_values(job, &t, kernel);
        if (!status) status = check_variants(job, &t, kernel);
    }
    free_operands(&t);
    return status;
}

static void check_in(const gradd_op_t *op, const gradd_case_t *spec, gradd_dtype_t dtype) {
    static emu_job_t job;
    job = (emu_job_t){.op = op, .spec = spec};
    gradd_status_t status = open_job(&job, dtype);
    if (!status) status = check(&job);
    if (status) {
        failures++;
        fprintf(stderr, "%s \"%s\" in %s: %s (%s)\n", op->name, spec->text, job.dtype,
                gradd_error_message(), gradd_error_where());
    }
    close_job(&job);
}

static void find_real(void) {
    const char *device = getenv("GRADD_TEST_GPU");
    if (device && *device) CHECK_OK(gradd_plugin_load(device, &real));
}

static void check_all(const gradd_dtype_t *types, int n_types) {
    const char *only = tested_op();
    const char *few = getenv("GRADD_TEST_EVERY");
    const int every = few && atoi(few) > 0 ? atoi(few) : 1;
    int seen = 0;
    omp_set_num_threads(1);
    find_real();
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++) {
            const gradd_op_t *op = &gradd_op_families[f]->v[i];
            if (gradd_op_is_composite(op) || (only && strcmp(only, op->name))) continue;
            if (real) printf("%s\n", op->name); /* where one does not end, this says which */
            for (const gradd_case_t *spec = op->cases; spec && spec->text; spec++)
                for (int k = 0; k < n_types; k++)
                    if (seen++ % every == 0) check_in(op, spec, types[k]);
        }
    printf("%d cases, %d results with the CPU's bits\n", checked, exactly);
    CHECK_EQ_INT(failures, 0);
    tested_cases(checked);
}

TEST_LIMIT(every_case_runs_on_the_emulated_gpu, 120) {
    check_all((const gradd_dtype_t[]){GRADD_DT_F32, GRADD_DT_F64}, 2);
}

TEST_LIMIT(every_case_in_halves_runs_on_the_emulated_gpu, 120) {
    check_all((const gradd_dtype_t[]){GRADD_DT_BF16, GRADD_DT_F16}, 2);
}

/* A range of keys for each of n queries: those of its document that are not behind it. */
static void print_ranges(char *to, size_t room, int n, int document) {
    size_t at = (size_t)snprintf(to, room, "i32[1,1,%d,3]={", n);
    for (int i = 0; i < n; i++)
        at += (size_t)snprintf(to + at, room - at, "%s%d,%d,1", i ? "," : "",
                               i / document * document, i + 1);
    snprintf(to + at, room - at, "}");
}

/* Tiles that no query sees, that some see in part, and that all see. */
static void check_past(int n, int document, int d, gradd_dtype_t dtype) {
    static char ranges[1 << 14], text[1 << 15];
    const gradd_case_t spec = {.text = text, .tol = 1e-5, .bf16_tol = 2e-2};
    char q[32], k[32];
    print_ranges(ranges, sizeof ranges, n, document);
    snprintf(q, sizeof q, "f32[1,4,%d,%d]", n, d);
    snprintf(k, sizeof k, "f32[1,2,%d,%d]", n, d);
    snprintf(text, sizeof text, "%s %s %s - - %s | scale=0.1 -> 2", q, k, k, ranges);
    check_in(gradd_op_find("com.gradd", "FusedAttention", 1), &spec, dtype);
    snprintf(text, sizeof text, "%s %s %s %s %s f32[1,4,2,%d]:(3,4) - - %s | scale=0.1 -> 3", q, q,
             k, k, q, n, ranges);
    check_in(gradd_op_find("com.gradd", "FusedAttentionGrad", 1), &spec, dtype);
}

TEST_LIMIT(attention_over_many_tiles_runs_on_the_emulated_gpu, 120) {
    omp_set_num_threads(1);
    find_real();
    check_past(200, 1000, 64, GRADD_DT_BF16);
    check_past(150, 70, 128, GRADD_DT_F16);
    check_past(130, 40, 48, GRADD_DT_BF16);
    CHECK_EQ_INT(failures, 0);
    CHECK_EQ_INT(checked, 6);
}

static bool has_kernel(const gradd_op_t *op) {
    const gradd_backend_t *b = &gradd_backend_emu;
    for (size_t f = 0; f < b->n_kernels; f++)
        for (size_t i = 0; i < b->kernels[f]->n; i++)
            if (!strcmp(b->kernels[f]->v[i].op, op->name)) return true;
    return false;
}

/* But for those that are written out on every device, and convolutions of channels-last tensors,
 * which are made only for a device that has them. */
TEST(every_operator_has_a_kernel) {
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++) {
            const gradd_op_t *op = &gradd_op_families[f]->v[i];
            if (gradd_op_is_composite(op) || has_kernel(op)) continue;
            if (!strncmp(op->name, "ConvLast", strlen("ConvLast"))) continue;
            printf("%s has no kernel\n", op->name);
            CHECK(false);
        }
}
