/* Products by cuBLASLt, as far as its stand-in tells (tests/emu/lt.h): operands that are less
 * aligned than tensors are. */
#include "kernels/backend.h"
#include "kernels/cases.h"
#include "kernels/registry.h"
#include "tests/c/eager.h"
#include "tests/emu/device.h"
#include "tests/emu/lt.h"
#include "tests/test.h"

#include <stdlib.h>
#include <string.h>

enum { TENSOR = 64, MOST_SHIFT = 64 }; /* where tensors begin; bytes that one is moved by */

typedef struct product_s {
    const gradd_op_t *op;
    const gradd_kernel_t *kernel;
    gradd_case_data_t data;
    gradd_type_t type; /* of the result */
    gradd_infer_t c;
    gradd_prepared_t prepared;
    void *workspace;
} product_t;

static void *aligned(size_t bytes) {
    void *p = aligned_alloc(TENSOR, (bytes + MOST_SHIFT + TENSOR) / TENSOR * TENSOR);
    CHECK(p != NULL);
    return p;
}

static void open_product(product_t *p, const char *op, const char *text, gradd_dtype_t dtype) {
    *p = (product_t){.op = gradd_op_by_name(op)};
    CHECK_OK(gradd_case_parse(text, dtype, 11, &p->data));
    p->c = (gradd_infer_t){
        p->op,
        {p->data.attrs, p->data.n_attrs},
        eager_opset(p->op),
        p->data.n_in,
        1,
        p->data.in,
        &p->type,
        1
    };
    CHECK_OK(gradd_op_infer(&p->c));
    p->kernel = gradd_backend_kernel(&gradd_backend_emu, &p->c);
    CHECK(p->kernel != NULL);
    CHECK_OK(gradd_kernel_prepare(p->kernel, &p->c, &p->prepared));
    p->workspace = aligned(p->prepared.workspace);
}

static void close_product(product_t *p) {
    gradd_kernel_unprepare(p->kernel, &p->prepared);
    free(p->workspace);
    gradd_case_free(&p->data);
}

/* The result in memory of its own, with operand `moved` (n_in: the result) `shift` bytes behind
 * where tensors begin. */
static gradd_status_t multiply(const product_t *p, int moved, size_t shift, void **out) {
    gradd_view_t in[GRADD_OP_MAX_IN], result = {p->type, NULL};
    const int n = p->c.n_in;
    const size_t bytes = (size_t)gradd_type_bytes(&p->type);
    void *to = aligned(bytes), *from[GRADD_OP_MAX_IN];
    for (int i = 0; i < n; i++) {
        const size_t size = (size_t)gradd_type_bytes(&p->data.in[i].type);
        in[i] = p->data.in[i];
        from[i] = aligned(size);
        in[i].data = (char *)from[i] + (i == moved ? shift : 0);
        memcpy(in[i].data, p->data.in[i].data, size);
    }
    result.data = (char *)to + (moved == n ? shift : 0);
    const gradd_launch_t r = {.op = p->op,
                              .attrs = p->c.attrs,
                              .opset = p->c.opset,
                              .n_in = n,
                              .n_out = 1,
                              .in = in,
                              .out = &result,
                              .workspace = p->workspace,
                              .state = p->prepared.state,
                              .threads = 1};
    const gradd_status_t status = emu_compute(p->kernel, &r);
    memmove(to, result.data, bytes);
    for (int i = 0; i < n; i++)
        free(from[i]);
    *out = to;
    return status;
}

/* ---- alignment ------------------------------------------------------------------------------- */

static const struct {
    const char *op, *text;
} shapes[] = {
    {"MatMul",      "f32[5,8] f32[8,16]"                     },
    {"MatMul",      "f32[5,7] f32[7,3]"                      },
    {"FusedMatMul", "f32[7,5] f32[7,3] | transA=1 alpha=0.5" },
    {"Linear",      "f32[5,8] f32[8,16] f32[16]"             },
    {"Linear",      "f32[2,3,7] f32[9,7] f32[9] | transB=1"  },
    {"MatMul",      "f32[3,5,7] f32[3,7,5]"                  },
    {"MatMul",      "f32[2,1,3,5] f32[2,4,5,3]"              },
    {"Gemm",        "f32[5,8] f32[8,16] f32[5,16] | beta=0.5"},
};

/* Any operand may lie anywhere, down to its elements' size; the bits are the same. */
TEST(operands_of_products_lie_anywhere) {
    static const gradd_dtype_t types[] = {GRADD_DT_F32, GRADD_DT_BF16, GRADD_DT_F64};
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++)
        for (int t = 0; t < 3; t++) {
            const size_t size = gradd_dtype_bytes(types[t]);
            product_t p;
            void *want, *got;
            open_product(&p, shapes[k].op, shapes[k].text, types[t]);
            CHECK_OK(multiply(&p, -1, 0, &want));
            for (int moved = 0; moved <= p.c.n_in; moved++)
                for (size_t shift = size; shift <= 32; shift *= 2) {
                    CHECK_OK(multiply(&p, moved, shift, &got));
                    CHECK(!memcmp(got, want, (size_t)gradd_type_bytes(&p.type)));
                    free(got);
                }
            free(want);
            close_product(&p);
        }
}

/* The choice for less is taken where it is needed and nowhere else. */
TEST(aligned_operands_have_the_first_choice) {
    product_t p;
    void *out;
    open_product(&p, "Linear", "f32[5,8] f32[8,16] f32[16]", GRADD_DT_BF16);
    for (int moved = -1; moved <= 3; moved++)
        for (size_t shift = 2; shift <= 64; shift *= 2) {
            CHECK_OK(multiply(&p, moved, shift, &out));
            CHECK_EQ_INT(emu_lt()->last_align, moved < 0 || shift >= 16 ? 16 : 2);
            free(out);
        }
    close_product(&p);
}

/* Calls of an outer batch step through the operands: the second one of 15 elements of f32 leaves 4
 * bytes, and the library was told so of that side alone. */
TEST(steps_of_a_batch_are_promised) {
    product_t p;
    void *out;
    const int before = emu_lt()->proposals;
    open_product(&p, "MatMul", "f32[2,1,4,5] f32[2,3,5,3]", GRADD_DT_F32);
    CHECK_EQ_INT(emu_lt()->proposals, before + 2);
    CHECK_OK(multiply(&p, -1, 0, &out));
    free(out);
    close_product(&p);
}

/* What it is told must be true: else it refuses, and says which side. */
TEST(the_stand_in_sees_a_broken_promise) {
    product_t p;
    void *out;
    open_product(&p, "MatMul", "f32[2,8] f32[8,8]", GRADD_DT_F32);
    for (int moved = 0; moved <= 2; moved++) {
        emu_lt()->wants = 32; /* as an algorithm would that was chosen for more than was true */
        CHECK_STATUS(GRADD_E_DEVICE, multiply(&p, moved, 16, &out));
        CHECK_ERROR_HAS("invalid value");
        free(out);
        emu_lt()->wants = 0;
        CHECK_OK(multiply(&p, moved, 16, &out));
        free(out);
    }
    close_product(&p);
}
