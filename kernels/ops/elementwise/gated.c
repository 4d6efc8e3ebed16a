/* GatedActivation: y = f(g) * u, the product in the middle of a gated feed-forward layer.
 *
 * f is swish (with alpha), gelu, gelu_tanh, relu or sigmoid. Either two inputs g, u of one shape,
 * or one input [..., 2N] that holds both as the halves of its last axis, g being half number
 * `gate`; then y is [..., N]. Saved for backward: the inputs. GatedActivationGrad(dy, inputs)
 * writes the gradients of g and u in one pass: dg = dy u f'(g), du = dy f(g), packed as the input
 * was. bf16 and f16 are computed in f32 and rounded once. All of an element is read before any of
 * it is written.
 */
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/half.h"
#include "kernels/describe/dispatch.h"
#include "kernels/math/activate.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

/* Rows of n elements; the pointers are of the first row, the strides in elements. */
typedef struct gated_s {
    const void *g, *u, *dy;
    void *y, *dg, *du;
    int64_t rows, n;
    int64_t stride; /* from row to row of g, u, dg, du; y and dy have n */
    double alpha;
} gated_t;

/* ---- kernels --------------------------------------------------------------------------------- */

#define AS_IS(x) (x)

/* The gradient behind f: that of relu is chosen, as torch does, so that 0 stays 0 beside infinity.
 */
#define TIMES(v, slope)       ((v) * (slope))
#define BEHIND_swish          TIMES
#define BEHIND_gelu           TIMES
#define BEHIND_gelu_tanh      TIMES
#define BEHIND_sigmoid        TIMES
#define BEHIND_relu(v, slope) ((slope) != 0 ? (v) : 0)

#define GATED_BACK(f, R, kind, LOAD, ...)                                                          \
    {                                                                                              \
        _Pragma("omp simd") for (int64_t i = first; i < end; i++) {                                \
            const R d = LOAD(dy[i]), up = LOAD(u[i]);                                              \
            const act_t_##kind a = act_##f##_##kind(LOAD(g[i]), alpha);                            \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }

/* Elements [first, end) of one row, forward and backward; T is stored, R computed. */
#define GATED(f, suffix, T, R, kind, LOAD, STORE)                                                  \
    GRADD_MULTIARCH static void f##_##suffix(const gated_t *p, int64_t row, int64_t first,         \
                                             int64_t end) {                                        \
        const T *g = (const T *)p->g + row * p->stride, *u = (const T *)p->u + row * p->stride;    \
        T *y = (T *)p->y + row * p->n;                                                             \
        const R alpha = (R)p->alpha;                                                               \
        _Pragma("omp simd") for (int64_t i = first; i < end; i++) {                                \
            y[i] = STORE(act_##f##_##kind(LOAD(g[i]), alpha).value * LOAD(u[i]));                  \
        }                                                                                          \
    }                                                                                              \
    GRADD_MULTIARCH static void f##_grad_##suffix(const gated_t *p, int64_t row, int64_t first,    \
                                                  int64_t end) {                                   \
        const T *g = (const T *)p->g + row * p->stride, *u = (const T *)p->u + row * p->stride;    \
        const T *dy = (const T *)p->dy + row * p->n;                                               \
        T *dg = p->dg ? (T *)p->dg + row * p->stride : NULL;                                       \
        T *du = p->du ? (T *)p->du + row * p->stride : NULL;                                       \
        const R alpha = (R)p->alpha;                                                               \
        if (dg && du)                                                                              \
            GATED_BACK(f, R, kind, LOAD, dg[i] = STORE(BEHIND_##f(d * up, a.slope));               \
                       du[i] = STORE(d * a.value);)                                                \
        else if (dg)                                                                               \
            GATED_BACK(f, R, kind, LOAD, dg[i] = STORE(BEHIND_##f(d * up, a.slope));)              \
        else if (du)                                                                               \
            GATED_BACK(f, R, kind, LOAD, (void)up; du[i] = STORE(d * a.value);)                    \
    }
#define GATED_TYPES(f)                                                                             \
    GATED(f, f32, float, float, f32, AS_IS, AS_IS)                                                 \
    GATED(f, f64, double, double, f64, AS_IS, AS_IS)                                               \
    GATED(f, bf16, gradd_bf16_t, float, f32, gradd_bf16_f32, gradd_f32_bf16)                       \
    GATED(f, f16, gradd_f16_t, float, f32, gradd_f16_f32, gradd_f32_f16)
GATED_TYPES(swish)
GATED_TYPES(gelu)
GATED_TYPES(gelu_tanh)
GATED_TYPES(relu)
GATED_TYPES(sigmoid)

typedef void (*gated_fn_t)(const gated_t *p, int64_t row, int64_t first, int64_t end);

/* Plain value and slope, in double. */
static double normal(double x) {
    return 0.5 * erfc(-x * 0.70710678118654752);
}
static double swish_plain(double x, double alpha, double *slope) {
    double s = 1 / (1 + exp(-alpha * x));
    *slope = s + alpha * x * s * (1 - s);
    return x * s;
}
static double gelu_plain(double x, double alpha, double *slope) {
    (void)alpha;
    *slope = normal(x) + x * exp(-x * x / 2) / sqrt(2 * M_PI);
    return x * normal(x);
}
static double gelu_tanh_plain(double x, double alpha, double *slope) {
    double c = sqrt(2 / M_PI), t = tanh(c * (x + 0.044715 * x * x * x));
    (void)alpha;
    *slope = (1 + t) / 2 + x / 2 * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x);
    return x * (1 + t) / 2;
}
static double relu_plain(double x, double alpha, double *slope) {
    (void)alpha;
    *slope = x > 0;
    return x < 0 ? 0 : x;
}
static double sigmoid_plain(double x, double alpha, double *slope) {
    double s = 1 / (1 + exp(-x));
    (void)alpha;
    *slope = s * (1 - s);
    return s;
}

typedef struct activation_s {
    const char *name;
    gated_fn_t f32, f64, bf16, f16, grad_f32, grad_f64, grad_bf16, grad_f16;
    double (*plain)(double x, double alpha, double *slope);
} activation_t;

#define ACTIVATION(f)                                                                              \
    {.name = #f,                                                                                   \
     .f32 = f##_f32,                                                                               \
     .f64 = f##_f64,                                                                               \
     .bf16 = f##_bf16,                                                                             \
     .f16 = f##_f16,                                                                               \
     .grad_f32 = f##_grad_f32,                                                                     \
     .grad_f64 = f##_grad_f64,                                                                     \
     .grad_bf16 = f##_grad_bf16,                                                                   \
     .grad_f16 = f##_grad_f16,                                                                     \
     .plain = f##_plain}
static const activation_t activations[] = {ACTIVATION(swish), ACTIVATION(gelu),
                                           ACTIVATION(gelu_tanh), ACTIVATION(relu),
                                           ACTIVATION(sigmoid)};

static const activation_t *find_activation(gradd_attrs_t attrs) {
    const char *name = gradd_attr_string(attrs, "activation", "");
    for (size_t i = 0; i < sizeof activations / sizeof activations[0]; i++)
        if (!strcmp(activations[i].name, name)) return &activations[i];
    return NULL;
}

/* in: g, u or the packed pair; out (backward): likewise */
static gated_t describe(const gradd_launch_t *r, const gradd_view_t *in, int n_in, bool backward) {
    const gradd_type_t *type = &in[0].type;
    gated_t p = {.rows = 1, .alpha = gradd_attr_float(r->attrs, "alpha", 1)};
    if (n_in == 1) {
        p.stride = type->dims[type->rank - 1];
        p.n = p.stride / 2;
        p.rows = p.stride ? gradd_type_count(type) / p.stride : 0;
    } else {
        p.stride = p.n = gradd_type_count(type);
    }
    size_t half = (size_t)p.n * gradd_dtype_bytes(type->dtype);
    bool second = gradd_attr_int(r->attrs, "gate", 0) == 1; /* g is the second half */
    p.g = n_in == 1 ? (char *)in[0].data + (second ? half : 0) : in[0].data;
    p.u = n_in == 1 ? (char *)in[0].data + (second ? 0 : half) : in[1].data;
    if (!backward) {
        p.y = r->out[0].data;
        return p;
    }
    p.dy = r->in[0].data;
    p.dg = n_in == 1 ? (char *)r->out[0].data + (second ? half : 0) : r->out[0].data;
    p.du = n_in == 1      ? (char *)r->out[0].data + (second ? 0 : half)
           : r->n_out > 1 ? r->out[1].data
                          : NULL;
    return p;
}

#define BLOCK 4096

static gradd_status_t compute_blocks(const gated_t *p, gated_fn_t fn) {
    int64_t blocks = (p->n + BLOCK - 1) / BLOCK, units = p->rows * blocks;
#pragma omp parallel for schedule(static) if (p->rows * p->n >= GRADD_PARALLEL_MIN / 4)
    for (int64_t k = 0; k < units; k++) {
        int64_t first = k % blocks * BLOCK, end = first + BLOCK < p->n ? first + BLOCK : p->n;
        fn(p, k / blocks, first, end);
    }
    return GRADD_OK;
}

static gradd_status_t compute_gated(const gradd_launch_t *r) {
    const activation_t *a = find_activation(r->attrs);
    gradd_dtype_t dtype = r->in[0].type.dtype;
    gated_t p = describe(r, r->in, r->n_in, false);
    return compute_blocks(&p, dtype == GRADD_DT_F32   ? a->f32
                              : dtype == GRADD_DT_F64 ? a->f64
                              : dtype == GRADD_DT_F16 ? a->f16
                                                      : a->bf16);
}

static gradd_status_t compute_gated_grad(const gradd_launch_t *r) {
    const activation_t *a = find_activation(r->attrs);
    gradd_dtype_t dtype = r->in[0].type.dtype;
    gated_t p = describe(r, r->in + 1, r->n_in - 1, true);
    return compute_blocks(&p, dtype == GRADD_DT_F32   ? a->grad_f32
                              : dtype == GRADD_DT_F64 ? a->grad_f64
                              : dtype == GRADD_DT_F16 ? a->grad_f16
                                                      : a->grad_bf16);
}

static gradd_status_t ref_gated(const gradd_launch_t *r) {
    const activation_t *act = find_activation(r->attrs);
    gated_t p = describe(r, r->in, r->n_in, false);
    GRADD_SWITCH_FLOAT(r->in[0].type.dtype, T, {
        for (int64_t row = 0; row < p.rows; row++)
            for (int64_t i = 0; i < p.n; i++) {
                double slope, g = ((const T *)p.g)[row * p.stride + i];
                double y = act->plain(g, p.alpha, &slope) * ((const T *)p.u)[row * p.stride + i];
                ((T *)p.y)[row * p.n + i] = (T)y;
            }
    });
    return GRADD_OK;
}

static gradd_status_t ref_gated_grad(const gradd_launch_t *r) {
    const activation_t *act = find_activation(r->attrs);
    gated_t p = describe(r, r->in + 1, r->n_in - 1, true);
    GRADD_SWITCH_FLOAT(r->in[0].type.dtype, T, {
        for (int64_t row = 0; row < p.rows; row++)
            for (int64_t i = 0; i < p.n; i++) {
                int64_t at = row * p.stride + i;
                double slope, dy = ((const T *)p.dy)[row * p.n + i];
                double value = act->plain(((const T *)p.g)[at], p.alpha, &slope);
                double behind = dy * ((const T *)p.u)[at] * slope;
                if (act->plain == relu_plain && slope == 0) behind = 0;
                if (p.dg) ((T *)p.dg)[at] = (T)behind;
                if (p.du) ((T *)p.du)[at] = (T)(dy * value);
            }
    });
    return GRADD_OK;
}

/* ---- shape rules ----------------------------------------------------------------------------- */

/* Checks g, u or the packed pair and gives the type of y. */
static gradd_status_t check_operands(const gradd_infer_t *c, int first, gradd_type_t *out_y) {
    const gradd_type_t *g = &c->in[first].type;
    if (!find_activation(c->attrs))
        return GRADD_FAIL(GRAPH, "activation \"%s\" is not defined",
                          gradd_attr_string(c->attrs, "activation", ""));
    *out_y = *g;
    if (c->n_in - first == 2) {
        if (!gradd_type_equal(g, &c->in[first + 1].type))
            return GRADD_FAIL(GRAPH, "gate and operand differ in type");
        return GRADD_OK;
    }
    if (g->rank < 1 || g->dims[g->rank - 1] % 2)
        return GRADD_FAIL(GRAPH, "a packed operand needs a last axis of even size");
    out_y->dims[g->rank - 1] /= 2;
    return GRADD_OK;
}

static gradd_status_t infer_gated(gradd_infer_t *c) {
    return check_operands(c, 0, &c->out[0]);
}

static gradd_status_t infer_gated_grad(gradd_infer_t *c) {
    gradd_type_t y;
    GRADD_TRY(check_operands(c, 1, &y));
    if (!gradd_type_equal(&y, &c->in[0].type))
        return GRADD_FAIL(GRAPH, "dy does not have the type of y");
    for (int j = 0; j < c->n_out; j++)
        c->out[j] = c->in[1].type;
    return c->n_out < c->n_in ? GRADD_OK : GRADD_FAIL(GRAPH, "more outputs than operands");
}

/* Two operands that do not broadcast, or both halves of one. */
static bool rowwise_gated(gradd_rowwise_t *r) {
    for (int i = 0; i < r->n_in; i++)
        if (!gradd_rowwise_leads(r, i) || r->lead >= r->in[i].type.rank) return false;
    return true;
}

/* ---- gradient rule --------------------------------------------------------------------------- */

static gradd_status_t grad_gated(gradd_grad_t *g) {
    gradd_val_t in[3] = {g->dout[0], g->in[0], g->n_in > 1 ? g->in[1] : GRADD_NONE}, out[2];
    if (g->b->status) return g->b->status;
    g->b->status = g->b->emit(
        g->b, &(gradd_emit_t){"GatedActivationGrad", in, g->n_in + 1, g->attrs.v, g->attrs.n}, out,
        g->n_in);
    for (int i = 0; i < g->n_in && !g->b->status; i++)
        if (g->need[i]) g->din[i] = out[i];
    return g->b->status;
}

/* ---- expansion ------------------------------------------------------------------------------- */

static gradd_val_t expand_activation(gradd_builder_t *b, gradd_attrs_t attrs, gradd_val_t g) {
    const char *name = gradd_attr_string(attrs, "activation", "");
    gradd_attr_t alpha = gradd_make_float("alpha", gradd_attr_float(attrs, "alpha", 1));
    gradd_attr_t by_tanh = gradd_make_string("approximate", "tanh");
    if (!strcmp(name, "swish")) return gradd_emit_attrs(b, "Swish", &g, 1, &alpha, 1);
    if (!strcmp(name, "gelu")) return GRADD_EMIT(b, "Gelu", g);
    if (!strcmp(name, "gelu_tanh")) return gradd_emit_attrs(b, "Gelu", &g, 1, &by_tanh, 1);
    return GRADD_EMIT(b, strcmp(name, "relu") ? "Sigmoid" : "Relu", g);
}

static gradd_status_t expand_gated(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    const gradd_type_t type = *gradd_val_type(b, x->in[0]);
    gradd_val_t g = x->in[0], u = x->n_in > 1 ? x->in[1] : GRADD_NONE;
    if (x->n_in == 1) {
        const int64_t half = type.dims[type.rank - 1] / 2;
        const bool second = gradd_attr_int(x->attrs, "gate", 0) == 1;
        gradd_val_t halves[2] = {gradd_slice(b, x->in[0], -1, 0, half, 1),
                                 gradd_slice(b, x->in[0], -1, half, 2 * half, 1)};
        g = halves[second], u = halves[!second];
    }
    gradd_val_t f = expand_activation(b, x->attrs, gradd_wide(b, g));
    x->out[0] = gradd_cast(b, GRADD_EMIT(b, "Mul", f, gradd_wide(b, u)), type.dtype);
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

#define ATTRS                                                                                      \
    GRADD_ATTR_LIST({"activation", GRADD_ATTR_STRING, true}, {"alpha", GRADD_ATTR_FLOAT, false},   \
                    {"gate", GRADD_ATTR_INT, false})

GRADD_OPS(
    gated,
    GRADD_OP("GatedActivation", "com.gradd", 1, (1, 2), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT}, .attrs = ATTRS,
             .infer = infer_gated, .rowwise = rowwise_gated, .grad = grad_gated,
             .expand = expand_gated, .ref = GRADD_REF(ref_gated),
             .cases = GRADD_CASES(
                 {.text = "f32[3,5] f32[3,5] | activation=\"swish\""},
                 {.text = "f32[2,3,7]:(-6,6) f32[2,3,7] | activation=\"swish\" alpha=1.702"},
                 {.text = "f32[3,5]:(-6,6) f32[3,5] | activation=\"gelu\""},
                 {.text = "f32[3,5]:(-6,6) f32[3,5] | activation=\"gelu_tanh\""},
                 {.text = "f32[3,5] f32[3,5] | activation=\"relu\""},
                 {.text = "f32[] f32[] | activation=\"sigmoid\""},
                 {.text = "f32[0,4] | activation=\"gelu\""},
                 {.text = "f32[3,10] | activation=\"swish\" gate=0"},
                 {.text = "f32[2,3,6] | activation=\"sigmoid\" gate=1"},
                 {.text = "f32[211,346] | activation=\"gelu\" gate=1"},
                 {.text = "f32[2,9000] | activation=\"gelu_tanh\""},
                 {.text = "f32[211,173] f32[211,173] | activation=\"gelu\""},
                 {.text = "f32[9,176] | activation=\"swish\" gate=1"},
                 {.text = "f32[9,176] | activation=\"relu\""},
                 {.text = "f32[4]={-0.0,inf,-inf,0} f32[4] | activation=\"relu\"", .grad_tol = -1},
                 {.text = "f32[4]={nan,inf,-inf,0} f32[4] | activation=\"swish\"",
                  .grad_tol = -1})),
    GRADD_OP("GatedActivationGrad", "com.gradd", 1, (2, 3), (1, 2),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT}, .attrs = ATTRS, .infer = infer_gated_grad,
             .ref = GRADD_REF(ref_gated_grad),
             .cases = GRADD_CASES(
                 {.text = "f32[3,5] f32[3,5] f32[3,5] | activation=\"swish\" alpha=1.702 -> 2"},
                 {.text = "f32[3,5] f32[3,5]:(-6,6) f32[3,5] | activation=\"gelu\" -> 2"},
                 {.text = "f32[3,5] f32[3,5]:(-6,6) f32[3,5] | activation=\"gelu_tanh\" -> 2"},
                 {.text = "f32[3,5] f32[3,5] f32[3,5] | activation=\"relu\" -> 2"},
                 {.text = "f32[4]={inf,-inf,nan,inf} f32[4]={0,-1,0,2} f32[4] | "
                          "activation=\"relu\" -> 2"},
                 {.text = "f32[3,5] f32[3,10] | activation=\"sigmoid\" gate=1"},
                 {.text = "f32[173,211] f32[173,422] | activation=\"swish\""},
                 {.text = "f32[9,88] f32[9,176] | activation=\"gelu\" gate=1"},
                 {.text = "f32[64,72] f32[64,72] f32[64,72] | activation=\"gelu_tanh\" -> 2"},
                 {.text = "f32[0,2] f32[0,4] | activation=\"swish\""})));

GRADD_KERNELS(cpu, gated,
              GRADD_KERNEL("GatedActivation", "loop", .types = {GRADD_T_ANY}, .inplace = 3,
                           .compute = compute_gated),
              GRADD_KERNEL("GatedActivationGrad", "loop", .rowwise = rowwise_gated,
                           .types = {GRADD_T_ANY}, .inplace = 7, .compute = compute_gated_grad));
