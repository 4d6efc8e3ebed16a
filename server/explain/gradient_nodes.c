/* Nodes that are no operators of ONNX, in operators of ONNX. See gradient_writer.h. */
#include <string.h>

#include "server/explain/gradient_writer.h"

/* ---- dropout --------------------------------------------------------------------------------- */

static bool is_dropout_grad(const graph_node_t *n) {
    return !strcmp(n->op->name, "DropoutGrad");
}

const graph_node_t *gradient_dropout_of(const graph_t *g, const graph_node_t *n) {
    const int64_t random = gradd_attr_int(n->attrs, "node", -1);
    const graph_node_t *found = NULL;
    for (int k = 0; is_dropout_grad(n) && k < g->n_forward; k++) {
        if (strcmp(g->nodes[k].op->name, "Dropout") != 0 || (int64_t)g->nodes[k].random != random)
            continue;
        if (found) return NULL; /* two draw the same numbers, as ONNX's do not */
        found = &g->nodes[k];
    }
    return found;
}

/* The ratio of a dropout that is known to train; false = it is not known. */
static bool known_ratio(const graph_t *g, const graph_node_t *n, double *out) {
    const graph_value_t *ratio = n->in[1] == GRADD_NONE ? NULL : g->values[n->in[1]];
    const uint8_t *trains = n->in[2] == GRADD_NONE ? NULL : g->values[n->in[2]]->data;
    *out = 0.5;
    if (!trains || !*trains || n->n_in > 3) return false;
    if (!ratio) return true;
    if (ratio->data && ratio->type.dtype == GRADD_DT_F32)
        *out = (double)*(const float *)ratio->data;
    if (ratio->data && ratio->type.dtype == GRADD_DT_F64) *out = *(const double *)ratio->data;
    return ratio->data && !gradd_dtype_is_half(ratio->type.dtype);
}

/* dy where the mask kept an element, scaled; 0 elsewhere. */
static gradd_status_t write_dropout_grad(gradient_writer_t *w, const graph_node_t *n,
                                         const char *dy, const char *dx) {
    const graph_t *g = w->g;
    const graph_node_t *forward = gradient_dropout_of(g, n);
    const gradd_dtype_t dtype = graph_type(g, n->in[0])->dtype;
    double p;
    if (!forward || !known_ratio(g, n, &p) || gradd_dtype_is_half(dtype))
        return GRADD_FAIL(UNSUPPORTED,
                          "the gradient of a dropout in %s is written in f32 or f64, of a known "
                          "ratio and mode, and if no other one draws its numbers",
                          gradd_dtype_name(dtype));
    const gradd_type_t scalar = {.dtype = dtype};
    double *scale = arena_alloc(w->arena, 2 * sizeof *scale), *zero = scale + 1;
    const char *names[3];
    for (int i = 0; i < 3; i++)
        names[i] = arena_printf(w->arena, "%s%s_%d", w->prefix, dx, i);
    if (!scale || !names[2]) return GRADD_E_NOMEM;
    *scale = p < 1 ? 1 / (1 - p) : 0;
    if (dtype == GRADD_DT_F32) *(float *)scale = (float)*scale;
    GRADD_TRY(gradient_add_constant(w, names[0], &(gradd_view_t){scalar, scale}));
    GRADD_TRY(gradient_add_constant(w, names[1], &(gradd_view_t){scalar, zero}));
    Onnx__NodeProto *kept = gradient_add_node(w, "Where", 3, 1),
                    *node = gradient_add_node(w, "Mul", 2, 1);
    if (!kept || !node) return GRADD_E_NOMEM;
    kept->input[0] = (char *)w->masks[forward - g->nodes];
    kept->input[1] = (char *)dy;
    kept->input[2] = (char *)names[1];
    kept->output[0] = node->input[0] = (char *)names[2];
    node->input[1] = (char *)names[0];
    node->output[0] = (char *)dx;
    return GRADD_OK;
}

/* ---- functions ------------------------------------------------------------------------------- */

/* Gives its first operand back, but for what it says of gradients or checks. */
static bool gives_back(const graph_node_t *n) {
    static const char *const names[] = {"StraightThrough", "CheckIndex"};
    if (n->op->domain[0] && n->op->flags & GRADD_OP_VIEW) return true;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!strcmp(n->op->name, names[i])) return true;
    return false;
}

/* Functions that ONNX does not have, in its operators. Operands: x, the numbers 0 and 1, and
 * results of earlier lines, a the first of them; the last is the function's. */
typedef struct formula_s {
    const char *op, *operands;
} formula_t;

/* log(u) x / (u - 1) with u = 1 + x: the errors of u cancel. */
static const formula_t log1p_formula[] = {
    {"Add", "x1"},
    {"Sub", "a1"},
    {"Log", "a"},
    {"Div", "xb"},
    {"Mul", "cd"},
    {"Equal", "b0"},
    {"Where", "fxe"},
    {"Greater", "x1"},
    {"Where", "hcg"},
    {0}
};
/* (u - 1) x / log(u) with u = exp(x), likewise. */
static const formula_t expm1_formula[] = {
    {"Exp", "x"},
    {"Sub", "a1"},
    {"Log", "a"},
    {"Div", "xc"},
    {"Mul", "bd"},
    {"Equal", "b0"},
    {"Where", "fxe"},
    {"Abs", "x"},
    {"Greater", "h1"},
    {"Where", "ibg"},
    {0}
};

static const formula_t *formula_of(const graph_node_t *n) {
    if (!strcmp(n->op->name, "Log1p")) return log1p_formula;
    return !strcmp(n->op->name, "Expm1") ? expm1_formula : NULL;
}

/* The name of operand `c` of a line. */
static gradd_status_t formula_operand(gradient_writer_t *w, char c, const char *x, const char *to,
                                      const gradd_type_t *type, const char **out) {
    *out = c == 'x' ? x : arena_printf(w->arena, "%s%s_%c", w->prefix, to, c);
    if (!*out) return GRADD_E_NOMEM;
    if (c != '0' && c != '1') return GRADD_OK;
    for (size_t i = 0; i < w->n_constants; i++)
        if (!strcmp(w->constants[i]->name, *out)) return GRADD_OK;
    return gradient_add_number(w, *out, type, c - '0');
}

static gradd_status_t write_formula(gradient_writer_t *w, const formula_t *step,
                                    const gradd_type_t *type, const char *x, const char *to) {
    const gradd_type_t scalar = {.dtype = type->dtype};
    for (char c = 'a'; step->op; step++, c++) {
        const size_t n = strlen(step->operands);
        Onnx__NodeProto *node = gradient_add_node(w, step->op, n, 1);
        if (!node) return GRADD_E_NOMEM;
        for (size_t i = 0; i < n; i++)
            GRADD_TRY(formula_operand(w, step->operands[i], x, to, &scalar,
                                      (const char **)&node->input[i]));
        node->output[0] = (char *)to;
        if (step[1].op)
            GRADD_TRY(formula_operand(w, c, x, to, &scalar, (const char **)&node->output[0]));
    }
    return GRADD_OK;
}

/* ---- pads below 0 ---------------------------------------------------------------------------- */

static bool cuts(const graph_t *g, const graph_node_t *n) {
    if (strcmp(n->op->name, "Pad") != 0 || n->n_in > 3) return false;
    const graph_value_t *pads = g->values[n->in[1]];
    for (int64_t i = 0; pads->data && i < gradd_type_count(&pads->type); i++)
        if (((const int64_t *)pads->data)[i] < 0) return true;
    return false;
}

static gradd_status_t add_numbers(gradient_writer_t *w, const char *name, const int64_t *v, int n) {
    const gradd_view_t view = {
        {GRADD_DT_I64, 1, {n}},
        (void *)v
    };
    return gradient_add_constant(w, name, &view);
}

/* What is cut off by Slice, the rest by Pad: not every runtime takes a pad below 0. */
static gradd_status_t write_cut(gradient_writer_t *w, const graph_node_t *n, const char *const *in,
                                const char *to) {
    const gradd_type_t *x = graph_type(w->g, n->in[0]);
    const int64_t *pads = w->g->values[n->in[1]]->data;
    const int rank = x->rank;
    int64_t *start = arena_array(w->arena, 4 * GRADD_MAX_RANK, sizeof start[0]);
    const char *names[4];
    for (int i = 0; i < 4; i++)
        if (!(names[i] = arena_printf(w->arena, "%s%s_%d", w->prefix, to, i))) return GRADD_E_NOMEM;
    Onnx__NodeProto *cut = gradient_add_node(w, "Slice", 3, 1);
    Onnx__NodeProto *pad = gradient_add_node(w, "Pad", (size_t)n->n_in, 1);
    if (!start || !cut || !pad) return GRADD_E_NOMEM;
    int64_t *end = start + GRADD_MAX_RANK, *rest = end + GRADD_MAX_RANK;
    for (int i = 0; i < 2 * rank; i++) {
        rest[i] = pads[i] > 0 ? pads[i] : 0;
        if (i < rank)
            start[i] = rest[i] - pads[i];
        else
            end[i - rank] = x->dims[i - rank] + pads[i] - rest[i];
    }
    GRADD_TRY(add_numbers(w, names[0], start, rank));
    GRADD_TRY(add_numbers(w, names[1], end, rank));
    GRADD_TRY(add_numbers(w, names[2], rest, 2 * rank));
    cut->input[0] = (char *)in[0];
    cut->input[1] = (char *)names[0];
    cut->input[2] = (char *)names[1];
    cut->output[0] = pad->input[0] = (char *)names[3];
    pad->input[1] = (char *)names[2];
    if (n->n_in > 2) pad->input[2] = (char *)in[2];
    pad->output[0] = (char *)to;
    return gradient_add_attrs(w, pad, n->attrs);
}

/* ---- all of them ----------------------------------------------------------------------------- */

bool gradient_is_apart(const graph_t *g, const graph_node_t *n) {
    return gives_back(n) || is_dropout_grad(n) || formula_of(n) || cuts(g, n);
}

gradd_status_t gradient_write_apart(gradient_writer_t *w, const graph_node_t *n,
                                    const char *const *in, const char *out) {
    if (gives_back(n)) return gradient_add_identity(w, in[0], out);
    if (is_dropout_grad(n)) return write_dropout_grad(w, n, in[0], out);
    if (formula_of(n))
        return write_formula(w, formula_of(n), graph_type(w->g, n->in[0]), in[0], out);
    return write_cut(w, n, in, out);
}
