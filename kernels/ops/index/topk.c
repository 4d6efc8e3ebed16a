/* TopK: the K largest (or smallest) entries along an axis, with their positions. And com.gradd
 * TorchTopK and TorchSort, which choose and order equal entries as torch.topk and torch.sort do.
 *
 * x is [outer, n, inner]; values and indices are [outer, K, inner]. NaN counts as larger than every
 * number, as in PyTorch. K must be known when the graph is compiled. Backward needs the indices,
 * an output of the forward node: dx = zeros with dvalues added at them.
 *
 * ONNX says of TopK that the lower index comes first among equal values, and ours are ordered so
 * whatever `sorted` says. PyTorch calls that order undefined, but its CPU kernels are plain
 * algorithms with one result, and their choice among equal elements decides which one gets the
 * gradient: zeros behind a ReLU, scores of a router in bf16. So captured modules use rows of their
 * own, which take the steps that PyTorch takes (kernels/math/select.h), a slice of n entries at a
 * time:
 *
 *     TorchTopK, 64 k <= n   partial sort of k, whatever `sorted` says
 *     TorchTopK, otherwise   the k-th entry selected; if `sorted`, those in front of it sorted
 *     TorchSort              sorted; 32768 or more integers of rank 1, upwards: sorted stably
 *
 * A slice is worked on by one thread, so results do not depend on their number.
 */
#include <math.h>
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/parts.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/slice_order.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

/* ---- TopK ------------------------------------------------------------------------------------ */

typedef struct topk_lane_s {
    int64_t n, k, stride; /* elements */
    bool largest;
} topk_lane_t;

/* One lane of x into the first k places of a heap whose root is the worst entry kept; then sorted
 * by taking the root away from the end. heap and at hold k entries each. */
#define TOPK(T)                                                                                    \
    static bool better_##T(T a, int64_t ia, T b, int64_t ib, bool largest) {                       \
        bool nan_a = a != a, nan_b = b != b;                                                       \
        if (nan_a || nan_b) return nan_a == nan_b ? ia < ib : nan_a == largest;                    \
        if (a == b) return ia < ib;                                                                \
        return (a > b) == largest;                                                                 \
    }                                                                                              \
    static void sink_##T(T *heap, int64_t *at, int64_t k, bool largest) {                          \
        T value = heap[0];                                                                         \
        int64_t index = at[0], i = 0;                                                              \
        for (int64_t c = 1; c < k; c = 2 * i + 1) {                                                \
            if (c + 1 < k && better_##T(heap[c], at[c], heap[c + 1], at[c + 1], largest)) c++;     \
            if (better_##T(heap[c], at[c], value, index, largest)) break;                          \
            heap[i] = heap[c], at[i] = at[c], i = c;                                               \
        }                                                                                          \
        heap[i] = value, at[i] = index;                                                            \
    }                                                                                              \
    static void lane_##T(const topk_lane_t *p, const T *x, T *heap, int64_t *at) {                 \
        int64_t k = p->k;                                                                          \
        for (int64_t i = 0; i < p->n && k; i++) {                                                  \
            T v = x[i * p->stride];                                                                \
            if (i < k) { /* sift up */                                                             \
                int64_t c = i;                                                                     \
                for (; c && better_##T(heap[(c - 1) / 2], at[(c - 1) / 2], v, i, p->largest);      \
                     c = (c - 1) / 2)                                                              \
                    heap[c] = heap[(c - 1) / 2], at[c] = at[(c - 1) / 2];                          \
                heap[c] = v, at[c] = i;                                                            \
            } else if (better_##T(v, i, heap[0], at[0], p->largest)) {                             \
                heap[0] = v, at[0] = i;                                                            \
                sink_##T(heap, at, k, p->largest);                                                 \
            }                                                                                      \
        }                                                                                          \
        for (int64_t end = k - 1; end > 0; end--) {                                                \
            T v = heap[end];                                                                       \
            int64_t i = at[end];                                                                   \
            heap[end] = heap[0], at[end] = at[0];                                                  \
            heap[0] = v, at[0] = i;                                                                \
            sink_##T(heap, at, end, p->largest);                                                   \
        }                                                                                          \
    }                                                                                              \
    static void slice_##T(const topk_lane_t *p, int64_t number, const T *x, T *y, int64_t *index,  \
                          T *heap, int64_t *at) {                                                  \
        const int64_t o = number / p->stride, i = number % p->stride;                              \
        lane_##T(p, x + o * p->n * p->stride + i, heap, at);                                       \
        for (int64_t j = 0; j < p->k; j++) {                                                       \
            int64_t to = (o * p->k + j) * p->stride + i;                                           \
            if (y) y[to] = heap[j];                                                                \
            if (index) index[to] = at[j];                                                          \
        }                                                                                          \
    }

TOPK(float)
TOPK(double)
TOPK(int32_t)
TOPK(int64_t)

/* Scratch of one slice: k values (of at most 8 bytes) and k indices. Slices are few or n is long,
 * so one set per block of slices is enough. */
#define MAX_BLOCKS 64

static int64_t count_blocks(int64_t slices) {
    return slices < MAX_BLOCKS ? slices : MAX_BLOCKS;
}

static void compute_block(const gradd_launch_t *r, const topk_lane_t *p, gradd_range_t some,
                          int64_t block) {
    const int64_t slices = some.to - some.from, blocks = count_blocks(slices);
    int64_t *at = (int64_t *)r->workspace + block * 2 * p->k;
    void *heap = at + p->k, *y = r->out[0].data;
    int64_t *index = r->n_out > 1 ? r->out[1].data : NULL;
    const void *x = r->in[0].data;
    for (int64_t i = slices * block / blocks; i < slices * (block + 1) / blocks; i++) {
        const int64_t number = some.from + i;
        switch (r->in[0].type.dtype) {
        case GRADD_DT_F32:
            slice_float(p, number, x, y, index, heap, at);
            break;
        case GRADD_DT_F64:
            slice_double(p, number, x, y, index, heap, at);
            break;
        case GRADD_DT_I32:
            slice_int32_t(p, number, x, y, index, heap, at);
            break;
        default:
            slice_int64_t(p, number, x, y, index, heap, at);
        }
    }
}

static gradd_status_t compute_topk(const gradd_launch_t *r) {
    const gradd_type_t *x = &r->in[0].type, *y = &r->out[0].type;
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(r->attrs, "axis", -1), x->rank, false, &axis));
    topk_lane_t p = {.n = x->dims[axis],
                     .k = y->dims[axis],
                     .stride = 1,
                     .largest = gradd_attr_int(r->attrs, "largest", 1)};
    for (int i = axis + 1; i < x->rank; i++)
        p.stride *= x->dims[i];
    if (gradd_type_count(y) == 0) return GRADD_OK;
    const int64_t all = gradd_type_count(x);
    const gradd_range_t some = gradd_part_of(r, all / p.n);
    const int64_t blocks = count_blocks(some.to - some.from);
#pragma omp parallel for schedule(static) if (all >= GRADD_PARALLEL_MIN)
    for (int64_t block = 0; block < blocks; block++)
        compute_block(r, &p, some, block);
    return GRADD_OK;
}

/* ---- TorchTopK, TorchSort -------------------------------------------------------------------- */

static gradd_order_t how_of_topk(gradd_attrs_t attrs, int64_t n, int64_t k) {
    if (k <= n / 64) return GRADD_ORDER_PARTIAL;
    return gradd_attr_int(attrs, "sorted", 1) ? GRADD_ORDER_SELECT_SORT : GRADD_ORDER_SELECT;
}

/* PyTorch sorts large vectors of integers by radix, which is stable. */
static gradd_order_t how_of_sort(const gradd_type_t *x, bool down) {
    const bool integers = x->dtype == GRADD_DT_I32 || x->dtype == GRADD_DT_I64;
    return integers && x->rank == 1 && !down && x->dims[0] >= 32768 ? GRADD_ORDER_SORT_STABLY
                                                                    : GRADD_ORDER_SORT;
}

gradd_status_t gradd_slice_of(const gradd_op_t *op, gradd_attrs_t attrs, const gradd_type_t *x,
                              const gradd_type_t *y, gradd_slice_t *out) {
    const bool sorts = op->max_in == 1, onnx = !op->domain[0];
    const bool down = gradd_attr_int(attrs, sorts ? "descending" : "largest", !sorts);
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(attrs, "axis", -1), x->rank, false, &axis));
    const int64_t n = x->dims[axis], k = y->dims[axis];
    *out = (gradd_slice_t){.n = n,
                           .k = k,
                           .stride = 1,
                           .flip = -(int64_t)down,
                           .dtype = x->dtype,
                           .how = onnx    ? GRADD_ORDER_SORT_STABLY
                                  : sorts ? how_of_sort(x, down)
                                          : how_of_topk(attrs, n, k)};
    for (int i = axis + 1; i < x->rank; i++)
        out->stride *= x->dims[i];
    return GRADD_OK;
}

static int64_t count_shares(int64_t n_slices, int threads) {
    const int64_t most = threads > 0 ? threads : MAX_BLOCKS;
    return n_slices < most ? n_slices : most;
}

static void copy_element(char *to, const char *from, size_t bytes) {
    if (bytes == 4)
        memcpy(to, from, 4);
    else if (bytes == 8)
        memcpy(to, from, 8);
    else
        memcpy(to, from, 2);
}

static void compute_slice(const gradd_launch_t *r, const gradd_slice_t *s, int64_t number,
                          gradd_entry_t *room) {
    const int64_t outer = number / s->stride, inner = number % s->stride;
    const size_t bytes = gradd_dtype_bytes(s->dtype);
    const char *x = (const char *)r->in[0].data + (outer * s->n * s->stride + inner) * bytes;
    char *y = r->out[0].data;
    int64_t *index = r->n_out > 1 ? r->out[1].data : NULL;
    gradd_slice_order(s, x, room);
    for (int64_t j = 0; j < s->k; j++) {
        const int64_t to = (outer * s->k + j) * s->stride + inner, at = room[j].at;
        if (y) copy_element(y + to * bytes, x + at * s->stride * bytes, bytes);
        if (index) index[to] = at;
    }
}

static gradd_status_t compute_like_torch(const gradd_launch_t *r) {
    gradd_slice_t s;
    GRADD_TRY(gradd_slice_of(r->op, r->attrs, &r->in[0].type, &r->out[0].type, &s));
    const int64_t all = gradd_type_count(&r->in[0].type);
    if (gradd_type_count(&r->out[0].type) == 0) return GRADD_OK;
    const gradd_range_t some = gradd_part_of(r, all / s.n);
    const int64_t slices = some.to - some.from, shares = count_shares(slices, r->threads);
#pragma omp parallel for schedule(static) if (all >= GRADD_PARALLEL_MIN)
    for (int64_t share = 0; share < shares; share++) {
        gradd_entry_t *room = (gradd_entry_t *)r->workspace + share * gradd_slice_room(&s);
        for (int64_t i = slices * share / shares; i < slices * (share + 1) / shares; i++)
            compute_slice(r, &s, some.from + i, room);
    }
    return GRADD_OK;
}

static size_t workspace_like_torch(const gradd_infer_t *c) {
    gradd_slice_t s;
    const gradd_type_t *x = &c->in[0].type;
    if (gradd_slice_of(c->op, c->attrs, x, &c->out[0], &s) || !s.n) return 0;
    const int64_t shares = count_shares(gradd_type_count(x) / s.n, c->threads);
    return (size_t)(shares * gradd_slice_room(&s)) * sizeof(gradd_entry_t);
}

/* ---- for both: parts and cost ---------------------------------------------------------------- */

static int parts_of_slices(const gradd_infer_t *c) {
    gradd_slice_t s;
    const gradd_type_t *x = &c->in[0].type;
    if (gradd_slice_of(c->op, c->attrs, x, &c->out[0], &s) || !s.n) return 0;
    return gradd_parts_of_tasks(c, gradd_type_count(x) / s.n);
}

/* Each entry is looked at, and those that are kept are compared with others in some order, which
 * takes as long as so many bytes take to move. */
enum { LOOK = 60, COMPARE = 80 };

static void cost_of_slices(const gradd_infer_t *c, gradd_cost_t *cost) {
    gradd_slice_t s;
    const gradd_type_t *x = &c->in[0].type;
    if (gradd_slice_of(c->op, c->attrs, x, &c->out[0], &s) || !s.n) return;
    const double kept = (double)s.k * log2((double)s.k + 1);
    cost->again = (double)(gradd_type_count(x) / s.n) * (LOOK * (double)s.n + COMPARE * kept);
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static void infer_indices(gradd_infer_t *c) {
    if (c->n_out < 2) return;
    c->out[1] = c->out[0];
    c->out[1].dtype = GRADD_DT_I64;
}

static gradd_status_t infer_topk(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type;
    int64_t k;
    int axis, n;
    GRADD_TRY(gradd_known_i64s(c, 1, &k, 1, &n));
    GRADD_TRY(gradd_axis(gradd_attr_int(c->attrs, "axis", -1), x->rank, false, &axis));
    if (n != 1 || k < 0 || k > x->dims[axis])
        return GRADD_FAIL(GRAPH, "K does not fit an axis of %lld", (long long)x->dims[axis]);
    c->out[0] = *x;
    c->out[0].dims[axis] = k;
    infer_indices(c);
    return GRADD_OK;
}

static gradd_status_t infer_sort(gradd_infer_t *c) {
    int axis;
    c->out[0] = c->in[0].type;
    GRADD_TRY(gradd_axis(gradd_attr_int(c->attrs, "axis", -1), c->out[0].rank, false, &axis));
    infer_indices(c);
    return GRADD_OK;
}

static size_t workspace_topk(const gradd_infer_t *c) {
    int axis;
    const gradd_type_t *y = &c->out[0];
    if (gradd_axis(gradd_attr_int(c->attrs, "axis", -1), y->rank, false, &axis)) return 0;
    return (size_t)(MAX_BLOCKS * 2 * y->dims[axis]) * sizeof(int64_t);
}

/* ---- gradient rule --------------------------------------------------------------------------- */

static gradd_status_t grad_topk(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    if (!g->need[0] || g->dout[0] == GRADD_NONE) return GRADD_OK;
    gradd_type_t x = *gradd_val_type(b, g->in[0]);
    gradd_attr_t attrs[2] = {gradd_make_ints("dims", x.dims, (size_t)x.rank),
                             gradd_make_int("axis", gradd_attr_int(g->attrs, "axis", -1))};
    gradd_val_t in[2] = {g->dout[0], g->output(g, 1)};
    g->din[0] = gradd_emit_attrs(b, "GatherElementsGrad", in, 2, attrs, 2);
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

GRADD_OPS(
    topk,
    GRADD_OP(
        "TopK", "", 10, (2, 2), (1, 2), .counts = 2, .types = {GRADD_T_NUM, GRADD_T_INDEX},
        .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false},
                                 {"largest", GRADD_ATTR_INT, false},
                                 {"sorted", GRADD_ATTR_INT, false}),
        .infer = infer_topk, .grad = grad_topk, .ref = GRADD_REF(compute_topk),
        .cases = GRADD_CASES(
            {.text = "f32[3,8] i64[1]={2} -> 2"},
            {.text = "f32[3,8,2] i64[1]={5} | axis=1 largest=0 sorted=1 -> 2"},
            {.text = "f32[9] i64[1]={9} -> 2"}, {.text = "f32[4,3] i64[1]={0} -> 2"},
            {.text = "i64[3,9] i64[1]={4} | largest=0 -> 2"}, {.text = "f32[80,9] i64[]={3} -> 2"},
            {.text = "f32[3,70,5] i64[1]={70} | axis=1 largest=0 -> 2"},
            {.text = "i64[2,1500]:(0,9) i64[1]={40} -> 2"},
            {.text = "f32[3,9000] i64[1]={50} -> 2", .grad_tol = -1},
            {.text = "i32[2,9000]:(0,99) i64[1]={1024} | largest=0 -> 2"},
            {.text = "i32[2,4000,2]:(0,99) i64[1]={1025} | axis=1 -> 2"},
            {.text = "i64[5000]:(-9000000000000000000,9000000000000000000) i64[1]={5000} -> 2"},
            {.text = "f32[6]={inf,-inf,0,-0.0,nan,0} i64[1]={6} -> 2", .grad_tol = -1},
            {.text = "f32[6]={inf,-inf,0,-0.0,nan,0} i64[1]={6} | largest=0 -> 2", .grad_tol = -1},
            {.text = "i32[4]={-2147483648,2147483647,0,-1} i64[1]={4} | largest=0 -> 2"},
            {.text = "f32[5]={1,nan,3,nan,2} i64[1]={3} -> 2", .grad_tol = -1})),
    GRADD_OP("TorchTopK", "com.gradd", 1, (2, 2), (1, 2), .counts = 2,
             .types = {GRADD_T_NUM, GRADD_T_INDEX},
             .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false},
                                      {"largest", GRADD_ATTR_INT, false},
                                      {"sorted", GRADD_ATTR_INT, false}),
             .infer = infer_topk, .grad = grad_topk, .ref = GRADD_REF(compute_like_torch),
             .cases = GRADD_CASES(
                 {.text = "f32[3,8] i64[1]={2} -> 2"},
                 {.text = "f32[3,8,2] i64[1]={5} | axis=1 largest=0 sorted=0 -> 2"},
                 {.text = "f32[9] i64[1]={9} -> 2"}, {.text = "f32[4,3] i64[1]={0} -> 2"},
                 {.text = "f32[0,3] i64[1]={2} -> 2"}, {.text = "f32[5,300] i64[1]={4} -> 2"},
                 {.text = "f32[3,70] i64[1]={40} -> 2"},
                 {.text = "i64[3,9] i64[1]={4} | largest=0 -> 2"},
                 {.text = "i32[3,400] i64[]={4} | sorted=0 -> 2"},
                 {.text = "i64[40,64]:(0,9) i64[]={6} -> 2"},
                 {.text = "f32[3,3000] i64[]={90} -> 2", .grad_tol = -1},
                 {.text = "i32[2,3000]:(0,999999) i64[]={1500} -> 2"},
                 {.text = "i32[2,3000,2]:(0,999999999) i64[]={2000} | axis=1 largest=0 -> 2"},
                 {.text = "f32[4,40] i64[]={40} -> 2", .grad_tol = -1},
                 {.text = "f32[2,2000] i64[]={20} -> 2", .grad_tol = -1},
                 {.text = "f32[5]={1,nan,3,nan,2} i64[1]={3} -> 2", .grad_tol = -1})),
    GRADD_OP(
        "TorchSort", "com.gradd", 1, (1, 1), (1, 2), .counts = 2, .types = {GRADD_T_NUM},
        .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false},
                                 {"descending", GRADD_ATTR_INT, false}),
        .infer = infer_sort, .grad = grad_topk, .ref = GRADD_REF(compute_like_torch),
        .cases = GRADD_CASES(
            {.text = "f32[3,8] -> 2"}, {.text = "f32[3,50,2] | axis=1 descending=1 -> 2"},
            {.text = "f32[0,3] -> 2"}, {.text = "f32[3,0] -> 2"}, {.text = "i64[3,90] -> 2"},
            {.text = "i32[33000]:(0,9) -> 2"}, {.text = "f32[3,5000] -> 2", .grad_tol = -1},
            {.text = "i64[2,3000]:(-9000000000000000000,9000000000000000000) | descending=1 -> 2"},
            {.text = "i64[3,2500]:(0,9) -> 2"},
            {.text = "f32[9,64,3] | axis=1 -> 2", .grad_tol = -1},
            {.text = "f32[5]={1,nan,3,nan,2} -> 2", .grad_tol = -1})));

GRADD_KERNELS(cpu, topk,
              GRADD_KERNEL("TopK", "loop", .types = {GRADD_T_F32_F64 | GRADD_T_INT, GRADD_T_INDEX},
                           .compute = compute_topk, .workspace = workspace_topk,
                           .parts = parts_of_slices, .cost = cost_of_slices),
              GRADD_KERNEL("TorchTopK", "loop", .compute = compute_like_torch,
                           .workspace = workspace_like_torch, .parts = parts_of_slices,
                           .cost = cost_of_slices),
              GRADD_KERNEL("TorchSort", "loop", .compute = compute_like_torch,
                           .workspace = workspace_like_torch, .parts = parts_of_slices,
                           .cost = cost_of_slices));
