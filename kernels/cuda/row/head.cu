/* See head.h.
 *
 * One kernel turns the logits of a row into their gradient, in place: it reads them twice, the
 * second time from the L2 cache. Scratch memory: how each row counts, losses, sums of the bias's
 * gradient; rows of x and logits of a chunk; the lower bits of the sums of the weight's gradient
 * and a block of them in f32; and the workspace of the products.
 */
#include "kernels/cuda/row/head.h"
#include "kernels/describe/cross_entropy.h"

#include <stdlib.h>

#include "kernels/cuda/product.h"
#include "kernels/cuda/row/labels.h"
#include "kernels/describe/head.h"
#include "kernels/math/split_sum.h"

enum {
    ALIGN = 256,
    KEPT = 128, /* bytes that a thread keeps of a row */
    NO_LABEL = -1,
    NOTHING = -2 /* what a row counts */
};

/* Products of a chunk of `rows` rows; the second of dw is of the last block. */
typedef struct sized_s {
    int64_t rows;
    gradd_prepared_t logits, dx, dw[2];
} sized_t;

typedef struct gpu_head_s {
    gradd_head_t is;
    int64_t chunk, block;
    bool parted; /* the weight's gradient is summed in f32, beside its memory */
    bool masks;  /* rows may count nothing */
    /* offsets in scratch memory */
    size_t tally, counts, each, added, sums, x, z, low, wide, products, end;
    sized_t sizes[2];          /* of a chunk and of what is left */
    gradd_prepared_t first[2]; /* dw of a chunk, over what is there */
} gpu_head_t;

/* ---- preparation ----------------------------------------------------------------------------- */

static void describe(const gradd_infer_t *c, gpu_head_t *h) {
    gradd_head_describe(c, &h->is);
    const gradd_head_t &is = h->is;
    h->chunk = gradd_head_chunk(c->attrs, is.rows);
    h->parted = is.dtype == GRADD_DT_BF16 && is.rows > h->chunk;
    h->block = h->parted ? gradd_head_block(&is, GPU_HEAD_BLOCK) : is.dw_rows;
    h->masks = is.ignores || is.positions;
    h->sizes[0].rows = h->chunk;
    h->sizes[1].rows = h->chunk ? is.rows % h->chunk : 0;
}

static void place(gpu_head_t *h) {
    const gradd_head_t &is = h->is;
    const size_t rows = (size_t)is.rows, chunk = (size_t)h->chunk;
    size_t at = 0;
#define PLACE(field, bytes) h->field = at, at = (at + (size_t)(bytes) + ALIGN - 1) / ALIGN * ALIGN
    PLACE(tally, sizeof(gpu_tally_t));
    PLACE(counts, sizeof(int64_t) * rows);
    PLACE(each, sizeof(double) * rows);
    PLACE(added, is.squares ? sizeof(double) * rows : 0);
    PLACE(sums, is.dbias ? sizeof(double) * (size_t)is.v : 0);
    PLACE(x, h->masks ? chunk * (size_t)is.k * is.bytes : 0);
    PLACE(z, chunk * (size_t)is.v * is.bytes);
    PLACE(low, h->parted ? (size_t)(is.k * is.v) : 0);
    PLACE(wide, h->parted ? (size_t)(h->block * is.dw_cols) * sizeof(float) : 0);
#undef PLACE
    h->products = h->end = at;
}

static gradd_status_t prepare_one(gpu_head_t *h, gradd_gemm_t g, gradd_prepared_t *out) {
    GRADD_TRY(gpu_product_prepare(&g, out));
    if (h->products + out->workspace > h->end) h->end = h->products + out->workspace;
    return GRADD_OK;
}

static gradd_gemm_t weight_product(const gpu_head_t *h, int64_t rows, int64_t block, bool first) {
    gradd_gemm_t g = gradd_head_weight_product(&h->is, rows, block, first);
    if (!h->parted) g.result = h->is.dtype;
    return g;
}

static gradd_status_t prepare_size(gpu_head_t *h, sized_t *s, bool chunk) {
    GRADD_TRY(prepare_one(h, gradd_head_logits_product(&h->is, s->rows), &s->logits));
    if (h->is.dx) GRADD_TRY(prepare_one(h, gradd_head_rows_product(&h->is, s->rows), &s->dx));
    if (!h->is.dw || !h->is.dw_rows || !h->is.dw_cols) return GRADD_OK;
    const int64_t blocks[2] = {h->block, h->is.dw_rows % h->block};
    for (int i = 0; i < 2 && blocks[i]; i++) {
        GRADD_TRY(prepare_one(h, weight_product(h, s->rows, blocks[i], false), &s->dw[i]));
        if (!chunk) continue;
        GRADD_TRY(prepare_one(h, weight_product(h, s->rows, blocks[i], true), &h->first[i]));
    }
    return GRADD_OK;
}

/* f(prepared) of all products. */
template <class F> static void each_product(gpu_head_t *h, F f) {
    for (sized_t &s : h->sizes)
        f(&s.logits), f(&s.dx), f(&s.dw[0]), f(&s.dw[1]);
    f(&h->first[0]), f(&h->first[1]);
}

void gpu_head_unprepare(gradd_prepared_t *prepared) {
    each_product((gpu_head_t *)prepared->state,
                 [](gradd_prepared_t *p) { gpu_product_unprepare(p); });
    free(prepared->state);
}

gradd_status_t gpu_head_prepare(const gradd_infer_t *c, gradd_prepared_t *out) {
    gpu_head_t *h = (gpu_head_t *)calloc(1, sizeof *h);
    if (!h) return GRADD_FAIL(NOMEM, "no memory for a product");
    *out = gradd_prepared_t{0, h, sizeof *h};
    describe(c, h);
    place(h);
    gradd_status_t status = prepare_size(h, &h->sizes[0], true);
    if (!status && h->sizes[1].rows) status = prepare_size(h, &h->sizes[1], false);
    each_product(h, [&](gradd_prepared_t *p) { out->bytes += p->bytes; });
    out->workspace = h->end;
    if (status) gpu_head_unprepare(out);
    return status;
}

/* ---- what rows count ------------------------------------------------------------------------- */

/* Of all chunks. */
template <class T> struct run_t {
    typedef gpu_real<T> A;
    const gpu_head_t *h;
    const gradd_launch_t *r;
    gpu_labels_t labels; /* the user's; then `counts`, which never change */
    gradd_loss_rule_t rule;
    gpu_any_t weights, squares, items; /* per row, per row, one */
    gpu_tally_t *tally;
    int64_t *counts; /* the label, or NO_LABEL, or NOTHING */
    double *each, *added, *sums;
    T *x, *z, *dx, *dw, *dbias;
    const T *w;
    uint8_t *low;
    float *wide;
    void *products;
};

__global__ void GPU_BLOCK(256)
    count_rows(gpu_labels_t labels, gpu_any_t weights, gpu_any_t squares, int64_t *counts) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t r = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; r < labels.rows; r += all) {
        int64_t label = gpu_label(labels, r, true);
        if (label >= 0 && weights.at && gpu_number(weights, r) == 0) label = -1;
        if (label < 0) label = squares.at && gpu_number(squares, r) != 0 ? NO_LABEL : NOTHING;
        counts[r] = label;
    }
}

/* Rows that count, and zeros in the place of others; without `x` zeros alone. */
template <class S, class T>
__global__ void GPU_BLOCK(S::THREADS)
    take_rows(T *to, const T *x, const int64_t *counts, int64_t rows, int64_t n) {
    typedef gpu_pack<T, S::W> pack_t;
    const int64_t packs = n / S::W;
    for (int64_t r = gpu_team<S::TEAM>(); r < rows; r += gpu_teams<S::TEAM>()) {
        const bool takes = counts[r] != NOTHING;
        if (takes && !x) continue;
        const pack_t *from = (const pack_t *)(x + r * n);
        pack_t none;
#pragma unroll
        for (int k = 0; k < S::W; k++)
            gpu_put(&none.v[k], (gpu_real<T>)0);
        pack_t *out = (pack_t *)(to + r * n);
        gpu_each_pack<S::TEAM, S::KEEP>(packs,
                                        [&](int, int64_t i) { out[i] = takes ? from[i] : none; });
    }
}

template <class T>
static gradd_status_t launch_rows(const run_t<T> &p, T *to, const T *x, int64_t from, int64_t n) {
    const int64_t k = p.h->is.k;
    if (!n || !k) return GRADD_OK;
    return gpu_by_row<T, KEPT>(k, gpu_aligned(to, 16) && gpu_aligned(x, 16), [&](auto shape) {
        typedef decltype(shape) S;
        GPU_LAUNCH((take_rows<S, T>), S::blocks(n), S::THREADS, to, x, p.counts + from, n, k);
        return gpu_launched("LinearCrossEntropy");
    });
}

/* ---- logits and their gradient --------------------------------------------------------------- */

/* The form of logits before the loss: c tanh(scale z / c), or scale z. */
template <class A> struct bend_t {
    A in, out, scale; /* out: the softcap, or 0 */

    __device__ __forceinline__ A at(A z) const {
        return out != 0 ? vtanh(z * in) * out : z * in;
    }
    __device__ __forceinline__ A slope(A y) const {
        return out != 0 ? (1 - y / out * (y / out)) * scale : scale;
    }
};
template <class A> bend_t<A> bend_of(const gradd_head_t &h) {
    return {(A)(h.softcap != 0 ? h.scale / h.softcap : h.scale), (A)h.softcap, (A)h.scale};
}

/* A row whose packs are bent where they are read. */
template <class T, class S> struct bent_row {
    typedef gpu_real<T> A;
    gpu_row<T, S::W, S::TEAM, S::KEEP> row;
    bend_t<A> bend;

    __device__ __forceinline__ gpu_pack<A, S::W> get(int j, int64_t i) const {
        const gpu_pack<T, S::W> z = row.get(j, i);
        gpu_pack<A, S::W> y;
#pragma unroll
        for (int k = 0; k < S::W; k++)
            y.v[k] = bend.at(gpu_get(z.v[k]));
        return y;
    }
};

/* A chunk of logits, and where its rows begin among all. */
template <class T> struct logits_t {
    T *z;
    int64_t from, rows;
    bend_t<gpu_real<T>> bend;
    bool grads; /* wanted */
    const gpu_real<T> *classes;
};

/* A row that counts: its label, or NO_LABEL; logits as the loss sees them; what its loss and the
 * derivative of its weighted square are multiplied by. */
template <class A> struct counted_t {
    int64_t label;
    gpu_soft<A> soft;
    double own, factor, pull;
};

/* Its gradient: `scale` times the exponentials of y - max, less `shift` times the weights of
 * classes; `own` where the label is. */
template <class A> struct spread_t {
    A scale, shift, own, max;
    int64_t label;
};

template <class T, class A>
GPU_FN spread_t<A> spread_of(const run_t<T> &p, gradd_loss_rule_t rule, const counted_t<A> &r) {
    const double max = (double)r.soft.max, sum = r.soft.sum;
    double scale = 0, shift = 0, own = 0;
    if (r.label >= 0) {
        const double w = gpu_weight(p.labels, r.label);
        scale = gradd_loss_share(rule, w) * r.factor / sum;
        shift = rule.smoothing / (double)rule.classes * r.factor;
        own = r.factor * gradd_loss_own_slope(rule, w, r.own, max, sum - 1);
    }
    if (r.pull != 0) {
        scale += r.pull / sum;
        if (r.label >= 0) own += exp(r.own - max) * r.pull / sum;
    }
    return {(A)scale, (A)shift, (A)own, r.soft.max, r.label};
}

template <class S, class T, class Row>
GPU_FN void write_gradient(const logits_t<T> &c, T *z, const Row &row,
                           const spread_t<gpu_real<T>> &d, int64_t packs) {
    typedef gpu_real<T> A;
    const int64_t own_pack = d.label < 0 ? -1 : d.label / S::W, own_k = d.label % S::W;
    gpu_each_pack<S::TEAM, S::KEEP>(packs, [&](int j, int64_t i) {
        const gpu_pack<A, S::W> y = row.get(j, i);
        gpu_pack<T, S::W> v;
#pragma unroll
        for (int k = 0; k < S::W; k++) {
            const A by = c.classes && d.shift != 0 ? c.classes[i * S::W + k] : (A)1;
            A dz = vexp(y.v[k] - d.max) * d.scale - d.shift * by;
            if (i == own_pack && k == own_k) dz = d.own;
            gpu_put(&v.v[k], dz * c.bend.slope(y.v[k]));
        }
        ((gpu_pack<T, S::W> *)z)[i] = v;
    });
}

template <class S, class T, bool SMOOTH>
__global__ void GPU_BLOCK(S::THREADS) finish_rows(run_t<T> p, logits_t<T> c) {
    typedef gpu_real<T> A;
    const int64_t n = p.rule.classes, packs = n / S::W;
    const bool first = gpu_lane<S::TEAM>() == 0;
    const double total = gpu_loss_divisor(p.labels, p.tally, p.items);
    if (SMOOTH) p.rule.mean_weight = p.tally->mean_weight;
    for (int64_t j = gpu_team<S::TEAM>(); j < c.rows; j += gpu_teams<S::TEAM>()) {
        const int64_t r = c.from + j, label = p.counts[r];
        const double weight = p.weights.at ? gpu_number(p.weights, r) : 1;
        const double square = p.squares.at ? gpu_number(p.squares, r) : 0;
        T *z = c.z + j * n;
        if (label == NOTHING) {
            const gpu_pack<T, S::W> none = {};
            gpu_each_pack<S::TEAM, S::KEEP>(
                packs, [&](int, int64_t i) { ((gpu_pack<T, S::W> *)z)[i] = none; });
            if (first) p.each[r] = p.weights.at ? 0 * weight : 0; /* no number stays one */
            if (first && p.squares.at) p.added[r] = 0;
            continue;
        }
        bent_row<T, S> row = {{}, c.bend};
        row.row.open(z, packs);
        const A own = label < 0 ? (A)0 : row.bend.at(gpu_get(z[label])); /* all before any writes */
        double plain = 0;
        const gpu_soft<A> s = gpu_soft_of<S>(row, packs, [&](const A(&y)[S::W], int64_t i) {
            if constexpr (SMOOTH) {
                A sum = 0;
#pragma unroll
                for (int k = 0; k < S::W; k++)
                    sum += c.classes ? y[k] * c.classes[i * S::W + k] : y[k];
                plain += (double)sum;
            }
        });
        if constexpr (SMOOTH) plain = gpu_team_sum<S::TEAM>(plain);
        const double lse = (double)s.max + log(s.sum);
        if (first) {
            const gradd_loss_sums_t sums = {(double)s.max, s.sum, plain};
            const double w = label < 0 ? 0 : gpu_weight(p.labels, label);
            const double loss = label < 0 ? 0 : gradd_loss_value(p.rule, sums, w, (double)own);
            p.each[r] = loss * weight;
            if (p.squares.at) p.added[r] = square != 0 ? square * lse * lse : 0;
        }
        if (!c.grads) continue;
        const double pull = square != 0 ? 2 * square * lse : 0;
        const counted_t<A> counted = {label, s, (double)own, weight / total, pull};
        write_gradient<S>(c, z, row, spread_of(p, p.rule, counted), packs);
    }
}

template <class T, bool SMOOTH>
static gradd_status_t launch_logits(const run_t<T> &p, int64_t from, int64_t n) {
    const gradd_head_t &is = p.h->is;
    const logits_t<T> c = {p.z,
                           from,
                           n,
                           bend_of<gpu_real<T>>(is),
                           is.dx || is.dw || is.dbias,
                           (const gpu_real<T> *)p.labels.weights.at};
    return gpu_by_row<T, KEPT>(is.v, true, [&](auto shape) {
        typedef decltype(shape) S;
        GPU_LAUNCH((finish_rows<S, T, SMOOTH>), S::blocks(n), S::THREADS, p, c);
        return gpu_launched("LinearCrossEntropy");
    });
}

/* The loss of all rows, and what log-sum-exps add to it. */
template <class T>
__global__ void GPU_BLOCK(GPU_TALLY_THREADS) end_loss(run_t<T> p, gpu_real<T> *out) {
    const double total = gpu_loss_divisor(p.labels, p.tally, p.items);
    const double sum = gpu_tally_sum<4>(p.labels.rows, [&](int64_t i) { return p.each[i]; });
    double added = 0;
    if (p.squares.at)
        added = gpu_tally_sum<4>(p.labels.rows, [&](int64_t i) { return p.added[i]; });
    if (threadIdx.x == 0) *out = (gpu_real<T>)(sum / total + added);
}

/* ---- gradients of the weight and the bias ---------------------------------------------------- */

/* W neighbours at once; n counts these. */
template <int W>
__global__ void GPU_BLOCK(256)
    join_sums(float *wide, const gradd_bf16_t *high, const uint8_t *low, int64_t n) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        const gpu_pack<gradd_bf16_t, W> h = ((const gpu_pack<gradd_bf16_t, W> *)high)[i];
        const gpu_pack<uint8_t, W> l = ((const gpu_pack<uint8_t, W> *)low)[i];
        gpu_pack<float, W> sum;
#pragma unroll
        for (int k = 0; k < W; k++) {
            const uint32_t bits = gradd_parted_join(h.v[k].bits, l.v[k]);
            memcpy(&sum.v[k], &bits, sizeof bits);
        }
        ((gpu_pack<float, W> *)wide)[i] = sum;
    }
}

/* LAST: the sums are rounded to bf16. */
template <int W, bool LAST>
__global__ void GPU_BLOCK(256)
    part_sums(const float *wide, gradd_bf16_t *high, uint8_t *low, int64_t n) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        const gpu_pack<float, W> sum = ((const gpu_pack<float, W> *)wide)[i];
        gpu_pack<gradd_bf16_t, W> h;
        gpu_pack<uint8_t, W> l;
#pragma unroll
        for (int k = 0; k < W; k++) {
            if (LAST) {
                gpu_put(&h.v[k], sum.v[k]);
                continue;
            }
            uint32_t bits;
            memcpy(&bits, &sum.v[k], sizeof bits);
            bits = gradd_parted_round(bits);
            h.v[k].bits = (uint16_t)(bits >> 16);
            l.v[k] = (uint8_t)(bits >> 8);
        }
        ((gpu_pack<gradd_bf16_t, W> *)high)[i] = h;
        if (!LAST) ((gpu_pack<uint8_t, W> *)low)[i] = l;
    }
}

/* A block of n sums, in three places. */
typedef struct sums_s {
    float *wide;
    gradd_bf16_t *high;
    uint8_t *low;
    int64_t n;
} sums_t;

template <int W> static void launch_join(const sums_t &s) {
    GPU_LAUNCH((join_sums<W>), gpu_blocks(s.n / W, 256), 256, s.wide, s.high, s.low, s.n / W);
}
template <int W> static void launch_part(const sums_t &s, bool last) {
    const unsigned blocks = gpu_blocks(s.n / W, 256);
    if (last)
        GPU_LAUNCH((part_sums<W, true>), blocks, 256, s.wide, s.high, s.low, s.n / W);
    else
        GPU_LAUNCH((part_sums<W, false>), blocks, 256, s.wide, s.high, s.low, s.n / W);
}

template <class T>
static gradd_status_t add_weight(const run_t<T> &p, const sized_t *s, int64_t from, const T *x) {
    const gpu_head_t *h = p.h;
    const gradd_head_t &is = h->is;
    const T *left = is.trans ? p.z : x, *right = is.trans ? x : p.z;
    const bool wide = is.dw_cols % 4 == 0 && gpu_aligned(p.dw, 8);
    for (int64_t row = 0; is.dw_cols && row < is.dw_rows; row += h->block) {
        const bool short_one = is.dw_rows - row < h->block;
        const int64_t at = row * is.dw_cols;
        const sums_t sums = {p.wide, (gradd_bf16_t *)p.dw + at, p.low + at,
                             (short_one ? is.dw_rows - row : h->block) * is.dw_cols};
        const gradd_prepared_t *use = from ? s->dw : h->first;
        void *to = h->parted ? (void *)p.wide : (void *)(p.dw + at);
        const gpu_product_call_t call = {left + row, right, NULL, to, p.products};
        if (h->parted && from) wide ? launch_join<4>(sums) : launch_join<1>(sums);
        GRADD_TRY(gpu_product(use[short_one].state, &call));
        if (!h->parted) continue;
        const bool last = from + s->rows == is.rows;
        wide ? launch_part<4>(sums, last) : launch_part<1>(sums, last);
    }
    return gpu_launched("LinearCrossEntropy");
}

/* Adds the columns of a chunk; the last time they are written. */
template <class T>
__global__ void GPU_BLOCK(GPU_ROW_THREADS)
    add_columns(run_t<T> p, int64_t rows, bool first, bool last) {
    const int64_t n = p.rule.classes;
    for (int64_t at = (int64_t)blockIdx.x * GPU_WARP; at < n; at += (int64_t)gridDim.x * GPU_WARP) {
        const int64_t c = at + threadIdx.x % GPU_WARP;
        double total = 0;
        for (int64_t r = gpu_slice(); c < n && r < rows; r += GPU_SLICES)
            total += (double)gpu_get(p.z[r * n + c]);
        total = gpu_slices_join(total, [](double a, double b) { return a + b; });
        if (gpu_slice() || c >= n) continue;
        if (!first) total += p.sums[c];
        if (last)
            gpu_put(&p.dbias[c], (gpu_real<T>)total);
        else
            p.sums[c] = total;
    }
}

/* ---- the launch ------------------------------------------------------------------------------ */

template <class T>
static gradd_status_t run_chunk(const run_t<T> &p, const sized_t *s, int64_t from) {
    const gradd_head_t &is = p.h->is;
    const int64_t n = s->rows;
    const T *x = (const T *)p.r->in[GRADD_HEAD_X].data + from * is.k;
    if (p.h->masks) {
        GRADD_TRY(launch_rows(p, p.x, x, from, n));
        x = p.x;
    }
    gpu_product_call_t call = {x, p.w, is.bias ? p.r->in[GRADD_HEAD_BIAS].data : NULL, p.z,
                               p.products};
    GRADD_TRY(gpu_product(s->logits.state, &call));
    if (n && is.v)
        GRADD_TRY((p.rule.smoothing != 0 ? launch_logits<T, true>(p, from, n)
                                         : launch_logits<T, false>(p, from, n)));
    if (p.dw) GRADD_TRY(add_weight(p, s, from, x));
    if (p.dbias)
        GPU_LAUNCH((add_columns<T>), gpu_column_blocks(is.v), GPU_ROW_THREADS, p, n, !from,
                   from + n == is.rows);
    if (!p.dx) return gpu_launched("LinearCrossEntropy");
    call = {p.z, p.w, NULL, p.dx + from * is.k, p.products};
    GRADD_TRY(gpu_product(s->dx.state, &call));
    return p.h->masks ? launch_rows<T>(p, p.dx + from * is.k, NULL, from, n) : GRADD_OK;
}

static void *result(const gradd_launch_t *r, int j) {
    return r->n_out > j && r->out[j].type.dtype ? r->out[j].data : NULL;
}

template <class T> static run_t<T> run_of(const gradd_launch_t *r) {
    const gpu_head_t *h = (const gpu_head_t *)r->state;
    char *w = (char *)r->workspace;
    run_t<T> p = {};
    p.h = h;
    p.r = r;
    p.labels = gpu_labels_of(r, &r->in[GRADD_HEAD_LABELS], h->is.v);
    p.labels.positions = h->is.positions;
    p.labels.weights = gpu_any_of(r->in, r->n_in, GRADD_HEAD_CLASSES);
    p.rule = {h->is.v, gradd_attr_float(r->attrs, GRADD_CE_SMOOTHING, 0), 1,
              p.labels.weights.at != NULL};
    p.weights = gpu_any_of(r->in, r->n_in, GRADD_HEAD_WEIGHTS);
    p.squares = gpu_any_of(r->in, r->n_in, GRADD_HEAD_SQUARES);
    p.items = gpu_any_of(r->in, r->n_in, GRADD_HEAD_ITEMS);
    p.tally = (gpu_tally_t *)(w + h->tally);
    p.counts = (int64_t *)(w + h->counts);
    p.each = (double *)(w + h->each);
    p.added = (double *)(w + h->added);
    p.sums = (double *)(w + h->sums);
    p.x = (T *)(w + h->x);
    p.z = (T *)(w + h->z);
    p.low = (uint8_t *)(w + h->low);
    p.wide = (float *)(w + h->wide);
    p.products = w + h->products;
    p.w = (const T *)r->in[GRADD_HEAD_W].data;
    p.dx = (T *)result(r, GRADD_HEAD_DX);
    p.dw = (T *)result(r, GRADD_HEAD_DW);
    p.dbias = (T *)result(r, GRADD_HEAD_DBIAS);
    return p;
}

/* From now on labels are those of `counts`. */
template <class T> static void use_counts(run_t<T> *p) {
    p->labels.at = p->counts;
    p->labels.narrow = false;
    p->labels.positions = 0;
    p->labels.ignores = false;
}

template <class T> static gradd_status_t run(const gradd_launch_t *r) {
    run_t<T> p = run_of<T>(r);
    const gradd_head_t &is = p.h->is;
    if (is.rows > UINT32_MAX) return GRADD_FAIL(LIMIT, "more than %u rows", UINT32_MAX);
    if (is.rows)
        GPU_LAUNCH(count_rows, gpu_blocks(is.rows, 256), 256, p.labels, p.weights, p.squares,
                   p.counts);
    use_counts(&p);
    GPU_LAUNCH((gpu_tally<gpu_tally_t>), 1, GPU_TALLY_THREADS, p.labels,
               p.labels.reduction == GRADD_REDUCE_MEAN,
               p.labels.weights.at && p.rule.smoothing != 0, p.tally);
    int64_t from = 0;
    do { /* once without rows: gradients are zeros */
        const sized_t *s = &p.h->sizes[from + p.h->chunk > is.rows];
        GRADD_TRY(run_chunk(p, s, from));
        from += s->rows;
    } while (from < is.rows);
    GPU_LAUNCH((end_loss<T>), 1, GPU_TALLY_THREADS, p, (gpu_real<T> *)r->out[GRADD_HEAD_LOSS].data);
    return gpu_launched("LinearCrossEntropy");
}

gradd_status_t gpu_head(const gradd_launch_t *r) {
    switch (r->in[GRADD_HEAD_X].type.dtype) {
    case GRADD_DT_F64:
        return run<double>(r);
    case GRADD_DT_BF16:
        return run<gradd_bf16_t>(r);
    default:
        return run<float>(r);
    }
}
