/* Dropout, its gradient and DropoutAdd on a GPU: the mask of the CPU, from the same counters.
 *
 * A call of Philox gives four words, of elements in distances of 16 (rng.h). A thread takes a pack
 * of neighbours and the three packs in those distances, so that no word is made twice; where memory
 * or a list of live rows does not allow packs, it takes the four elements of one counter. Ratio and
 * mode are read here, for they may be values of the run. See kernels/ops/random/dropout.c.
 */
#include "kernels/cuda/gpu.h"
#include "kernels/math/formulas.h"
#include "kernels/math/rng.h"

enum {
    THREADS = 256,
    ROWS = 3, /* the operand that lists live rows: of Dropout and DropoutGrad, of DropoutAdd */
    ADD_ROWS = 2
};

/* Elements of a pack: more than four would take more registers for words than they save time. */
template <class T> constexpr int pack_width = sizeof(T) < 8 ? 4 : 2;

struct drop_t {
    const void *x, *plus; /* plus: what is added; NULL = nothing */
    void *y;
    uint8_t *mask; /* may be NULL */
    int64_t n;
    uint64_t seed, node;
    const void *ratio;       /* NULL: p */
    const uint8_t *training; /* NULL: `active` alone decides */
    int ratio_dtype;
    double p;
    bool active;
    const int64_t *rows; /* list of live rows; NULL = all elements are one row */
    int64_t n_rows, size;
    gpu_faults_t faults;
};

/* The values that all threads of a launch share. */
struct chance_t {
    bool refused, active;
    uint64_t limit;
    double scale;
};

GPU_FN chance_t chance_of(const drop_t &d) {
    const double p = d.ratio ? gradd_real_at(d.ratio, 0, d.ratio_dtype) : d.p;
    if (!(p >= 0 && p <= 1)) {
        gradd_fault_t fault = {.kind = GRADD_FAULT_RATIO};
        memcpy(&fault.value, &p, sizeof p);
        if (blockIdx.x == 0 && threadIdx.x == 0) gpu_fault(d.faults, fault);
        return {.refused = true};
    }
    const gradd_drop_t by = gradd_rng_drop(p);
    const bool active = d.active && (!d.training || *d.training) && p > 0;
    return {false, active, by.limit, by.scale};
}

/* One element; one that is not scaled keeps its bits. */
template <class T>
GPU_FN T dropped(const chance_t &c, uint32_t word, T x, bool adds, T plus, bool *out_kept) {
    typedef gpu_real<T> R;
    const bool kept = !c.active || word >= c.limit;
    T y = kept ? x : plus;
    *out_kept = kept;
    if (!adds && !c.active) return y;
    if (adds && c.active && c.limit > UINT32_MAX) return plus;
    const R scaled = kept ? (R)gpu_get(x) * (c.active ? (R)c.scale : (R)1) : (R)0;
    gpu_put(&y, adds ? scaled + (R)gpu_get(plus) : scaled);
    return y;
}

/* x, y, plus and mask allow packs, and all elements are one row. */
template <class T> __global__ void GPU_BLOCK(THREADS) drop_packs(drop_t d, int64_t units) {
    constexpr int W = pack_width<T>, PARTS = 16 / W;
    typedef gpu_pack<T, W> pack_t;
    const chance_t c = chance_of(d);
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    if (c.refused) return;
    for (int64_t u = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; u < units; u += all) {
        const int64_t first = u / PARTS * GRADD_RNG_GROUP + u % PARTS * W;
        uint32_t words[W][4] = {};
        if (c.active)
#pragma unroll
            for (int w = 0; w < W; w++)
                gradd_rng_four(d.seed, d.node, (uint64_t)(u * W + w), words[w]);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int64_t at = first + 16 * k;
            if (at >= d.n) break; /* n is a whole number of packs */
            const pack_t x = *(const pack_t *)((const T *)d.x + at);
            pack_t plus = x, y;
            gpu_pack<uint8_t, W> mask;
            if (d.plus) plus = *(const pack_t *)((const T *)d.plus + at);
#pragma unroll
            for (int w = 0; w < W; w++) {
                bool kept;
                y.v[w] = dropped(c, words[w][k], x.v[w], d.plus != NULL, plus.v[w], &kept);
                mask.v[w] = kept;
            }
            *(pack_t *)((T *)d.y + at) = y;
            if (d.mask) *(gpu_pack<uint8_t, W> *)(d.mask + at) = mask;
        }
    }
}

/* The four elements of one counter, of each row that there is: a row that stands at number r among
 * all rows has the elements from r * size on. `units` per row: 16 for each group that it may touch.
 */
template <class T> __global__ void GPU_BLOCK(THREADS) drop_rows(drop_t d, int64_t units) {
    const chance_t c = chance_of(d);
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    if (c.refused) return;
    for (int64_t u = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; u < units * d.n_rows;
         u += all) {
        const int64_t i = u / units, listed = d.rows ? d.rows[i] : 0;
        const int64_t counter = u - i * units;
        /* A client may write anything into the list: only the mask depends on it. */
        const uint64_t place = (uint64_t)(listed < 0 ? ~listed : listed) * (uint64_t)d.size;
        const uint64_t group = place / GRADD_RNG_GROUP + (uint64_t)(counter / 16);
        const int64_t skip = (int64_t)(place % GRADD_RNG_GROUP);
        uint32_t words[4];
        gradd_rng_four(d.seed, d.node, group * 16 + (uint64_t)(counter % 16), words);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int64_t in_row = counter / 16 * GRADD_RNG_GROUP + counter % 16 + 16 * k - skip;
            if (in_row < 0 || in_row >= d.size) continue;
            const int64_t at = i * d.size + in_row;
            const T x = ((const T *)d.x)[at], plus = d.plus ? ((const T *)d.plus)[at] : x;
            bool kept;
            ((T *)d.y)[at] = dropped(c, words[k], x, d.plus != NULL, plus, &kept);
            if (d.mask) d.mask[at] = kept;
        }
    }
}

/* ---- of the host ---- */

static bool given(const gradd_launch_t *r, int input) {
    return input < r->n_in && r->in[input].type.dtype != GRADD_DT_NONE;
}

static drop_t describe(const gradd_launch_t *r, int rows) {
    drop_t d = {.x = r->in[0].data, .y = r->out[0].data, .seed = r->seed};
    d.n = d.size = gradd_type_count(&r->in[0].type);
    d.node = (uint64_t)gradd_attr_int(r->attrs, "node", (int64_t)r->node);
    d.active = !r->dropout_off;
    d.n_rows = 1;
    d.faults = GPU_FAULTS;
    if (!given(r, rows)) return d;
    d.rows = (const int64_t *)r->in[rows].data;
    d.n_rows = gradd_type_count(&r->in[rows].type);
    d.size = d.n / d.n_rows;
    return d;
}

template <class T> static gradd_status_t compute_typed(const gradd_launch_t *r, const drop_t &d) {
    constexpr int W = pack_width<T>;
    int64_t units = (d.n + GRADD_RNG_GROUP - 1) / GRADD_RNG_GROUP * (16 / W);
    if (!d.rows && d.n % W == 0 && gpu_aligned(d.x, 16) && gpu_aligned(d.y, 16) &&
        gpu_aligned(d.plus, 16) && gpu_aligned(d.mask, W)) {
        GPU_LAUNCH((drop_packs<T>), gpu_blocks(units, THREADS), THREADS, d, units);
        return gpu_launched(r->op->name);
    }
    /* a row that does not start where a group does touches one more */
    units = (d.size + (d.rows ? 2 * GRADD_RNG_GROUP - 2 : GRADD_RNG_GROUP - 1)) / GRADD_RNG_GROUP;
    GPU_LAUNCH((drop_rows<T>), gpu_blocks(units * 16 * d.n_rows, THREADS), THREADS, d, units * 16);
    return gpu_launched(r->op->name);
}

static gradd_status_t compute(const gradd_launch_t *r, const drop_t &d) {
    return gpu_switch(gpu_floats(), r->in[0].type.dtype,
                      [&](auto t) { return compute_typed<typename decltype(t)::type>(r, d); });
}

static gradd_status_t compute_dropout(const gradd_launch_t *r) {
    drop_t d = describe(r, ROWS);
    d.mask = r->n_out > 1 ? (uint8_t *)r->out[1].data : NULL;
    d.p = 0.5;
    if (given(r, 1)) d.ratio = r->in[1].data, d.ratio_dtype = r->in[1].type.dtype;
    if (given(r, 2))
        d.training = (const uint8_t *)r->in[2].data;
    else
        d.active = false;
    return compute(r, d);
}

static gradd_status_t compute_dropout_add(const gradd_launch_t *r) {
    drop_t d = describe(r, ADD_ROWS);
    d.plus = r->in[1].data;
    d.p = gradd_attr_float(r->attrs, "ratio", 0.5);
    return compute(r, d);
}

GRADD_KERNELS(cuda, dropout,
              GRADD_KERNEL("Dropout", "random", .inplace = 1, .compute = compute_dropout),
              GRADD_KERNEL("DropoutGrad", "random", .inplace = 1, .compute = compute_dropout),
              GRADD_KERNEL("DropoutAdd", "random", .inplace = 3, .compute = compute_dropout_add));
