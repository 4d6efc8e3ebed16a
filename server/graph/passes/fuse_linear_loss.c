/* The head of a language model and its loss -> LinearCrossEntropy, in plans that train:
 *
 *   CrossEntropy(logits, labels)       with a reduction, as fuse_loss has left it
 *   sum_i w_i CrossEntropy(logits, labels)_i, without one: masks, weights (match_rows.h)
 *   one of them + sum_i q_i lse_i^2    lse = ReduceLogSumExp(logits): z-loss
 *   logits = [softcap] [scale] (x W)   or x W + b
 *
 * with a weight that is an input of the graph, through views and casts between halves and f32,
 * where the logits have no other reader and are not a wanted output. softcap is c tanh(z / c);
 * scale a product with a number, or a quotient. w and q depend on nothing that is trained: only
 * then is the gradient of a row known before the backward. A z-loss is of the logits as the loss
 * sees them, but for casts and, if it is written so, the last position of each sequence. The
 * gradients of x and W are formed in the forward, chunk of rows by chunk of rows, and the logits
 * are never there as a whole. Not in f16: formed for a loss of 1, as they are, they would underflow
 * before they are scaled.
 *
 * The chunk is a power of two: the device's length (512 rows on the CPU), or one with 16 MiB of
 * logits. With fewer the weight and the sums of its gradient go through memory too often. In bf16
 * these sums take half as much again as the gradient; where the plan's caller gives no memory for
 * it in the forward it lies in the arena. Where all that is more than the logits the chunk is
 * halved, down to 128 rows, or 64 where the sums stay in a cache. What is still more, and logits of
 * less than 256 KiB, are left as they are. */
#include <string.h>

#include "kernels/describe/cross_entropy.h"
#include "kernels/describe/head.h"
#include "kernels/rules/rules.h"
#include "server/graph/compile_time.h"
#include "server/graph/match/match_mean.h"
#include "server/graph/match/match_rows.h"
#include "server/graph/readers.h"

#define LEAST_ROWS  128
#define CACHE_ROWS  64
#define CACHE_BYTES ((int64_t)1 << 20)
#define CHUNK_BYTES ((int64_t)16 << 20)
#define LEAST_BYTES ((int64_t)256 << 10) /* below, a slot of its own costs more than it saves */

typedef struct pass_s {
    graph_t *g;
    int32_t *readers;
    int32_t *reader; /* per value with one: the node that reads it */
    bool *trained;   /* see match_find_trained */
} pass_t;

/* The loss of the pattern, and what is added to it. */
typedef struct total_s {
    int32_t loss; /* CrossEntropy */
    int32_t last; /* node of the result */
    bool weighted, squares;
    match_rows_t weights, lse;
    gradd_val_t fork; /* logits that loss and log-sum-exp read; GRADD_NONE = the loss alone */
    bool cut;         /* the last position has no log-sum-exp */
} total_t;

typedef struct head_match_s {
    gradd_val_t at; /* on the way from the loss to the product */
    double post, pre;
    bool bent; /* a tanh was passed: post is in front of the loss, pre in front of the tanh */
    const graph_node_t *product;
    gradd_val_t x, w, bias;
    bool trans;
    int64_t rows, width, classes;
} head_match_t;

static int64_t last_dim(const gradd_type_t *t) {
    return t->rank ? t->dims[t->rank - 1] : 1;
}

static void multiply(head_match_t *h, double factor) {
    *(h->bent ? &h->pre : &h->post) *= factor;
}

/* ---- from the logits upwards ----------------------------------------------------------------- */

static bool is_cast(const gradd_type_t *a, const gradd_type_t *b) {
    return (gradd_dtype_is_half(a->dtype) || a->dtype == GRADD_DT_F32) &&
           (gradd_dtype_is_half(b->dtype) || b->dtype == GRADD_DT_F32);
}

/* One step over a node that is no product; false if it is none of the pattern. */
static bool step_over(const graph_t *g, const graph_node_t *n, head_match_t *h) {
    const char *name = n->op->name;
    double number;
    gradd_val_t other = n->n_in ? n->in[0] : GRADD_NONE;
    if (other == GRADD_NONE) return false;
    const gradd_type_t *in = graph_type(g, other), *out = graph_type(g, n->out[0]);
    if (gradd_op_is_transparent(n->op) && in->rank && last_dim(in) == last_dim(out)) {
        if (in->dtype != out->dtype) return false;
    } else if (!strcmp(name, "Cast")) {
        if (!is_cast(in, out)) return false;
    } else if (!strcmp(name, "Tanh")) {
        if (h->bent) return false;
        h->bent = true;
    } else if (!strcmp(name, "Mul") && match_with_scalar(g, n, &number, &other)) {
        multiply(h, number);
    } else if (!strcmp(name, "Div") && match_scalar(g, n->in[1], &number) && number != 0) {
        multiply(h, 1 / number);
    } else {
        return false;
    }
    h->at = other;
    return gradd_type_count(graph_type(g, other)) == gradd_type_count(out);
}

/* A product of rows and one matrix that is an input, with nothing but a bias. */
static bool take_product(const graph_t *g, const graph_node_t *n, head_match_t *h) {
    const char *name = n->op->name;
    const bool linear = !strcmp(name, "Linear"), gemm = !strcmp(name, "Gemm");
    if (!linear && !gemm && strcmp(name, "MatMul") && strcmp(name, "FusedMatMul")) return false;
    if (gemm && n->n_in > 2 && n->in[2] != GRADD_NONE) return false;
    h->x = n->in[0], h->w = n->in[1], h->bias = linear ? n->in[2] : GRADD_NONE;
    h->trans = gradd_attr_int(n->attrs, "transB", 0);
    const gradd_type_t *x = graph_type(g, h->x), *w = graph_type(g, h->w);
    if (x->rank < 2 || w->rank != 2 || x->dtype != w->dtype || !gradd_dtype_is_float(x->dtype) ||
        x->dtype == GRADD_DT_F16 || g->values[h->w]->kind != VALUE_INPUT ||
        gradd_attr_int(n->attrs, "transA", 0) || graph_type(g, n->out[0])->dtype != x->dtype)
        return false;
    const double alpha = gradd_attr_float(n->attrs, "alpha", 1);
    if (alpha != 1 && h->bias != GRADD_NONE) return false;
    multiply(h, alpha);
    h->product = n;
    h->width = last_dim(x);
    h->classes = w->dims[!h->trans];
    h->rows = h->width ? gradd_type_count(x) / h->width : 0;
    return true;
}

/* The loss and the log-sum-exp see the same numbers up to where they part. */
static bool is_fork(const total_t *t, const head_match_t *h) {
    return h->at == t->fork && h->post == 1 && !h->bent;
}

static bool find_head(const pass_t *p, const total_t *t, head_match_t *h) {
    const graph_t *g = p->g;
    bool forked = t->fork == GRADD_NONE;
    *h = (head_match_t){
        .at = g->nodes[t->loss].in[GRADD_CE_LOGITS], .post = 1, .pre = 1, .bias = GRADD_NONE};
    for (int step = 0; step < MATCH_MAX_WALK; step++) {
        const graph_value_t *v = g->values[h->at];
        const bool parts = !forked && is_fork(t, h);
        if (v->kind != VALUE_NODE || v->data || p->readers[h->at] != 1 + parts) return false;
        forked |= parts;
        const graph_node_t *n = &g->nodes[v->node];
        if (n->backward) return false;
        if (take_product(g, n, h)) return forked;
        if (!step_over(g, n, h)) return false;
    }
    return false;
}

/* ---- the chunk ------------------------------------------------------------------------------- */

/* The memory of the chunked loss, beside that of whole logits: a chunk of logits and of rows, the
 * rows' gradients, the weight's until the backward, and in bf16 the extra bytes of its sums. */
typedef struct head_sizes_s {
    int64_t row, width; /* bytes of a row of logits, and of x */
    int64_t kept;       /* whatever the chunk */
    int64_t low;        /* where there is more than one chunk */
    int64_t weight;     /* bytes of the sums of its gradient; 0 = it has none */
} head_sizes_t;

static head_sizes_t find_sizes(const graph_t *g, const head_match_t *h) {
    const gradd_dtype_t dtype = graph_type(g, h->x)->dtype;
    const int64_t bytes = (int64_t)gradd_dtype_bytes(dtype), weight = h->classes * h->width;
    head_sizes_t s = {.row = h->classes * bytes, .width = h->width * bytes};
    s.kept = h->rows * s.width;
    if (!graph_is_trained(g, h->w)) return s;
    s.weight = weight * bytes;
    if (!g->early || !graph_is_parameter(g, h->w)) s.kept += s.weight;
    if (dtype == GRADD_DT_BF16) {
        const int64_t block = weight * (int64_t)sizeof(float);
        s.kept += block < g->backend->head_block ? block : g->backend->head_block;
        s.low = weight;
        s.weight += weight;
    }
    return s;
}

/* Rows of a chunk, or 0 if whole logits take less. */
static int64_t choose_chunk(const graph_t *g, const head_match_t *h) {
    if (!h->rows || !h->classes || !h->width) return 0;
    const head_sizes_t s = find_sizes(g, h);
    const int64_t all = h->rows * s.row;
    if (all < LEAST_BYTES) return 0;
    int64_t most = g->backend->head_rows, chunk = 1;
    const int64_t least = s.weight < CACHE_BYTES ? CACHE_ROWS : LEAST_ROWS;
    if (most < CHUNK_BYTES / s.row) most = CHUNK_BYTES / s.row;
    while (2 * chunk <= most && 2 * chunk < h->rows)
        chunk *= 2;
    while (chunk >= least && chunk * (s.row + s.width) + s.low + s.kept > all)
        chunk /= 2;
    return chunk >= least ? chunk : 0;
}

/* ---- rewriting ------------------------------------------------------------------------------- */

/* x with the leading sizes of the logits, which tell positions from sequences. */
static gradd_status_t fit_rows(graph_t *g, const graph_node_t *loss, head_match_t *h) {
    const gradd_type_t logits = *graph_type(g, loss->in[GRADD_CE_LOGITS]), *x = graph_type(g, h->x);
    bool same = x->rank == logits.rank;
    for (int i = 0; same && i + 1 < x->rank; i++)
        same = x->dims[i] == logits.dims[i];
    if (same || !gradd_attr_int(loss->attrs, GRADD_CE_SHIFT, 0)) return GRADD_OK;
    int64_t dims[GRADD_MAX_RANK];
    memcpy(dims, logits.dims, sizeof dims[0] * (size_t)logits.rank);
    dims[logits.rank - 1] = h->width;
    gradd_val_t in[2] = {h->x, gradd_const_i64s(&g->builder, dims, logits.rank)};
    GRADD_TRY(g->builder.status);
    return match_emit(g, loss, &(match_fused_t){.op = "Reshape", .in = in, .n_in = 2}, &h->x, 1);
}

static int add_attrs(const graph_t *g, const total_t *t, const head_match_t *h, int64_t chunk,
                     gradd_attr_t *out) {
    const gradd_attrs_t from = g->nodes[t->loss].attrs;
    const double scale = h->bent ? h->pre * h->post : h->post;
    int n = 0;
    if (t->weighted) out[n++] = gradd_make_string(GRADD_CE_REDUCTION, "sum");
    for (int i = 0; i < from.n && n < 4; i++)
        if (!t->weighted || strcmp(from.v[i].name, GRADD_CE_REDUCTION)) out[n++] = from.v[i];
    if (h->trans) out[n++] = gradd_make_int(GRADD_HEAD_TRANS, 1);
    if (h->bent) out[n++] = gradd_make_float(GRADD_HEAD_SOFTCAP, h->post);
    if (scale != 1) out[n++] = gradd_make_float(GRADD_HEAD_SCALE, scale);
    if (chunk < h->rows) out[n++] = gradd_make_int(GRADD_HEAD_CHUNK, chunk);
    return n;
}

/* Weights of rows [.., S - 1] as those of [.., S], with zeros at the end. */
static gradd_status_t append_zeros(graph_t *g, int32_t like, int64_t positions, gradd_val_t *v) {
    const int64_t rows = gradd_type_count(graph_type(g, *v)), batch = rows / (positions - 1);
    gradd_builder_t *b = &g->builder;
    gradd_val_t in[3][2] = {
        {*v,         gradd_const_i64s(b, (int64_t[]){batch, positions - 1}, 2)},
        {GRADD_NONE, gradd_const_i64s(b, (int64_t[]){0, 0, 0, 1},           4)},
        {GRADD_NONE, gradd_const_i64s(b, (int64_t[]){batch * positions},    1)}
    };
    static const char *const ops[3] = {"Reshape", "Pad", "Reshape"};
    GRADD_TRY(b->status);
    for (int i = 0; i < 3; i++) {
        const graph_node_t node = g->nodes[like];
        if (i) in[i][0] = *v;
        GRADD_TRY(
            match_emit(g, &node, &(match_fused_t){.op = ops[i], .in = in[i], .n_in = 2}, v, 1));
    }
    return GRADD_OK;
}

static gradd_status_t add_weights(graph_t *g, const total_t *t, gradd_val_t *in) {
    const gradd_dtype_t dtype = graph_type(g, g->nodes[t->last].out[0])->dtype;
    if (t->weighted)
        GRADD_TRY(match_rows_weights(g, t->last, &t->weights, dtype, &in[GRADD_HEAD_WEIGHTS]));
    if (!t->squares) return GRADD_OK;
    GRADD_TRY(match_rows_weights(g, t->last, &t->lse, dtype, &in[GRADD_HEAD_SQUARES]));
    if (!t->cut) return GRADD_OK;
    const gradd_type_t *logits = graph_type(g, t->fork);
    return append_zeros(g, t->last, logits->dims[logits->rank - 2], &in[GRADD_HEAD_SQUARES]);
}

static gradd_status_t fuse(pass_t *p, const total_t *t) {
    graph_t *g = p->g;
    head_match_t h;
    if (g->nodes[t->loss].n_out > 1 || !find_head(p, t, &h)) return GRADD_OK;
    const int64_t chunk = choose_chunk(g, &h);
    if (!chunk) return GRADD_OK;
    gradd_attr_t attrs[GRADD_CE_ATTRS + 4];
    const int n_attrs = add_attrs(g, t, &h, chunk, attrs);
    GRADD_TRY(fit_rows(g, &g->nodes[t->loss], &h));
    const graph_node_t *loss = &g->nodes[t->loss]; /* the list may have moved */
    gradd_val_t in[GRADD_HEAD_INPUTS] = {[GRADD_HEAD_X] = h.x,
                                         [GRADD_HEAD_W] = h.w,
                                         [GRADD_HEAD_LABELS] = loss->in[GRADD_CE_LABELS],
                                         [GRADD_HEAD_BIAS] = h.bias,
                                         [GRADD_HEAD_ITEMS] = match_operand(loss, GRADD_CE_ITEMS),
                                         [GRADD_HEAD_CLASSES] =
                                             match_operand(loss, GRADD_CE_WEIGHTS),
                                         [GRADD_HEAD_WEIGHTS] = GRADD_NONE,
                                         [GRADD_HEAD_SQUARES] = GRADD_NONE};
    GRADD_TRY(add_weights(g, t, in));
    int n_in = GRADD_HEAD_INPUTS;
    while (in[n_in - 1] == GRADD_NONE)
        n_in--;
    gradd_val_t ends[4 + 2 * MATCH_ROWS_PARTS] = {h.x, h.w, g->nodes[t->loss].in[GRADD_CE_LABELS]};
    int n_ends = 3;
    if (in[GRADD_HEAD_CLASSES] != GRADD_NONE) ends[n_ends++] = in[GRADD_HEAD_CLASSES];
    for (int i = 0; i < t->weights.n_parts; i++)
        ends[n_ends++] = t->weights.parts[i].value;
    for (int i = 0; i < t->lse.n_parts; i++)
        ends[n_ends++] = t->lse.parts[i].value;
    const match_fused_t fused = {
        .op = "LinearCrossEntropy", .in = in, .n_in = n_in, .attrs = attrs, .n_attrs = n_attrs};
    return match_replace_above(g, &g->nodes[t->last], &fused, ends, n_ends);
}

/* ---- from the loss downwards ----------------------------------------------------------------- */

static gradd_status_t find_readers(pass_t *p) {
    graph_t *g = p->g;
    GRADD_TRY(graph_count_readers(g, &p->readers));
    GRADD_TRY(match_find_trained(g, &p->trained));
    p->reader = arena_array(g->arena, (size_t)g->n_values + 1, sizeof p->reader[0]);
    if (!p->reader) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    for (int v = 0; v < g->n_values; v++)
        p->reader[v] = -1;
    for (int32_t id = 0; id < g->n_nodes; id++) {
        const graph_node_t *n = &g->nodes[id];
        bool lives = false;
        for (int j = 0; j < n->n_out; j++)
            lives |= n->out[j] != GRADD_NONE && p->readers[n->out[j]];
        for (int i = 0; i < n->n_in && lives; i++)
            if (n->in[i] != GRADD_NONE && p->readers[n->in[i]] == 1) p->reader[n->in[i]] = id;
    }
    return GRADD_OK;
}

static gradd_val_t result_of(const pass_t *p, const total_t *t) {
    return p->g->nodes[t->last].out[0];
}

/* Losses of rows: down to the last value that is a weighted sum of them. */
static bool take_weights(const pass_t *p, total_t *t) {
    const gradd_val_t each = p->g->nodes[t->loss].out[0];
    match_rows_t rows;
    int32_t at = t->loss;
    for (int step = 0; step < MATCH_MAX_WALK; step++) {
        at = p->reader[p->g->nodes[at].out[0]];
        /* a square has its operand twice, and is nothing that a loss is summed by */
        if (at < 0 || p->g->nodes[at].backward) break;
        const gradd_val_t v = p->g->nodes[at].out[0];
        if (gradd_type_count(graph_type(p->g, v)) != 1) continue;
        if (!match_rows(p->g, v, "CrossEntropy", p->readers, p->trained, &rows) || rows.squared ||
            rows.leaf->out[0] != each)
            break;
        t->weighted = true;
        t->weights = rows;
        t->last = at;
    }
    return t->weighted;
}

/* The logits of which x is all, or all but the last position. */
static bool find_fork(const pass_t *p, gradd_val_t x, total_t *t) {
    const graph_t *g = p->g;
    t->cut = false;
    for (int step = 0; step < MATCH_MAX_WALK && p->readers[x] == 1; step++) {
        const graph_node_t *n = match_producer(g, x);
        if (!n || n->backward || n->n_in < 1 || n->in[0] == GRADD_NONE) return false;
        const gradd_type_t *in = graph_type(g, n->in[0]), *out = graph_type(g, x);
        const bool view = gradd_op_is_transparent(n->op) && in->rank && in->dtype == out->dtype &&
                          last_dim(in) == last_dim(out);
        const bool cast = !strcmp(n->op->name, "Cast") && is_cast(in, out);
        const bool cut = !t->cut && match_cuts_one(g, n, out->rank - 2, false);
        if (!view && !cast && !cut) return false;
        if (cut && in->dims[in->rank - 2] < 2) return false;
        t->cut |= cut;
        if (t->cut && !cut && !cast) return false; /* sizes in front of it are those of the fork */
        x = n->in[0];
    }
    t->fork = x;
    return p->readers[x] == 2;
}

/* Whether v is a z-loss. */
static bool is_squares(const pass_t *p, gradd_val_t v, total_t *t) {
    const graph_t *g = p->g;
    if (!match_rows(g, v, "ReduceLogSumExp", p->readers, p->trained, &t->lse) || !t->lse.squared)
        return false;
    return match_names_last(g, t->lse.leaf) && find_fork(p, t->lse.leaf->in[0], t);
}

/* A sum of the loss and a z-loss. */
static void take_squares(const pass_t *p, total_t *t) {
    const gradd_val_t v = result_of(p, t);
    const int32_t id = p->reader[v];
    if (id < 0) return;
    const graph_node_t *n = &p->g->nodes[id];
    if (n->backward || strcmp(n->op->name, "Add") || n->in[0] == n->in[1]) return;
    const gradd_val_t other = n->in[n->in[0] == v];
    if (gradd_type_count(graph_type(p->g, n->out[0])) != 1 || !is_squares(p, other, t)) return;
    t->squares = true;
    t->last = id;
}

static gradd_status_t fuse_loss_of(pass_t *p, int32_t id) {
    const graph_node_t *n = &p->g->nodes[id];
    total_t t = {.loss = id, .last = id, .fork = GRADD_NONE};
    const bool none = !strcmp(gradd_attr_string(n->attrs, GRADD_CE_REDUCTION, "mean"), "none");
    if (none && !take_weights(p, &t)) return GRADD_OK;
    take_squares(p, &t);
    return fuse(p, &t);
}

static gradd_status_t fuse_linear_loss(graph_t *g) {
    pass_t p = {.g = g};
    if (!g->trains || g->dense_loss) return GRADD_OK;
    GRADD_TRY(find_readers(&p));
    for (int32_t i = 0, n = g->n_nodes; i < n; i++) {
        GRADD_TRY(compile_time_spend(1));
        if (!g->nodes[i].backward && !strcmp(g->nodes[i].op->name, "CrossEntropy"))
            GRADD_TRY(fuse_loss_of(&p, i));
    }
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_linear_loss = {
    "fuse_linear_loss", 97, true, fuse_linear_loss, {"LinearCrossEntropy"}};
