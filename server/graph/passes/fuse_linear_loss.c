/* The head of a language model and its loss -> LinearCrossEntropy, in plans that train:
 *
 *   CrossEntropy(logits, labels)       with a reduction, as fuse_loss has left it
 *   logits = [softcap] [scale] (x W)   or x W + b
 *
 * with a weight that is an input of the graph, through views and casts between bf16 and f32, where
 * nobody else reads the logits and they are no wanted output. softcap is c tanh(z / c); scale a
 * product with a number, or a quotient. The gradients of x and W are formed in the forward, chunk
 * of rows by chunk of rows, and the logits are never there as a whole.
 *
 * The chunk is what has 16 MiB of logits, or 512 rows: with fewer the sums of the weight's gradient
 * go through memory too often. In bf16 these sums take half as much again as the gradient; where
 * the plan's caller gives no memory for it in the forward it lies in the arena. Where all that is
 * hardly less than the logits there is one chunk, if only to leave out rows without a label;
 * where it is more, or where the logits have less than 256 KiB, nothing is replaced. */
#include <string.h>

#include "kernels/rules.h"
#include "server/graph/budget.h"
#include "server/graph/match/match.h"
#include "server/graph/readers.h"

#define CHUNK_BYTES ((int64_t)16 << 20)
#define CHUNK_ROWS  512
#define LEAST_BYTES ((int64_t)256 << 10) /* below, a slot of its own costs more than it saves */

typedef struct head_s {
    gradd_val_t at; /* on the way from the loss to the product */
    double post, pre;
    bool bent; /* a tanh was passed: post is in front of the loss, pre in front of the tanh */
    const graph_node_t *product;
    gradd_val_t x, w, bias;
    bool trans;
    int64_t rows, width, classes;
} head_t;

static int64_t last_dim(const gradd_type_t *t) {
    return t->rank ? t->dims[t->rank - 1] : 1;
}

static void multiply(head_t *h, double factor) {
    *(h->bent ? &h->pre : &h->post) *= factor;
}

/* ---- from the logits upwards ----------------------------------------------------------------- */

static bool is_cast(const gradd_type_t *a, const gradd_type_t *b) {
    return (a->dtype == GRADD_DT_BF16 || a->dtype == GRADD_DT_F32) &&
           (b->dtype == GRADD_DT_BF16 || b->dtype == GRADD_DT_F32);
}

/* One step over a node that is no product; false if it is none of the pattern. */
static bool step_over(const graph_t *g, const graph_node_t *n, head_t *h) {
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
static bool take_product(const graph_t *g, const graph_node_t *n, head_t *h) {
    const char *name = n->op->name;
    const bool linear = !strcmp(name, "Linear"), gemm = !strcmp(name, "Gemm");
    if (!linear && !gemm && strcmp(name, "MatMul") && strcmp(name, "FusedMatMul")) return false;
    if (gemm && n->n_in > 2 && n->in[2] != GRADD_NONE) return false;
    h->x = n->in[0], h->w = n->in[1], h->bias = linear ? n->in[2] : GRADD_NONE;
    h->trans = gradd_attr_int(n->attrs, "transB", 0);
    const gradd_type_t *x = graph_type(g, h->x), *w = graph_type(g, h->w);
    if (x->rank < 2 || w->rank != 2 || x->dtype != w->dtype || !gradd_dtype_is_float(x->dtype) ||
        g->values[h->w]->kind != VALUE_INPUT || gradd_attr_int(n->attrs, "transA", 0) ||
        graph_type(g, n->out[0])->dtype != x->dtype)
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

static bool find_head(const graph_t *g, gradd_val_t logits, const int32_t *readers, head_t *h) {
    *h = (head_t){.at = logits, .post = 1, .pre = 1, .bias = GRADD_NONE};
    for (int step = 0; step < MATCH_MAX_WALK; step++) {
        const graph_value_t *v = g->values[h->at];
        if (v->kind != VALUE_NODE || v->data || readers[h->at] != 1) return false;
        const graph_node_t *n = &g->nodes[v->node];
        if (n->backward) return false;
        if (take_product(g, n, h)) return true;
        if (!step_over(g, n, h)) return false;
    }
    return false;
}

/* ---- the chunk ------------------------------------------------------------------------------- */

/* Rows of a chunk, or 0 if the logits take less. */
static int64_t choose_chunk(const graph_t *g, const head_t *h) {
    const gradd_dtype_t dtype = graph_type(g, h->x)->dtype;
    const int64_t bytes = (int64_t)gradd_dtype_bytes(dtype), row = h->classes * bytes;
    const bool trained = graph_is_trained(g, h->w);
    const int64_t weight = h->classes * h->width;
    if (!h->rows || !row) return 0;
    int64_t chunk = CHUNK_BYTES / row;
    if (chunk < CHUNK_ROWS) chunk = CHUNK_ROWS;
    if (chunk > h->rows) chunk = h->rows;
    const int64_t sums = trained && dtype == GRADD_DT_BF16 ? weight : 0;
    const bool given = g->early && graph_is_parameter(g, h->w);
    const int64_t kept = trained && !given ? weight * bytes : 0;
    const int64_t all = h->rows * row;
    if (all < LEAST_BYTES) return 0;
    if (chunk * row + sums > all - all / 8) chunk = h->rows;
    if (chunk == h->rows && g->label_rows) return 0; /* the others are left out already */
    const int64_t taken = chunk * row + kept + (chunk < h->rows ? sums : 0);
    return taken <= all ? chunk : 0;
}

/* ---- rewriting ------------------------------------------------------------------------------- */

/* x with the leading sizes of the logits, which tell positions from sequences. */
static gradd_status_t fit_rows(graph_t *g, const graph_node_t *loss, head_t *h) {
    const gradd_type_t logits = *graph_type(g, loss->in[0]), *x = graph_type(g, h->x);
    bool same = x->rank == logits.rank;
    for (int i = 0; same && i + 1 < x->rank; i++)
        same = x->dims[i] == logits.dims[i];
    if (same || !gradd_attr_int(loss->attrs, "shift", 0)) return GRADD_OK;
    int64_t dims[GRADD_MAX_RANK];
    memcpy(dims, logits.dims, sizeof dims[0] * (size_t)logits.rank);
    dims[logits.rank - 1] = h->width;
    gradd_val_t in[2] = {h->x, gradd_const_i64s(&g->builder, dims, logits.rank)};
    GRADD_TRY(g->builder.status);
    return match_emit(g, loss, &(match_fused_t){.op = "Reshape", .in = in, .n_in = 2}, &h->x, 1);
}

static gradd_status_t fuse(graph_t *g, int32_t id, const int32_t *readers) {
    const graph_node_t *n = &g->nodes[id];
    head_t h;
    if (!strcmp(gradd_attr_string(n->attrs, "reduction", "mean"), "none") || n->n_out > 1)
        return GRADD_OK;
    if (!find_head(g, n->in[0], readers, &h)) return GRADD_OK;
    const int64_t chunk = choose_chunk(g, &h);
    if (!chunk) return GRADD_OK;
    gradd_attr_t attrs[8];
    int n_attrs = 0;
    for (int i = 0; i < n->attrs.n && n_attrs < 4; i++)
        attrs[n_attrs++] = n->attrs.v[i];
    if (h.trans) attrs[n_attrs++] = gradd_make_int("transB", 1);
    if (h.bent) attrs[n_attrs++] = gradd_make_float("softcap", h.post);
    const double scale = h.bent ? h.pre * h.post : h.post;
    if (scale != 1) attrs[n_attrs++] = gradd_make_float("scale", scale);
    if (chunk < h.rows) attrs[n_attrs++] = gradd_make_int("chunk", chunk);
    GRADD_TRY(fit_rows(g, n, &h));
    graph_node_t *loss = &g->nodes[id]; /* the list may have moved */
    gradd_val_t in[6] = {h.x, h.w, loss->in[1], h.bias};
    int n_in = h.bias != GRADD_NONE ? 4 : 3;
    for (int i = 2; i < 4; i++) { /* number of items, class weights */
        in[i + 2] = i < loss->n_in ? loss->in[i] : GRADD_NONE;
        if (in[i + 2] != GRADD_NONE) n_in = i + 3;
    }
    return match_replace(g, loss,
                         &(match_fused_t){.op = "LinearCrossEntropy",
                                          .in = in,
                                          .n_in = n_in,
                                          .attrs = attrs,
                                          .n_attrs = n_attrs});
}

static gradd_status_t fuse_linear_loss(graph_t *g) {
    int32_t *readers;
    if (!g->trains || g->dense_loss) return GRADD_OK;
    GRADD_TRY(graph_count_readers(g, &readers));
    for (int32_t i = 0, n = g->n_nodes; i < n; i++) {
        GRADD_TRY(budget_spend(1));
        if (!g->nodes[i].backward && !strcmp(g->nodes[i].op->name, "CrossEntropy"))
            GRADD_TRY(fuse(g, i, readers));
    }
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_linear_loss = {"fuse_linear_loss", 97, true, fuse_linear_loss};
