/* ScatterND and ScatterElements on a GPU. See kernels/ops/index/scatter.c, pick.h and runs.h.
 *
 * Updates of the same place are brought together and folded in order. Those that only write
 * ("none") need no order where there is memory for a number per row: the last position that names a
 * row is its owner, and moves itself there. */
#include "kernels/cuda/index/runs.h"
#include "kernels/describe/cost.h"

#include <string.h>

static bool is_nd(const gradd_op_t *op) {
    return !strcmp(op->name, "ScatterND");
}

static const char *reduction_of(gradd_attrs_t attrs) {
    return gradd_attr_string(attrs, "reduction", "none");
}

static gradd_status_t pick_of(const gradd_op_t *op, gradd_attrs_t attrs, const gradd_view_t *in,
                              gpu_pick *out) {
    const gradd_type_t &x = in[0].type;
    int axis = 0;
    if (!is_nd(op)) GRADD_TRY(gradd_axis(gradd_attr_int(attrs, "axis", 0), x.rank, false, &axis));
    *out = is_nd(op) ? gpu_pick_nd(x, 0, in[1]) : gpu_pick_elements(x, axis, in[1]);
    return GRADD_OK;
}

/* ---- writes ---------------------------------------------------------------------------------- */

enum { MOST = 6, EACH = 4 }; /* 64 threads to a row, four packs each */

/* Owners are numbers of 32 bits, one more than a position; they take no more than the sort. */
static bool has_owners(const gpu_pick &pick) {
    return gpu_fold_is_small(pick.n, pick.n_rows) && pick.n_rows <= 3 * pick.n;
}

struct scatter_room {
    uint32_t *row, *owner;
};
static scatter_room room_of(gpu_room *room, const gpu_pick &pick) {
    uint32_t *const row = room->take<uint32_t>(pick.n);
    return {row, room->take<uint32_t>(pick.n_rows)};
}

__global__ void GPU_BLOCK(GPU_GROUP_THREADS)
    scatter_claim(gpu_pick pick, uint32_t none, scatter_room room, gpu_faults_t faults) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < pick.n; i += all) {
        const int64_t row = pick(i, faults);
        room.row[i] = row < 0 ? none : (uint32_t)row;
        if (row >= 0) atomicMax(&room.owner[row], (uint32_t)i + 1);
    }
}

template <class P>
__global__ void GPU_BLOCK(GPU_GROUP_THREADS)
    scatter_move(scatter_room room, uint32_t none, gpu_groups l, P *to, const P *from) {
    for (int64_t u = l.first(); u < l.units; u += l.all()) {
        const int64_t i = l.pieces(u), first = l.pack(u - i * l.pieces.by);
        const uint32_t row = room.row[i];
        if (first >= l.packs || row == none || room.owner[row] != (uint32_t)i + 1) continue;
        gpu_part<EACH, P> x;
        x.load(from + i * l.packs + first, l.step(), l.left(first));
        x.store(to + (int64_t)row * l.packs + first, l.step(), l.left(first));
    }
}

static gradd_status_t put_owned(const gradd_launch_t *r, const gpu_pick &pick, size_t bytes) {
    const gradd_view_t &y = r->out[0], &from = r->in[2];
    const uint32_t none = (uint32_t)pick.n_rows;
    gpu_room scratch = {(char *)r->workspace, 0};
    const scatter_room room = room_of(&scratch, pick);
    GRADD_TRY(gpu_fill(r->op->name, room.owner, NULL, sizeof(uint32_t) * (size_t)pick.n_rows));
    GPU_LAUNCH(scatter_claim, gpu_blocks(pick.n, GPU_GROUP_THREADS), GPU_GROUP_THREADS, pick, none,
               room, GPU_FAULTS);
    return gpu_by_width(gpu_units(), (uintptr_t)y.data | (uintptr_t)from.data | bytes, [&](auto t) {
        typedef typename decltype(t)::type P;
        const gpu_groups l = gpu_groups_of(pick.n, (int64_t)(bytes / sizeof(P)), MOST, EACH);
        GPU_LAUNCH((scatter_move<P>), l.blocks, GPU_GROUP_THREADS, room, none, l, (P *)y.data,
                   (const P *)from.data);
        return gpu_launched(r->op->name);
    });
}

/* ---- the operators --------------------------------------------------------------------------- */

static gpu_fold_t fold_of(const char *how) {
    return !strcmp(how, "add")   ? GPU_ONTO
           : !strcmp(how, "mul") ? GPU_MUL
           : !strcmp(how, "min") ? GPU_MIN
                                 : GPU_MAX;
}

static gradd_status_t compute_scatter(const gradd_launch_t *r) {
    const gradd_view_t &x = r->in[0], &y = r->out[0];
    const char *how = reduction_of(r->attrs);
    gpu_pick pick;
    GRADD_TRY(gpu_fill(r->op->name, y.data, x.data, (size_t)gradd_type_bytes(&x.type)));
    if (!gradd_type_count(&r->in[2].type)) return GRADD_OK;
    GRADD_TRY(pick_of(r->op, r->attrs, r->in, &pick));
    const gpu_fold_rows_t s = {.n = pick.n,
                               .n_rows = pick.n_rows,
                               .width = pick.size,
                               .how = fold_of(how),
                               .to = y.data,
                               .from = r->in[2].data,
                               .workspace = r->workspace};
    if (!strcmp(how, "none")) {
        const size_t bytes = (size_t)pick.size * gradd_dtype_bytes(x.type.dtype);
        return has_owners(pick) ? put_owned(r, pick, bytes)
                                : gpu_put_rows(r->op->name, &s, bytes, pick);
    }
    return gpu_switch(gpu_numbers(), x.type.dtype, [&](auto t) {
        return gpu_fold_rows<typename decltype(t)::type>(r->op->name, &s, pick);
    });
}

static size_t workspace_scatter(const gradd_infer_t *c) {
    const char *how = reduction_of(c->attrs);
    gpu_pick pick;
    gpu_room room = {};
    if (!gradd_type_count(&c->in[2].type) || pick_of(c->op, c->attrs, c->in, &pick) != GRADD_OK)
        return 0;
    if (strcmp(how, "none") || !has_owners(pick))
        return gpu_fold_workspace(c->out[0].dtype, pick.n, pick.n_rows, pick.size,
                                  !strcmp(how, "add"));
    room_of(&room, pick);
    return room.bytes;
}

/* Whether no arithmetic is done, so that there is nothing to round. */
static bool only_moves(const gradd_infer_t *c) {
    const char *how = reduction_of(c->attrs);
    return strcmp(how, "add") && strcmp(how, "mul");
}

#define ROW(op, name, ...)                                                                         \
    GRADD_KERNEL(op, name, .inplace = 1, __VA_ARGS__.compute = compute_scatter,                    \
                 .workspace = workspace_scatter, .cost = gradd_cost_move)

GRADD_KERNELS(cuda, scatter, ROW("ScatterND", "move", .accepts = only_moves, ),
              ROW("ScatterND", "sum", ), ROW("ScatterElements", "move", .accepts = only_moves, ),
              ROW("ScatterElements", "sum", ));
