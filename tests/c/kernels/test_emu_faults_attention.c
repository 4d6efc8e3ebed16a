/* Lists of live rows that attention refuses: the kernels of GPUs name the same row in the same
 * sentence as those of the CPU, and read nothing beyond. */
#include "kernels/cases/cases.h"
#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"
#include "tests/emu/device.h"
#include "tests/emu/order.h"
#include "tests/test.h"

#include <stdlib.h>
#include <string.h>

#define FORWARD "f32[1,3,2,8] f32[1,4,1,8] f32[1,4,1,8] - f32[2,1,3,5] "
#define BACKWARD                                                                                   \
    "f32[1,3,2,8] f32[1,3,2,8] f32[1,4,1,8] f32[1,4,1,8] f32[1,3,2,8] f32[1,2,2,3] - "             \
    "f32[2,1,3,5] "
#define RANGES "i32[1,1,3,3]={0,1,1,1,4,1,1,4,1} "
#define SIZES  " | layout=15 positions=3 key_positions=5"

static const char *const bad[][3] = {
    {"FusedAttention",     FORWARD RANGES "- i64[3]={1,6,7} i64[4]={2,5,6,8}" SIZES,
     "row 6 of 6, entry 1 "                  },
    {"FusedAttention",     FORWARD RANGES "- i64[3]={1,3,-8} i64[4]={2,5,6,8}" SIZES,
     "row 7 of 6, entry 2 "                  },
    {"FusedAttention",     FORWARD RANGES "- i64[3]={1,3,5} i64[4]={2,5,6,2147483647}" SIZES,
     "row 2147483647 of 2147483647, entry 3 "},
    {"FusedAttentionGrad", BACKWARD RANGES "i64[3]={9,3,5} i64[4]={2,5,6,8}" SIZES " -> 4",
     "row 9 of 6, entry 0 "                  },
};

typedef struct call_s {
    gradd_case_data_t data;
    gradd_type_t types[GRADD_OP_MAX_OUT];
    gradd_view_t out[GRADD_OP_MAX_OUT];
    gradd_infer_t c;
    gradd_launch_t r;
} attempt_t;

static gradd_status_t open_call(const char *const *row, attempt_t *call) {
    gradd_case_data_t *data = &call->data;
    const gradd_op_t *op = gradd_op_by_name(row[0]);
    GRADD_TRY(gradd_case_parse(row[1], GRADD_DT_F32, 1, data));
    const int n_out = data->n_out ? data->n_out : op->min_out;
    const gradd_attrs_t attrs = {data->attrs, data->n_attrs};
    call->c = (gradd_infer_t){op, attrs, 1, data->n_in, n_out, data->in, call->types, 1, 0};
    GRADD_TRY(gradd_op_infer(&call->c));
    for (int j = 0; j < n_out; j++) {
        call->out[j].type = call->types[j];
        call->out[j].data = gradd_case_alloc(data, (size_t)gradd_type_bytes(&call->types[j]));
    }
    call->r = (gradd_launch_t){.op = op,
                               .attrs = attrs,
                               .opset = 1,
                               .n_in = data->n_in,
                               .n_out = n_out,
                               .in = data->in,
                               .out = call->out};
    return GRADD_OK;
}

static gradd_status_t run_there(attempt_t *call) {
    gradd_prepared_t prepared;
    const gradd_kernel_t *kernel = gradd_backend_kernel(&gradd_backend_emu, &call->c);
    if (!kernel) return gradd_no_kernel(&gradd_backend_emu, &call->c);
    GRADD_TRY(gradd_kernel_prepare(kernel, &call->c, &prepared));
    call->r.workspace = gradd_case_alloc(&call->data, prepared.workspace);
    call->r.state = prepared.state;
    gradd_status_t status = emu_compute(kernel, &call->r);
    gradd_kernel_unprepare(kernel, &prepared);
    return status;
}

TEST(live_rows_beyond_the_end_are_named) {
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        for (long order = 0; order < 4; order++) {
            static attempt_t call;
            emu_set_order(order);
            CHECK_OK(open_call(bad[i], &call));
            CHECK_STATUS(GRADD_E_INDEX, gradd_cpu_call(&call.c, &call.r));
            CHECK_ERROR_HAS(bad[i][2]);
            char *sentence = strdup(gradd_error_message());
            CHECK_STATUS(GRADD_E_INDEX, run_there(&call));
            CHECK(!strcmp(gradd_error_message(), sentence));
            free(sentence);
            gradd_case_free(&call.data);
        }
}
