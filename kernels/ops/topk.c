/* TopK: the K largest (or smallest) entries along an axis, with their positions.
 *
 * x is [outer, n, inner]; values and indices are [outer, K, inner], ordered by value (always: ONNX
 * allows any order with sorted = 0), equal values by rising index. NaN counts as larger than every
 * number, as in PyTorch. K must be known when the graph is compiled. Backward needs the indices,
 * an output of the forward node: dx = zeros with dvalues added at them.
 */
#include <string.h>

#include "kernels/dispatch.h"
#include "kernels/infer.h"
#include "kernels/op.h"
#include "kernels/rules.h"

/* ---- kernel ---------------------------------------------------------------------------------- */

typedef struct lane_s {
    int64_t n, k, stride; /* elements */
    bool largest;
} lane_t;

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
    static void lane_##T(const lane_t *p, const T *x, T *heap, int64_t *at) {                      \
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
    static void outer_##T(const lane_t *p, int64_t o, const T *x, T *y, int64_t *index, T *heap,   \
                          int64_t *at) {                                                           \
        for (int64_t i = 0; i < p->stride; i++) {                                                  \
            lane_##T(p, x + o * p->n * p->stride + i, heap, at);                                   \
            for (int64_t j = 0; j < p->k; j++) {                                                   \
                int64_t to = (o * p->k + j) * p->stride + i;                                       \
                if (y) y[to] = heap[j];                                                            \
                if (index) index[to] = at[j];                                                      \
            }                                                                                      \
        }                                                                                          \
    }

TOPK(float)
TOPK(double)
TOPK(int32_t)
TOPK(int64_t)

/* Scratch of one slice along the outer axis: k values (of at most 8 bytes) and k indices. Slices
 * are few or n is long, so one set per block of slices is enough. */
#define MAX_BLOCKS 64

static int64_t count_blocks(int64_t outer) {
    return outer < MAX_BLOCKS ? outer : MAX_BLOCKS;
}

static void run_block(const gradd_run_t *r, const lane_t *p, int64_t outer, int64_t block) {
    int64_t blocks = count_blocks(outer);
    int64_t *at = (int64_t *)r->work + block * 2 * p->k;
    void *heap = at + p->k, *y = r->out[0].data;
    int64_t *index = r->n_out > 1 ? r->out[1].data : NULL;
    const void *x = r->in[0].data;
    for (int64_t o = outer * block / blocks; o < outer * (block + 1) / blocks; o++) {
        switch (r->in[0].type.dtype) {
        case GRADD_DT_F32:
            outer_float(p, o, x, y, index, heap, at);
            break;
        case GRADD_DT_F64:
            outer_double(p, o, x, y, index, heap, at);
            break;
        case GRADD_DT_I32:
            outer_int32_t(p, o, x, y, index, heap, at);
            break;
        default:
            outer_int64_t(p, o, x, y, index, heap, at);
        }
    }
}

static gradd_status_t run_topk(const gradd_run_t *r) {
    const gradd_type_t *x = &r->in[0].type, *y = &r->out[0].type;
    int axis;
    GRADD_TRY(gradd_axis(gradd_attr_int(r->attrs, "axis", -1), x->rank, false, &axis));
    lane_t p = {.n = x->dims[axis],
                .k = y->dims[axis],
                .stride = 1,
                .largest = gradd_attr_int(r->attrs, "largest", 1)};
    int64_t outer = 1;
    for (int i = 0; i < axis; i++)
        outer *= x->dims[i];
    for (int i = axis + 1; i < x->rank; i++)
        p.stride *= x->dims[i];
    if (gradd_type_count(y) == 0) return GRADD_OK;
    int64_t blocks = count_blocks(outer);
#pragma omp parallel for schedule(static) if (outer * p.n * p.stride >= GRADD_PARALLEL_MIN)
    for (int64_t block = 0; block < blocks; block++)
        run_block(r, &p, outer, block);
    return GRADD_OK;
}

/* ---- shape rule ------------------------------------------------------------------------------ */

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
    if (c->n_out > 1) {
        c->out[1] = c->out[0];
        c->out[1].dtype = GRADD_DT_I64;
    }
    return GRADD_OK;
}

static size_t work_topk(const gradd_infer_t *c) {
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

GRADD_OPS(topk, {
                    .name = "TopK",
                    .domain = "",
                    .since = 10,
                    .min_in = 2,
                    .max_in = 2,
                    .min_out = 1,
                    .max_out = 2,
                    .counts = 2,
                    .types = {GRADD_T_NUM, GRADD_T_INDEX},
                    .attrs = GRADD_ATTR_LIST({"axis", GRADD_ATTR_INT, false},
                                             {"largest", GRADD_ATTR_INT, false},
                                             {"sorted", GRADD_ATTR_INT, false}
                      ),
                    .infer = infer_topk,
                    .grad = grad_topk,
                    .run = run_topk,
                    .work = work_topk,
                    .cases = GRADD_CASES(
                        {.text = "f32[3,8] i64[1]={2} -> 2"},
                        {.text = "f32[3,8,2] i64[1]={5} | axis=1 largest=0 sorted=1 -> 2"},
                        {.text = "f32[9] i64[1]={9} -> 2"},
                      {.text = "f32[4,3] i64[1]={0} -> 2"},
                        {.text = "i64[3,9] i64[1]={4} | largest=0 -> 2"},
                        {.text = "f32[80,9] i64[]={3} -> 2"},
                        {.text = "f32[5]={1,nan,3,nan,2} i64[1]={3} -> 2", .grad_tol = -1}
                      )
});
