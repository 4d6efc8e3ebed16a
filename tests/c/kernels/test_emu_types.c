/* Kernels on the emulated GPU in f16, and with operands of two types.
 *
 * f16: a kernel that gives the CPU's bits computes in f32 and rounds once, so its result is that of
 * f32 on the same operands, rounded. Two types: Rope of bf16 with tables of f32, against the CPU.
 */
#include "kernels/cases/cases.h"
#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"
#include "kernels/math/f16.h"
#include "tests/c/eager.h"
#include "tests/emu/device.h"
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct run_s {
    const gradd_op_t *op;
    gradd_case_data_t data;
    const gradd_kernel_t *kernel;
    gradd_type_t types[GRADD_OP_MAX_OUT];
    gradd_view_t narrow[GRADD_OP_MAX_IN]; /* operands with f16 in place of f32 */
    int n_out;
} run_t;

static gradd_status_t open_run(run_t *run, const gradd_op_t *op, const char *text) {
    *run = (run_t){.op = op};
    GRADD_TRY(gradd_case_parse(text, GRADD_DT_F32, 7, &run->data));
    gradd_case_data_t *d = &run->data;
    run->n_out = d->n_out ? d->n_out : op->min_out;
    gradd_infer_t c = {
        op, {d->attrs, d->n_attrs},
         eager_opset(op), d->n_in, run->n_out, d->in, run->types, 1, 0
    };
    GRADD_TRY(gradd_op_infer(&c));
    run->kernel = gradd_backend_kernel(&gradd_backend_emu, &c);
    return GRADD_OK;
}

/* f32 becomes f16 where bf16 is taken; the wide operands take the rounded values, too. */
static void narrow(run_t *run) {
    gradd_case_data_t *d = &run->data;
    for (int i = 0; i < d->n_in; i++) {
        gradd_view_t *x = &d->in[i], *y = &run->narrow[i];
        *y = *x;
        const uint32_t *types = run->kernel->types[0] ? run->kernel->types : run->op->types;
        const uint32_t mask = gradd_types_at(types, i);
        if (x->type.dtype != GRADD_DT_F32 || (mask && !(mask & GRADD_DTB(BF16)))) continue;
        y->type.dtype = GRADD_DT_F16;
        y->data = gradd_case_alloc(d, (size_t)gradd_type_bytes(&x->type));
        for (int64_t k = 0, n = gradd_type_count(&x->type); k < n; k++) {
            const gradd_f16_t h = gradd_f32_f16(((float *)x->data)[k]);
            ((gradd_f16_t *)y->data)[k] = h;
            ((float *)x->data)[k] = gradd_f16_f32(h);
        }
    }
}

static gradd_status_t compute(run_t *run, const gradd_view_t *in, bool narrows, gradd_view_t *out) {
    gradd_case_data_t *d = &run->data;
    gradd_type_t types[GRADD_OP_MAX_OUT];
    gradd_prepared_t prepared;
    for (int j = 0; j < run->n_out; j++) {
        types[j] = run->types[j];
        if (narrows && types[j].dtype == GRADD_DT_F32) types[j].dtype = GRADD_DT_F16;
        out[j].type = types[j];
        out[j].data = gradd_case_alloc(d, (size_t)gradd_type_bytes(&types[j]));
    }
    gradd_infer_t c = {
        run->op, {d->attrs, d->n_attrs},
         eager_opset(run->op), d->n_in, run->n_out, in, types, 1,
        0
    };
    GRADD_TRY(gradd_kernel_prepare(run->kernel, &c, &prepared));
    gradd_launch_t r = {.op = run->op,
                        .attrs = c.attrs,
                        .opset = c.opset,
                        .n_in = c.n_in,
                        .n_out = c.n_out,
                        .in = in,
                        .out = out,
                        .seed = 7,
                        .node = 3};
    if (prepared.workspace) r.workspace = gradd_case_alloc(d, prepared.workspace);
    const gradd_status_t status = emu_compute(run->kernel, &r);
    gradd_kernel_unprepare(run->kernel, &prepared);
    return status;
}

/* NaN has bits of its own. */
static bool same_half(gradd_f16_t a, gradd_f16_t b) {
    const float x = gradd_f16_f32(a), y = gradd_f16_f32(b);
    return x == y || (x != x && y != y);
}

static bool same(const gradd_view_t *half, const gradd_view_t *wide) {
    if (half->type.dtype != GRADD_DT_F16 || wide->type.dtype == GRADD_DT_F16)
        return !memcmp(half->data, wide->data, (size_t)gradd_type_bytes(&wide->type));
    for (int64_t k = 0, n = gradd_type_count(&half->type); k < n; k++)
        if (!same_half(((gradd_f16_t *)half->data)[k], gradd_f32_f16(((float *)wide->data)[k])))
            return false;
    return true;
}

static bool is_exact(const gradd_kernel_t *kernel) {
    return !strcmp(kernel->name, "map") || !strcmp(kernel->name, "move") ||
           !strcmp(kernel->name, "random");
}

/* A row that lists its types says whether f16 is among them. */
static bool may_take(const gradd_kernel_t *kernel) {
    return !kernel->types[0] || kernel->types[0] & GRADD_DTB(F16);
}

static int checked, failures;

static void check(const gradd_op_t *op, const gradd_case_t *spec) {
    static run_t run;
    gradd_view_t half[GRADD_OP_MAX_OUT], wide[GRADD_OP_MAX_OUT];
    CHECK_OK(open_run(&run, op, spec->text));
    if (run.kernel && is_exact(run.kernel) && may_take(run.kernel) &&
        run.data.n_in) { /* else attributes say the type */
        narrow(&run);
        CHECK_OK(compute(&run, run.data.in, false, wide));
        CHECK_OK(compute(&run, run.narrow, true, half));
        checked++;
        for (int j = 0; j < run.n_out; j++)
            if (!same(&half[j], &wide[j]))
                failures++,
                    fprintf(stderr, "%s \"%s\" in f16: output %d\n", op->name, spec->text, j);
    }
    gradd_case_free(&run.data);
}

TEST_LIMIT(f16_is_computed_in_f32_and_rounded_once, 60) {
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++) {
            const gradd_op_t *op = &gradd_op_families[f]->v[i];
            for (const gradd_case_t *spec = op->cases; spec && spec->text; spec++)
                if (!gradd_op_is_composite(op)) check(op, spec);
        }
    printf("%d cases\n", checked);
    CHECK(checked > 0);
    CHECK_EQ_INT(failures, 0);
}

static const char *const mixed[][2] = {
    {"Rope",      "bf16[3,5,4,72] f32[5,1,64] f32[3,1,4,64] | interleaved=1"},
    {"Rope",      "bf16[3,5,4,72] f32[4,64] f32[4,64] | transposed=1"       },
    {"Rope",      "bf16[3,5,4,72] f32[4,32] f32[4,32] | shared=1"           },
    {"Rope",      "bf16[2,3,10] f32[3,6] f32[3,6]"                          },
    {"Rope",      "bf16[2,3,10] f32[3,3] f32[3,3] | shared=1 interleaved=1" },
    {"RopeApart", "bf16[3,5,4,72] f32[5,1,32] f32[5,1,32]"                  },
    {"RopeApart", "bf16[2,3,10] f32[3,3] f32[3,3] | transposed=1"           },
};

TEST(tables_of_rope_may_be_wider_than_its_operand) {
    for (size_t i = 0; i < sizeof mixed / sizeof mixed[0]; i++) {
        static run_t run;
        gradd_view_t there[1], here[1];
        CHECK_OK(open_run(&run, gradd_op_by_name(mixed[i][0]), mixed[i][1]));
        gradd_case_data_t *d = &run.data;
        CHECK_OK(compute(&run, d->in, false, there));
        here[0].type = run.types[0];
        here[0].data = gradd_case_alloc(d, (size_t)gradd_type_bytes(&run.types[0]));
        gradd_launch_t r = {
            .op = run.op,
            .attrs = {d->attrs, d->n_attrs},
            .opset = eager_opset(run.op),
            .n_in = d->n_in,
            .n_out = 1,
            .in = d->in,
            .out = here
        };
        CHECK_OK(eager_launch(&r));
        if (memcmp(there[0].data, here[0].data, (size_t)gradd_type_bytes(&run.types[0])) != 0)
            test_fail(__FILE__, __LINE__, "%s \"%s\"", mixed[i][0], mixed[i][1]);
        gradd_case_free(d);
    }
}
