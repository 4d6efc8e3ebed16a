/* Attention on a GPU: kernel rows, and the preparation of their kernels. See
 * kernels/ops/attention/attention.c and attention_gpu.h. */
#include "kernels/cuda/attention/attention_gpu.h"

enum { THREADS = 256 };

/* ---- ranges of a mask ------------------------------------------------------------------------ */

/* One warp per row: first and last key, and how many there are. */
__global__ void GPU_BLOCK(THREADS)
    mask_ranges(const uint8_t *mask, int64_t rows, int n, int32_t *out) {
    const int lane = threadIdx.x % GPU_WARP;
    const int64_t all = (int64_t)gridDim.x * (THREADS / GPU_WARP);
    for (int64_t i = (int64_t)blockIdx.x * (THREADS / GPU_WARP) + threadIdx.x / GPU_WARP; i < rows;
         i += all) {
        const uint8_t *row = mask + i * n;
        int lo = n, last = -1, count = 0;
        for (int64_t j = lane; j < n; j += GPU_WARP)
            if (row[j]) {
                lo = (int)j < lo ? (int)j : lo;
                last = (int)j;
                count++;
            }
        last = gpu_warp_max(last);
        lo = -gpu_warp_max(-lo);
        count = gpu_warp_sum(count);
        if (lane) continue;
        out[3 * i] = count ? lo : 0;
        out[3 * i + 1] = count ? last + 1 : n;
        out[3 * i + 2] = !count                   ? GRADD_ATTN_NONE
                         : count == last + 1 - lo ? GRADD_ATTN_SOLID
                                                  : GRADD_ATTN_HOLES;
    }
}

static gradd_status_t launch_ranges(const void *mask, const gradd_type_t *type, void *out) {
    const int64_t rows = gradd_attn_mask_rows(type);
    if (!rows) return GRADD_OK;
    GPU_LAUNCH(mask_ranges, gpu_blocks(rows, THREADS / GPU_WARP), THREADS, (const uint8_t *)mask,
               rows, (int)type->dims[type->rank - 1], (int32_t *)out);
    return gpu_launched("MaskRanges");
}

static gradd_status_t compute_ranges(const gradd_launch_t *r) {
    return launch_ranges(r->in[GRADD_MASK_RANGES_MASK].data, &r->in[GRADD_MASK_RANGES_MASK].type,
                         r->out[0].data);
}

/* ---- live rows ------------------------------------------------------------------------------- */

/* Where the rows of a list are. One that is not there stands for row 0 from here on. */
__global__ void GPU_BLOCK(THREADS)
    find_positions(const int64_t *list, int64_t n, int64_t limit, int64_t positions,
                   attn_position_t *out, gpu_faults_t faults) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        int64_t row = list[i];
        row = row < 0 ? ~row : row;
        if (row >= limit) {
            gpu_fault(faults,
                      {.kind = GRADD_FAULT_LIVE_ROW, .value = row, .limit = limit, .position = i});
            row = 0;
        }
        out[i] = {(int32_t)(row / positions), (int32_t)(row % positions)};
    }
}

static gradd_status_t launch_places(const gradd_view_t *list, int64_t limit, int64_t positions,
                                    attn_position_t *out) {
    const int64_t n = gradd_type_count(&list->type);
    if (!n) return GRADD_OK;
    GPU_LAUNCH(find_positions, gpu_blocks(n, THREADS), THREADS, (const int64_t *)list->data, n,
               limit, positions, out, GPU_FAULTS);
    return gpu_launched("live rows");
}

/* ---- limits of rare queries ------------------------------------------------------------------ */

/* The score that hidden keys have at most, and what exp brings to zero, per row of the bias. NaN
 * if the row has one. */
template <class A>
__global__ void GPU_BLOCK(THREADS)
    bias_limits(const A *bias, int64_t rows, int64_t n, A base, A *out) {
    const int lane = threadIdx.x % GPU_WARP;
    const int64_t all = (int64_t)gridDim.x * (THREADS / GPU_WARP);
    for (int64_t i = (int64_t)blockIdx.x * (THREADS / GPU_WARP) + threadIdx.x / GPU_WARP; i < rows;
         i += all) {
        A most = -(A)INFINITY;
        for (int64_t j = lane; j < n; j += GPU_WARP)
            most = gpu_larger(most, bias[i * n + j]);
        most = gpu_warp_max(most);
        if (!lane) out[i] = base + most;
    }
}

static bool needs_limits(const gradd_attn_t *p) {
    return p->mask.data && p->fill > GRADD_ATTN_MASKED && p->bias.data &&
           !(p->hides & GRADD_ATTN_HIDES_BIAS);
}

static gradd_status_t launch_limits(const gradd_attn_t &p, const gradd_type_t *type, void *out) {
    const int64_t n = type->dims[type->rank - 1], rows = gradd_attn_mask_rows(type);
    if (!rows) return GRADD_OK;
    const unsigned blocks = gpu_blocks(rows, THREADS / GPU_WARP);
    if (p.dtype == GRADD_DT_F64)
        GPU_LAUNCH((bias_limits<double>), blocks, THREADS, (const double *)p.bias.data, rows, n,
                   p.fill + 746, (double *)out);
    else
        GPU_LAUNCH((bias_limits<float>), blocks, THREADS, (const float *)p.bias.data, rows, n,
                   (float)p.fill + 104, (float *)out);
    return gpu_launched("limits of attention");
}

/* ---- scratch --------------------------------------------------------------------------------- */

/* Offsets of the parts. */
typedef struct room_s {
    size_t ranges, rows, limits, delta, mma, bytes;
} room_t;

static size_t take(size_t *used, int64_t n, size_t each) {
    const size_t at = *used;
    *used += ((size_t)n * each + 63) / 64 * 64;
    return at;
}

static room_t make_room(const gradd_attn_t *p, const gradd_view_t *in, int n_in,
                        const gradd_attn_places_t *at) {
    const size_t wide = p->dtype == GRADD_DT_F64 ? 8 : 4;
    const bool live = gradd_attn_given(in, n_in, at->rows);
    const bool limits =
        gradd_attn_given(in, n_in, at->mask) && gradd_attn_given(in, n_in, at->bias);
    const bool backward = at == &gradd_attn_backward_at;
    room_t r = {};
    r.ranges = take(&r.bytes, gradd_attn_own_ranges(in, n_in, at), 3 * sizeof(int32_t));
    r.rows = take(&r.bytes, live ? p->n_q + p->n_k : 0, sizeof(attn_position_t));
    r.limits = take(&r.bytes, limits ? gradd_attn_mask_rows(&in[at->bias].type) : 0, wide);
    r.delta = take(&r.bytes, backward ? p->batch * p->heads * p->n_q : 0, wide);
    r.mma = take(&r.bytes, backward && attn_mma_takes(p) ? (int64_t)attn_mma_room(p) : 0, 1);
    return r;
}

size_t attn_workspace(const gradd_infer_t *c, const gradd_attn_places_t *at) {
    gradd_attn_t p;
    gradd_attn_describe(&p, c->in, c->n_in, at, c->attrs);
    return make_room(&p, c->in, c->n_in, at).bytes;
}

static gradd_status_t find_rows(const gradd_launch_t *r, const gradd_attn_places_t *at,
                                attn_position_t *room, attn_call_t *out) {
    const gradd_attn_t &p = out->p;
    if (!gradd_attn_given(r->in, r->n_in, at->rows)) return GRADD_OK;
    const bool own_keys = gradd_attn_given(r->in, r->n_in, at->key_rows);
    out->q_rows = room;
    out->k_rows = own_keys ? room + p.n_q : room;
    GRADD_TRY(launch_places(&r->in[at->rows], gradd_attn_row_limit(&p, r->in, at), p.rows.positions,
                            room));
    if (!own_keys) return GRADD_OK;
    return launch_places(&r->in[at->key_rows], INT32_MAX, p.rows.key_positions, room + p.n_q);
}

gradd_status_t attn_prepare(const gradd_launch_t *r, const gradd_attn_places_t *at,
                            attn_call_t *out) {
    const bool backward = at == &gradd_attn_backward_at;
    *out = {.p = backward ? gradd_attn_of_backward(r) : gradd_attn_of_forward(r)};
    gradd_attn_t &p = out->p;
    const room_t room = make_room(&p, r->in, r->n_in, at);
    char *base = (char *)r->workspace;
    out->delta = base + room.delta;
    out->mma_room = base + room.mma;
    out->heads = (int)p.heads;
    out->kv_heads = (int)p.kv_heads;
    out->group = (int)(p.heads / p.kv_heads);
    if (p.bias.data) out->bias_count = gradd_type_count(&r->in[at->bias].type);
    out->limit = p.fill <= GRADD_ATTN_MASKED ? GRADD_ATTN_MASKED
                 : p.dtype == GRADD_DT_F64   ? p.fill + 746
                                             : (double)((float)p.fill + 104);
    if (gradd_attn_own_ranges(r->in, r->n_in, at)) {
        gradd_view_t ranges = {r->in[at->mask].type, base + room.ranges};
        GRADD_TRY(launch_ranges(p.mask.data, &ranges.type, ranges.data));
        ranges.type.dims[ranges.type.rank - 1] = 3;
        p.range = gradd_attn_extra_of(&ranges);
    }
    if (needs_limits(&p)) {
        out->limits = base + room.limits;
        GRADD_TRY(launch_limits(p, &r->in[at->bias].type, base + room.limits));
    }
    return find_rows(r, at, (attn_position_t *)(base + room.rows), out);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static gradd_status_t compute_attention(const gradd_launch_t *r) {
    attn_call_t a;
    GRADD_TRY(attn_prepare(r, &gradd_attn_forward_at, &a));
    return attn_forward(&a);
}
static gradd_status_t compute_attention_grad(const gradd_launch_t *r) {
    attn_call_t a;
    GRADD_TRY(attn_prepare(r, &gradd_attn_backward_at, &a));
    return attn_backward(&a);
}
static size_t workspace_backward(const gradd_infer_t *c) {
    return attn_workspace(c, &gradd_attn_backward_at);
}
static size_t workspace_forward(const gradd_infer_t *c) {
    return attn_workspace(c, &gradd_attn_forward_at);
}

static bool takes(const gradd_infer_t *c, const gradd_attn_places_t *at) {
    gradd_attn_t p = {};
    gradd_attn_describe_sizes(&p, c->in, at, gradd_attr_int(c->attrs, "layout", 0));
    return attn_mma_takes(&p);
}
static bool accepts_mma(const gradd_infer_t *c) {
    return takes(c, &gradd_attn_forward_at);
}
static bool accepts_grad_mma(const gradd_infer_t *c) {
    return takes(c, &gradd_attn_backward_at);
}
static gradd_status_t compute_mma(const gradd_launch_t *r) {
    attn_call_t a;
    GRADD_TRY(attn_prepare(r, &gradd_attn_forward_at, &a));
    return attn_mma_forward(&a);
}
static gradd_status_t compute_grad_mma(const gradd_launch_t *r) {
    attn_call_t a;
    GRADD_TRY(attn_prepare(r, &gradd_attn_backward_at, &a));
    return attn_mma_backward(&a);
}

/* mask, bias and ranges */
#define EXTRA_TYPES GRADD_T_BOOL, GRADD_T_F32_F64, GRADD_DTB(I32)

#define FORWARD_TYPES(own)  own, own, own, EXTRA_TYPES, GRADD_T_F32_F64, GRADD_DTB(I64)
#define BACKWARD_TYPES(own) own, own, own, own, own, GRADD_T_F32_F64, EXTRA_TYPES, GRADD_DTB(I64)
#define HALF                (GRADD_DTB(BF16) | GRADD_DTB(F16))

GRADD_KERNELS(cuda, attention,
              GRADD_KERNEL("FusedAttention", "mma", .types = {FORWARD_TYPES(HALF)},
                           .accepts = accepts_mma, .compute = compute_mma,
                           .workspace = workspace_forward, .cost = gradd_attn_cost),
              GRADD_KERNEL("FusedAttention", "simple", .types = {FORWARD_TYPES(GPU_T_FLOAT)},
                           .compute = compute_attention, .workspace = workspace_forward,
                           .cost = gradd_attn_cost),
              GRADD_KERNEL("FusedAttentionGrad", "mma", .types = {BACKWARD_TYPES(HALF)},
                           .accepts = accepts_grad_mma, .compute = compute_grad_mma,
                           .workspace = workspace_backward, .cost = gradd_attn_grad_cost),
              GRADD_KERNEL("FusedAttentionGrad", "simple", .types = {BACKWARD_TYPES(GPU_T_FLOAT)},
                           .compute = compute_attention_grad, .workspace = workspace_backward,
                           .cost = gradd_attn_grad_cost),
              GRADD_KERNEL("MaskRanges", "map", .compute = compute_ranges));
