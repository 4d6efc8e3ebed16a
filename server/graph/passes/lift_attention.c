/* Attention over products of three dimensions becomes one over four, which fuse_attention knows:
 *
 *   MatMul(softmax(.. MatMul(q, k^T) ..), v)       on [N, positions, width], N = batch x heads
 *
 * becomes Reshape of the same on [batch, heads, positions, width]. Models write it so with bmm, and
 * reshape to four dimensions and back around a mask or a bias; those reshapes go away. How N splits
 * up is read off the softmax or v where one of them is reshaped, else it is [1, N].
 *
 * Only what lies between the two products, and the reshapes, transpositions and factors of their
 * operands, is written again. Nothing is computed twice: but for transpositions, a value that
 * others read, too, stays as it is and is reshaped. */
#include <string.h>

#include "kernels/rules/rules.h"
#include "server/graph/compile_time.h"
#include "server/graph/match/match_cast.h"
#include "server/graph/readers.h"
#include "server/graph/redirect.h"

enum { FIRST_RANK = 3, RANK = 4 };
enum { MOST_NODES = 256 }; /* between two products */

typedef struct lift_s {
    graph_t *g;
    graph_readers_t readers;
    graph_redirect_t redirect;
    gradd_val_t *lifted; /* per value at the start; GRADD_NONE = not yet */
    int64_t batch, heads;
} lift_t;

/* A value on its way up: in the scores and weights, or an operand of a product. */
typedef enum side_e { IN_SCORES, IN_OPERAND } side_t;

static bool is_among(const char *name, const char *const *names) {
    for (; *names; names++)
        if (!strcmp(name, *names)) return true;
    return false;
}

/* The node of a value if it does nothing but give it another shape. */
static const graph_node_t *reshaping(const graph_t *g, gradd_val_t v) {
    static const char *const names[] = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", NULL};
    if (g->values[v]->kind != VALUE_NODE) return NULL;
    const graph_node_t *n = &g->nodes[g->values[v]->node];
    return is_among(n->op->name, names) && !n->backward ? n : NULL;
}

/* [N, ., .] */
static bool is_flat(const lift_t *s, gradd_val_t v) {
    const gradd_type_t *t = graph_type(s->g, v);
    return t->rank == FIRST_RANK && t->dims[0] == s->batch * s->heads;
}

/* [batch, heads, ., .] */
static bool is_split(const lift_t *s, gradd_val_t v) {
    const gradd_type_t *t = graph_type(s->g, v);
    return t->rank == RANK && t->dims[0] == s->batch && t->dims[1] == s->heads;
}

/* Whether `four` is `three` with N split up. */
static bool splits(const lift_t *s, gradd_val_t three, gradd_val_t four) {
    return is_flat(s, three) && is_split(s, four) &&
           !memcmp(&graph_type(s->g, three)->dims[1], &graph_type(s->g, four)->dims[2],
                   2 * sizeof(int64_t));
}

/* v in four dimensions, by a view. */
static gradd_status_t split(lift_t *s, gradd_val_t v, gradd_val_t *out) {
    const gradd_type_t *t = graph_type(s->g, v);
    const int64_t dims[RANK] = {s->batch, s->heads, t->dims[1], t->dims[2]};
    *out = gradd_reshape_to(&s->g->builder, v, dims, RANK);
    return s->g->builder.status;
}

/* ---- nodes that are written again ------------------------------------------------------------ */

/* Whether a node does the same to each element, or to each row of the last axis. */
static bool is_lifted(const lift_t *s, const graph_node_t *n, side_t side) {
    static const char *const pointwise[] = {"Add",  "Sub", "Mul", "Div",     "Where", "Tanh",
                                            "Cast", "Not", "And", "Dropout", "Max",   NULL};
    double factor;
    gradd_val_t other;
    const char *name = n->op->name;
    if (n->backward || n->n_out != 1 || n->n_in > 3) return false;
    if (!strcmp(name, "Transpose") || !strcmp(name, "Cast")) return true;
    if (side == IN_OPERAND)
        return (!strcmp(name, "Mul") || !strcmp(name, "Div")) &&
               match_with_scalar(s->g, n, &factor, &other);
    if (!strcmp(name, "Softmax")) {
        const int rank = graph_type(s->g, n->out[0])->rank;
        const int64_t axis = gradd_attr_int(n->attrs, "axis", -1);
        return axis == -1 || axis == rank - 1;
    }
    if (!strcmp(name, "MatMul"))
        return graph_type(s->g, n->in[0])->rank == graph_type(s->g, n->in[1])->rank &&
               (graph_type(s->g, n->in[0])->rank == RANK ||
                (is_flat(s, n->in[0]) && is_flat(s, n->in[1])));
    return is_among(name, pointwise);
}

static gradd_status_t lift(lift_t *s, gradd_val_t v, side_t side, int depth, gradd_val_t *out);

/* An operand of a node of `rank` dimensions; what broadcasts over N stays. */
static gradd_status_t lift_operand(lift_t *s, gradd_val_t v, int rank, side_t side, int depth,
                                   gradd_val_t *out) {
    *out = v;
    if (v == GRADD_NONE || !(rank == RANK ? is_split(s, v) : is_flat(s, v))) return GRADD_OK;
    return lift(s, v, side, depth + 1, out);
}

/* Transpose of three dimensions. The first stays where it is, or there is one batch and the axes
 * move behind it. */
static gradd_status_t lift_transpose(lift_t *s, const graph_node_t *n, side_t side, int depth,
                                     gradd_val_t *out) {
    const gradd_attr_t *attr = gradd_attr_find(n->attrs, "perm");
    const gradd_type_t *t = graph_type(s->g, n->in[0]);
    int64_t dims[RANK] = {1, t->dims[0], t->dims[1], t->dims[2]};
    int64_t perm[RANK] = {0, 3, 2, 1};
    gradd_val_t x = GRADD_NONE;
    for (int i = 0; attr && i < FIRST_RANK; i++)
        perm[1 + i] = 1 + attr->ints[i];
    if (perm[1] == 1)
        GRADD_TRY(lift_operand(s, n->in[0], FIRST_RANK, side, depth, &x));
    else if (s->batch == 1)
        x = gradd_reshape_to(&s->g->builder, n->in[0], dims, RANK);
    if (x == GRADD_NONE) return split(s, n->out[0], out);
    *out = gradd_transpose(&s->g->builder, x, perm, RANK);
    return s->g->builder.status;
}

/* `node` again on lifted operands; its own output if they are what they were. */
static gradd_status_t lift_node(lift_t *s, int32_t node, side_t side, int depth, gradd_val_t *out) {
    const graph_node_t n = s->g->nodes[node]; /* a copy: the list moves */
    const int rank = graph_type(s->g, n.out[0])->rank;
    const side_t above = strcmp(n.op->name, "MatMul") ? side : IN_OPERAND;
    const gradd_attr_t last = gradd_make_int("axis", -1);
    gradd_val_t in[3];
    bool changed = rank == FIRST_RANK;
    if (rank == FIRST_RANK && !strcmp(n.op->name, "Transpose"))
        return lift_transpose(s, &n, side, depth, out);
    for (int i = 0; i < n.n_in; i++) {
        GRADD_TRY(lift_operand(s, n.in[i], rank, above, depth, &in[i]));
        changed |= in[i] != n.in[i];
    }
    *out = n.out[0];
    if (!changed) return GRADD_OK;
    const bool softmax = !strcmp(n.op->name, "Softmax");
    const match_fused_t again = {
        n.op->name, in, n.n_in, softmax ? &last : n.attrs.v, softmax ? 1 : n.attrs.n, &n};
    return match_emit(s->g, &n, &again, out, 1);
}

/* Whether nothing else needs the node of v as it is. The reader of a transposition absorbs it, so a
 * second one costs nothing. */
static bool is_alone(const lift_t *s, gradd_val_t v) {
    return graph_read_by_products(&s->readers, v) || match_made_by(s->g, v, "Transpose");
}

/* The value in four dimensions: [N, ., .] or [batch, heads, ., .] itself, if nothing above it is of
 * three. */
static gradd_status_t find_lifted(lift_t *s, gradd_val_t v, side_t side, int depth,
                                  gradd_val_t *out) {
    graph_t *g = s->g;
    const bool flat = is_flat(s, v);
    const graph_node_t *n = reshaping(g, v);
    if (n && depth < MATCH_MAX_WALK && (flat ? splits(s, v, n->in[0]) : splits(s, n->in[0], v)))
        return lift(s, n->in[0], side, depth + 1, out);
    const int32_t node = g->values[v]->kind == VALUE_NODE ? g->values[v]->node : -1;
    if (node >= 0) g->origin = g->nodes[node].origin; /* of the views below */
    if (node >= 0 && !n && depth < MATCH_MAX_WALK && is_alone(s, v) &&
        is_lifted(s, &g->nodes[node], side))
        return lift_node(s, node, side, depth, out);
    *out = v;
    return flat ? split(s, v, out) : GRADD_OK;
}

static gradd_status_t lift(lift_t *s, gradd_val_t v, side_t side, int depth, gradd_val_t *out) {
    const bool old = v < s->redirect.n;
    *out = old ? s->lifted[v] : GRADD_NONE;
    if (*out != GRADD_NONE) return GRADD_OK;
    GRADD_TRY(compile_time_spend(1));
    GRADD_TRY(find_lifted(s, v, side, depth, out));
    if (old) s->lifted[v] = *out;
    return GRADD_OK;
}

/* ---- where it begins ------------------------------------------------------------------------- */

/* Whether a product of three dimensions is among what v is made of. */
static bool has_product(const lift_t *s, gradd_val_t v, int depth, int *budget) {
    if (s->g->values[v]->kind != VALUE_NODE || depth > MATCH_MAX_WALK || --*budget < 0)
        return false;
    const graph_node_t *n = &s->g->nodes[s->g->values[v]->node];
    if (!strcmp(n->op->name, "MatMul"))
        return is_flat(s, n->in[0]) && is_flat(s, n->in[1]) && is_lifted(s, n, IN_SCORES);
    if (!reshaping(s->g, v) && !is_lifted(s, n, IN_SCORES)) return false;
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] != GRADD_NONE && has_product(s, n->in[i], depth + 1, budget)) return true;
    return false;
}

/* The softmax under dropout, casts and reshapes. */
static const graph_node_t *softmax_of(const lift_t *s, gradd_val_t v) {
    for (int step = 0; step < MATCH_MAX_WALK && graph_read_by_products(&s->readers, v); step++) {
        const graph_node_t *n = match_made_by(s->g, v, "Softmax");
        if (n) return n;
        if (!(n = reshaping(s->g, v)) && !(n = match_made_by(s->g, v, "Dropout")) &&
            !(n = match_made_by(s->g, v, "Cast")))
            return NULL;
        v = n->in[0];
    }
    return NULL;
}

/* Lifted values belong to one way of splitting N. */
static gradd_status_t set_split(lift_t *s, int64_t batch, int64_t heads) {
    if (batch == s->batch && heads == s->heads) return GRADD_OK;
    s->batch = batch, s->heads = heads;
    for (int v = 0; v < s->redirect.n; v++)
        s->lifted[v] = GRADD_NONE;
    return compile_time_spend(s->redirect.n / 1024);
}

/* Splits N as a value of four dimensions does, if there is one. */
static gradd_status_t choose_split(lift_t *s, const graph_node_t *softmax, const graph_node_t *n) {
    const graph_node_t *shaped =
        reshaping(s->g, match_uncast(s->g, n->in[1], graph_type(s->g, n->in[1])->dtype));
    const gradd_val_t likely[3] = {n->out[0], softmax->out[0],
                                   shaped ? shaped->in[0] : softmax->out[0]};
    const gradd_type_t *y = graph_type(s->g, n->out[0]);
    const int64_t all = y->rank == RANK ? y->dims[0] * y->dims[1] : y->dims[0];
    for (int i = 0; i < 3; i++) {
        const gradd_type_t *t = graph_type(s->g, likely[i]);
        if (t->rank == RANK && t->dims[0] * t->dims[1] == all)
            return set_split(s, t->dims[0], t->dims[1]);
    }
    return set_split(s, 1, all);
}

static gradd_status_t lift_product(lift_t *s, int32_t id) {
    graph_t *g = s->g;
    const graph_node_t n = g->nodes[id];
    const gradd_type_t y = *graph_type(s->g, n.out[0]);
    const graph_node_t *softmax = softmax_of(s, n.in[0]);
    int budget = MOST_NODES;
    gradd_val_t in[2], out;
    if (!softmax || (y.rank != FIRST_RANK && y.rank != RANK)) return GRADD_OK;
    GRADD_TRY(choose_split(s, softmax, &n));
    if (!is_lifted(s, &n, IN_SCORES) || !has_product(s, softmax->in[0], 0, &budget))
        return GRADD_OK;
    GRADD_TRY(compile_time_spend(MOST_NODES - budget));
    GRADD_TRY(lift_operand(s, n.in[0], y.rank, IN_SCORES, 0, &in[0]));
    GRADD_TRY(lift_operand(s, n.in[1], y.rank, IN_OPERAND, 0, &in[1]));
    const match_fused_t again = {"MatMul", in, 2, n.attrs.v, n.attrs.n, NULL};
    GRADD_TRY(match_emit(g, &n, &again, &out, 1));
    if (y.rank == FIRST_RANK) out = gradd_reshape_to(&g->builder, out, y.dims, y.rank);
    if (!g->builder.status && out != n.out[0]) graph_redirect(&s->redirect, n.out[0], out);
    return g->builder.status;
}

/* Operands that are a value reshaped there and back become that value. */
static void drop_detours(graph_t *g) {
    for (int32_t i = 0; i < g->n_nodes; i++)
        for (int k = 0; k < g->nodes[i].n_in; k++) {
            gradd_val_t *v = &g->nodes[i].in[k], x = *v;
            if (x == GRADD_NONE) continue;
            const gradd_type_t type = *graph_type(g, x);
            const graph_node_t *n;
            for (int step = 0; step < MATCH_MAX_WALK && (n = reshaping(g, x)); step++) {
                x = n->in[0];
                if (gradd_type_equal(graph_type(g, x), &type)) *v = x;
            }
        }
}

static gradd_status_t lift_attention(graph_t *g) {
    lift_t s = {.g = g};
    GRADD_TRY(graph_find_readers(g, &s.readers));
    GRADD_TRY(graph_redirect_begin(g, &s.redirect));
    s.lifted = arena_alloc(g->arena, sizeof s.lifted[0] * ((size_t)s.redirect.n + 1));
    if (!s.lifted) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    GRADD_TRY(set_split(&s, 1, 1));
    for (int32_t i = 0, n = g->n_nodes; i < n; i++)
        if (!strcmp(g->nodes[i].op->name, "MatMul")) GRADD_TRY(lift_product(&s, i));
    if (!s.redirect.any) return GRADD_OK;
    GRADD_TRY(graph_redirect_end(g, &s.redirect));
    drop_detours(g);
    return GRADD_OK;
}

const graph_pass_t graph_pass_lift_attention = {
    "lift_attention", 38, true, lift_attention, {"FusedAttention"}};
