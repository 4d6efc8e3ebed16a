/* com.gradd CheckIndex: the indices that it is given, or an error.
 *
 * y = x, where every element is within [0, limit); anything else fails with INDEX, which names the
 * value, the limit and the position. ONNX counts negative indices from the end, and its OneHot
 * ignores indices out of range; the capture puts this in front of operators for which torch refuses
 * both. It is an operator of its own, not an attribute of the indexing operators: passes see the
 * same Gather as ever, one check serves all readers of the same indices, and known indices are
 * checked when the graph is built.
 *
 * It copies first and checks the copy: the original may lie in the memory of a client, which may
 * change it while we run. Indices that have no other reader are checked in place.
 */
#include "kernels/contract/fault.h"
#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/pick.h"
#include "kernels/describe/cost.h"
#include "kernels/describe/dispatch.h"
#include "kernels/rules/infer.h"

/* ---- kernel ---------------------------------------------------------------------------------- */

/* As unsigned numbers, negative ones are above every limit. */
#define ANY_BEYOND(T, U)                                                                           \
    GRADD_MULTIARCH static int any_beyond_##T(const T *x, int64_t n, U limit) {                    \
        int any = 0;                                                                               \
        for (int64_t i = 0; i < n; i++)                                                            \
            any |= (U)x[i] >= limit;                                                               \
        return any;                                                                                \
    }

ANY_BEYOND(int32_t, uint32_t)
ANY_BEYOND(int64_t, uint64_t)

static int block_beyond(const gradd_view_t *v, int64_t at, int64_t n, int64_t limit) {
    if (v->type.dtype == GRADD_DT_I64)
        return any_beyond_int64_t((const int64_t *)v->data + at, n, (uint64_t)limit);
    const uint32_t low = limit > INT32_MAX ? (uint32_t)INT32_MAX + 1 : (uint32_t)limit;
    return any_beyond_int32_t((const int32_t *)v->data + at, n, low);
}

static gradd_status_t compute_check_index(const gradd_launch_t *r) {
    enum { BLOCK = 4096 };
    const gradd_view_t *y = &r->out[0];
    const int64_t n = gradd_type_count(&y->type), blocks = (n + BLOCK - 1) / BLOCK;
    const int64_t given = gradd_pick_index(&r->in[1], 0), limit = given < 0 ? 0 : given;
    int any = 0;
    if (y->data != r->in[0].data)
        gradd_copy_bytes(y->data, r->in[0].data, (size_t)gradd_type_bytes(&y->type));
#pragma omp parallel for schedule(static) reduction(| : any) if (n >= GRADD_PARALLEL_MIN)
    for (int64_t b = 0; b < blocks; b++)
        any |= block_beyond(y, b * BLOCK, b + 1 < blocks ? BLOCK : n - b * BLOCK, limit);
    for (int64_t i = 0; any && i < n; i++) {
        const int64_t index = gradd_pick_index(y, i);
        if (index < 0 || index >= limit)
            return gradd_fault_fail(&(gradd_fault_t){
                .kind = GRADD_FAULT_INDEX, .value = index, .limit = limit, .position = i});
    }
    return GRADD_OK;
}

/* ---- shape rule ------------------------------------------------------------------------------ */

static gradd_status_t infer_check_index(gradd_infer_t *c) {
    if (gradd_type_count(&c->in[1].type) != 1)
        return GRADD_FAIL(GRAPH, "the limit has %lld elements, not one",
                          (long long)gradd_type_count(&c->in[1].type));
    c->out[0] = c->in[0].type;
    return GRADD_OK;
}

/* ---- row ------------------------------------------------------------------------------------- */

GRADD_OPS(checkindex, GRADD_OP("CheckIndex", "com.gradd", 1, (2, 2), (1, 1),
                               .flags = GRADD_OP_NO_GRAD, .types = {GRADD_T_INDEX, GRADD_DTB(I64)},
                               .infer = infer_check_index, .ref = GRADD_REF(compute_check_index),
                               .cases = GRADD_CASES(
                                   {.text = "i64[2,3]={0,4,2,3,1,4} i64[]={5}"},
                                   {.text = "i32[2]={0,4} i64[1]={5}"},
                                   {.text = "i32[2]={0,2147483647} i64[]={9000000000000000000}"},
                                   {.text = "i64[]={0} i64[]={1}"}, {.text = "i64[0]={} i64[]={0}"},
                                   {.text = "i64[70,1000]:(0,8) i64[]={9}"},
                                   {.text = "i32[4,9]:(0,8) i64[]={9}"})));

GRADD_KERNELS(cpu, checkindex,
              GRADD_KERNEL("CheckIndex", "loop", .inplace = 1, .compute = compute_check_index,
                           .cost = gradd_cost_move));
