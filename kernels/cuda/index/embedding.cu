/* EmbeddingSum and its gradient on a GPU. See kernels/ops/index/embedding.c and runs.h.
 *
 * A row of the result is summed in registers over all tables, in their order, and written once. */
#include "kernels/cuda/index/runs.h"

enum { TABLES = 9, BASE = 2 };

/* ---- ids to rows ----------------------------------------------------------------------------- */

struct embedding_lookup {
    gpu_index ids;
    gpu_places places; /* of ids, by the row of the result */
    int64_t extent;    /* rows of the table */
    int64_t padding;   /* the id that stands for no row; -1 = none */
    int64_t number;    /* of the table, for messages */

    __device__ int64_t operator()(int64_t i, gpu_faults_t faults) const {
        const int64_t from = places(i), id = ids[from], row = id < 0 ? id + extent : id;
        if (row < 0 || row >= extent) {
            gpu_fault(faults, {.kind = GRADD_FAULT_TABLE_INDEX,
                               .value = id,
                               .limit = extent,
                               .position = from,
                               .table = number});
            return -1;
        }
        return padding >= 0 && id == padding ? -1 : row;
    }
};

/* `shape` is that of rows: its last dimension is a row's. */
static embedding_lookup lookup_of(const gradd_view_t &ids, const gradd_type_t &shape,
                                  int64_t extent, int64_t padding, int number) {
    const int rank = shape.rank - 1;
    int64_t steps[GRADD_MAX_RANK], step = 1;
    for (int i = rank - 1; i >= 0; i--) {
        const int at = i - (rank - ids.type.rank);
        const int64_t n = at >= 0 ? ids.type.dims[at] : 1;
        steps[i] = n == 1 ? 0 : step;
        step *= n;
    }
    return {gpu_index_of(ids), gpu_places_of(shape, rank, steps), extent, padding, number};
}

/* ---- forward --------------------------------------------------------------------------------- */

enum { MOST = 5, EACH = 2 }; /* 32 threads to a row, two packs each */

struct embedding_sums {
    int n;
    embedding_lookup row[TABLES];
    const void *table[TABLES];
    double scale[TABLES];
};

template <class T, int W>
__global__ void GPU_BLOCK(GPU_GROUP_THREADS)
    embedding_sum(embedding_sums s, gpu_groups l, gpu_pack<T, W> *y, gpu_faults_t faults) {
    typedef gpu_real<T> R;
    for (int64_t u = l.first(); u < l.units; u += l.all()) {
        const int64_t i = l.pieces(u), first = l.pack(u - i * l.pieces.by);
        if (first >= l.packs) continue;
        const int left = l.left(first);
        gpu_pack<R, W> sum[EACH] = {};
        for (int t = 0; t < s.n; t++) {
            const int64_t row = s.row[t](i, faults);
            if (row < 0) continue;
            const R scale = (R)s.scale[t];
            const gpu_pack<T, W> *x = (const gpu_pack<T, W> *)s.table[t] + row * l.packs + first;
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                if (k * l.step() >= left) continue;
                const gpu_pack<T, W> own = x[k * l.step()];
#pragma unroll
                for (int w = 0; w < W; w++) {
                    const R term = scale * gpu_get(own.v[w]);
                    sum[k].v[w] = t ? sum[k].v[w] + term : term;
                }
            }
        }
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (k * l.step() < left) y[i * l.packs + first + k * l.step()] = gpu_narrow<T>(sum[k]);
    }
}

template <class T, int W>
static gradd_status_t launch_sum(const gradd_launch_t *r, const embedding_sums &s, int64_t n,
                                 int64_t width) {
    const gpu_groups l = gpu_groups_of(n, width / W, MOST, EACH);
    GPU_LAUNCH((embedding_sum<T, W>), l.blocks, GPU_GROUP_THREADS, s, l,
               (gpu_pack<T, W> *)r->out[0].data, GPU_FAULTS);
    return gpu_launched(r->op->name);
}

static gradd_status_t compute_sum(const gradd_launch_t *r) {
    const gradd_type_t &y = r->out[0].type;
    const gradd_attr_t *scales = gradd_attr_find(r->attrs, "scales");
    const int64_t n = gpu_dims_count(y, 0, y.rank - 1), width = y.dims[y.rank - 1];
    embedding_sums s = {.n = r->n_in / 2};
    bool wide = gpu_aligned(r->out[0].data, 16);
    if (!n || !width) return GRADD_OK;
    for (int t = 0; t < s.n; t++) {
        s.row[t] = lookup_of(r->in[s.n + t], y, r->in[t].type.dims[0], -1, t);
        s.table[t] = r->in[t].data;
        s.scale[t] = scales ? scales->floats[t] : 1;
        wide = wide && gpu_aligned(s.table[t], 16);
    }
    return gpu_switch(gpu_floats(), y.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        constexpr int W = gpu_width<T>;
        return wide && width % W == 0 ? launch_sum<T, W>(r, s, n, width)
                                      : launch_sum<T, 1>(r, s, n, width);
    });
}

/* ---- backward -------------------------------------------------------------------------------- */

static gradd_status_t compute_grad(const gradd_launch_t *r) {
    const gradd_type_t &dy = r->in[0].type, &out = r->out[0].type;
    const bool onto = r->n_in > BASE && r->in[BASE].type.dtype;
    const embedding_lookup rows =
        lookup_of(r->in[1], dy, out.dims[0], gradd_attr_int(r->attrs, "padding", -1), 0);
    const gpu_fold_rows_t sums = {.n = gpu_dims_count(dy, 0, dy.rank - 1),
                                  .n_rows = out.dims[0],
                                  .width = out.dims[1],
                                  .how = GPU_SCALED,
                                  .scale = gradd_attr_float(r->attrs, "scale", 1),
                                  .clear = !onto,
                                  .to = r->out[0].data,
                                  .from = r->in[0].data,
                                  .workspace = r->workspace};
    GRADD_TRY(gpu_fill(r->op->name, r->out[0].data, onto ? r->in[BASE].data : NULL,
                       (size_t)gradd_type_bytes(&out)));
    return gpu_switch(gpu_floats(), out.dtype, [&](auto t) {
        return gpu_fold_rows<typename decltype(t)::type>(r->op->name, &sums, rows);
    });
}

static size_t workspace_grad(const gradd_infer_t *c) {
    const gradd_type_t &dy = c->in[0].type, &out = c->out[0];
    return gpu_fold_workspace(out.dtype, gpu_dims_count(dy, 0, dy.rank - 1), out.dims[0],
                              out.dims[1], true);
}

GRADD_KERNELS(cuda, embedding, GRADD_KERNEL("EmbeddingSum", "map", .compute = compute_sum),
              GRADD_KERNEL("EmbeddingGrad", "sum", .inplace = 1 << BASE, .compute = compute_grad,
                           .workspace = workspace_grad));
