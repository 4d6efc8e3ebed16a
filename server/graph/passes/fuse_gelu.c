/* Smooth activations as models write them -> Gelu or Swish.
 *
 * There are many ways to write these functions: powers or products, constants on either side, 1.0
 * or 0.5 pulled out, exact or rounded factors, casts in between. So the pass does not compare
 * shapes of expressions but functions: what hangs together by scalar arithmetic above one node and
 * depends on one value x alone is a function of one variable; it is evaluated in double at fixed
 * points, and a function that agrees with one of ours at all of them is that function. Two
 * different ones of this kind do not come closer than 1e-3 somewhere. The operators compute in one
 * pass and save x alone. */
#include <math.h>
#include <string.h>

#include "kernels/rules/rules.h"
#include "server/graph/compile_time.h"
#include "server/graph/match/match.h"
#include "server/graph/match/match_cast.h"

enum { MAX_NODES = 20, POINTS = 14 };
enum { COST_OF_CURVE = 16 }; /* evaluating one */

static const double points[POINTS] = {-3.7, -2.9, -2.1, -1.3, -0.6, -0.2, 0.1,
                                      0.35, 0.8,  1.1,  1.7,  2.3,  3.1,  3.9};

typedef struct curve_s {
    const graph_t *g;
    gradd_val_t x;
    int32_t nodes[MAX_NODES]; /* the result's first */
    int n;
    double y[MAX_NODES][POINTS];
    bool done[MAX_NODES];
} curve_t;

/* ---- arithmetic on points -------------------------------------------------------------------- */

typedef double (*arithmetic_t)(double a, double b);

static double op_add(double a, double b) {
    return a + b;
}
static double op_sub(double a, double b) {
    return a - b;
}
static double op_mul(double a, double b) {
    return a * b;
}
static double op_div(double a, double b) {
    return a / b;
}
static double op_neg(double a, double b) {
    (void)b;
    return -a;
}
static double op_tanh(double a, double b) {
    (void)b;
    return tanh(a);
}
static double op_erf(double a, double b) {
    (void)b;
    return erf(a);
}
static double op_sigmoid(double a, double b) {
    (void)b;
    return 1 / (1 + exp(-a));
}
static double op_cast(double a, double b) {
    (void)b;
    return a;
}

static const struct {
    const char *op;
    arithmetic_t compute;
} arithmetic[] = {
    {"Mul",     op_mul    },
    {"Add",     op_add    },
    {"Tanh",    op_tanh   },
    {"Sigmoid", op_sigmoid},
    {"Erf",     op_erf    },
    {"Pow",     pow       },
    {"Div",     op_div    },
    {"Sub",     op_sub    },
    {"Neg",     op_neg    },
    {"Cast",    op_cast   },
};

static int arithmetic_of(const graph_node_t *n) {
    for (size_t k = 0; k < sizeof arithmetic / sizeof arithmetic[0]; k++)
        if (!strcmp(arithmetic[k].op, n->op->name)) return n->backward ? -1 : (int)k;
    return -1;
}

/* ---- what hangs together --------------------------------------------------------------------- */

static bool is_float(gradd_dtype_t dtype) {
    return dtype == GRADD_DT_F32 || dtype == GRADD_DT_F64 || gradd_dtype_is_half(dtype);
}

/* The node that makes v, if the pass can compute it for a function in `as`. */
static const graph_node_t *computable(const graph_t *g, gradd_val_t v, gradd_dtype_t as) {
    if (g->values[v]->kind != VALUE_NODE || !is_float(graph_type(g, v)->dtype)) return NULL;
    const graph_node_t *n = &g->nodes[g->values[v]->node];
    if (!strcmp(n->op->name, "Cast") && match_under_cast(g, v, as) == GRADD_NONE) return NULL;
    return arithmetic_of(n) < 0 ? NULL : n;
}

static int position(const curve_t *c, gradd_val_t v) {
    for (int i = 0; i < c->n; i++)
        if (c->g->nodes[c->nodes[i]].out[0] == v) return i;
    return -1;
}

/* Collects the nodes above `root`, nearest first. With x set, fails where anything but x and
 * scalars is read; without it, stops at what it cannot compute or hold. */
static bool collect(curve_t *c, const graph_node_t *root) {
    double scalar;
    const gradd_dtype_t as = graph_type(c->g, root->out[0])->dtype;
    c->nodes[0] = (int32_t)(root - c->g->nodes);
    c->n = 1;
    if (!computable(c->g, root->out[0], as)) return false;
    for (int at = 0; at < c->n; at++) {
        const graph_node_t *n = &c->g->nodes[c->nodes[at]];
        for (int i = 0; i < n->n_in; i++) {
            gradd_val_t v = n->in[i];
            if (v == c->x || match_scalar(c->g, v, &scalar) || position(c, v) >= 0) continue;
            const graph_node_t *maker = computable(c->g, v, as);
            if (maker && c->n < MAX_NODES)
                c->nodes[c->n++] = (int32_t)(maker - c->g->nodes);
            else if (c->x != GRADD_NONE)
                return false;
        }
    }
    return true;
}

/* Operand i of a node at a point; false while it is not computed yet. */
static bool operand(const curve_t *c, const graph_node_t *n, int i, int point, double *out) {
    *out = 0;
    if (i >= n->n_in) return true;
    if (n->in[i] == c->x) {
        *out = points[point];
        return true;
    }
    if (match_scalar(c->g, n->in[i], out)) return true;
    int at = position(c, n->in[i]);
    if (at < 0 || !c->done[at]) return false;
    *out = c->y[at][point];
    return true;
}

static bool compute(curve_t *c, int at) {
    const graph_node_t *n = &c->g->nodes[c->nodes[at]];
    arithmetic_t fn = arithmetic[arithmetic_of(n)].compute;
    for (int p = 0; p < POINTS; p++) {
        double a, b;
        if (!operand(c, n, 0, p, &a) || !operand(c, n, 1, p, &b)) return false;
        c->y[at][p] = fn(a, b);
    }
    return true;
}

/* Evaluates root as a function of x; the values are y[0]. */
static bool evaluate(curve_t *c, const graph_node_t *root, gradd_val_t x) {
    c->x = x;
    memset(c->done, 0, sizeof c->done);
    if (!collect(c, root)) return false;
    for (int round = 0; round < c->n && !c->done[0]; round++)
        for (int at = c->n - 1; at >= 0; at--)
            if (!c->done[at]) c->done[at] = compute(c, at);
    return c->done[0];
}

/* ---- ours ------------------------------------------------------------------------------------ */

static double gelu(double x, double alpha) {
    (void)alpha;
    return x * 0.5 * erfc(-x * 0.70710678118654752);
}
static double gelu_tanh(double x, double alpha) {
    (void)alpha;
    return 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)));
}
static double swish(double x, double alpha) {
    return x / (1 + exp(-alpha * x));
}

/* alpha such that swish goes through the curve at 1.7, or 0 */
static double swish_alpha(const double *y) {
    double share = y[10] / points[10];
    return share > 0.5 && share < 1 ? log(share / (1 - share)) / points[10] : 0;
}

static bool agrees(const double *y, double (*f)(double, double), double alpha, double tolerance) {
    for (int p = 0; p < POINTS; p++)
        if (!(fabs(y[p] - f(points[p], alpha)) <= tolerance)) return false;
    return true;
}

/* Constants of a bf16 model are rounded to 8 bits, those of an f16 model to 11, those of an f32
 * model to f32, others are not. */
static double tolerance_of(const graph_t *g, const graph_node_t *n) {
    gradd_dtype_t dtype = graph_type(g, n->out[0])->dtype;
    if (gradd_dtype_is_half(dtype)) return dtype == GRADD_DT_BF16 ? 6e-3 : 8e-4;
    return dtype == GRADD_DT_F64 ? 1e-13 : 1e-5;
}

/* A factor that was meant as 1 or 1.702 is that. */
static double exact_alpha(double alpha, double tolerance) {
    if (fabs(alpha - 1) < tolerance) return 1;
    return fabs(alpha - 1.702) < tolerance ? 1.702 : alpha;
}

static bool reads(const curve_t *c, const char *op) {
    for (int i = 0; i < c->n; i++)
        if (!strcmp(c->g->nodes[c->nodes[i]].op->name, op)) return true;
    return false;
}

static gradd_status_t replace_if_known(graph_t *g, graph_node_t *n, const curve_t *c,
                                       bool *out_replaced) {
    const double *y = c->y[0], tolerance = tolerance_of(g, n);
    const double alpha = exact_alpha(swish_alpha(y), tolerance);
    gradd_attr_t attr;
    match_fused_t fused = {"Gelu", &c->x, 1, &attr, 1, NULL};
    /* the two forms of Gelu are closer to each other than a half can tell */
    if (reads(c, "Erf") && agrees(y, gelu, 0, tolerance)) {
        attr = gradd_make_string("approximate", "none");
    } else if (alpha && agrees(y, swish, alpha, tolerance)) {
        fused.op = "Swish";
        attr = gradd_make_float("alpha", alpha);
    } else if (agrees(y, gelu_tanh, 0, tolerance)) {
        attr = gradd_make_string("approximate", "tanh");
    } else {
        return GRADD_OK;
    }
    GRADD_TRY(match_replace(g, n, &fused));
    *out_replaced = !strcmp(n->op->name, fused.op);
    return GRADD_OK;
}

static bool has_bend(const curve_t *c) {
    return reads(c, "Tanh") || reads(c, "Sigmoid") || reads(c, "Erf");
}

/* Tries what the nodes around `n` read as x, the nearest first. */
static gradd_status_t try_node(graph_t *g, graph_node_t *n) {
    curve_t around = {.g = g, .x = GRADD_NONE}, c = {.g = g};
    double scalar;
    GRADD_TRY(compile_time_spend(1));
    collect(&around, n);
    if (!has_bend(&around)) return GRADD_OK;
    for (int at = 0; at < around.n; at++) {
        const graph_node_t *reader = &g->nodes[around.nodes[at]];
        for (int i = 0; i < reader->n_in; i++) {
            gradd_val_t x = reader->in[i];
            bool replaced = false;
            if (match_scalar(g, x, &scalar) ||
                !gradd_type_equal(graph_type(g, x), graph_type(g, n->out[0])))
                continue;
            GRADD_TRY(compile_time_spend(COST_OF_CURVE));
            if (evaluate(&c, n, x)) GRADD_TRY(replace_if_known(g, n, &c, &replaced));
            if (replaced) return GRADD_OK;
        }
    }
    return GRADD_OK;
}

static gradd_status_t fuse_gelu(graph_t *g) {
    for (int i = 0; i < g->n_nodes; i++) {
        graph_node_t *n = &g->nodes[i];
        const char *op = n->op->name;
        if (n->backward || !is_float(graph_type(g, n->out[0])->dtype)) continue;
        if (!strcmp(op, "Mul") || !strcmp(op, "Div") || !strcmp(op, "Cast"))
            GRADD_TRY(try_node(g, n));
    }
    return GRADD_OK;
}

const graph_pass_t graph_pass_fuse_gelu = {
    "fuse_gelu", 20, true, fuse_gelu, {"Gelu", "Swish"}
};
