/* Trigonometric, hyperbolic and special functions, elementwise, any shape.
 *
 * Tan, Asin, Acos, Atan, Sinh, Cosh, Asinh, Acosh and Atanh are ONNX's; of our own domain are
 * Atan2, Lgamma, Digamma, Trigamma and Erfinv. All are computed in double and rounded once. Saved
 * for backward: the operand, of Tan and Erfinv the result. Slopes are torch's, computed in f32 for
 * halves. Trigamma is there for the slope of Digamma, and has none.
 */
#include "kernels/math/special.h"
#include "kernels/contract/kernel.h"
#include "kernels/cpu/map.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

#define UNARY(name, E) GRADD_ROWS1_FLOAT(name, E) GRADD_TABLE_FLOAT(name) GRADD_MAP_COMPUTE(name)

UNARY(tan, E_TAN)
UNARY(asin, E_ASIN)
UNARY(acos, E_ACOS)
UNARY(atan, E_ATAN)
UNARY(sinh, E_SINH)
UNARY(cosh, E_COSH)
UNARY(asinh, E_ASINH)
UNARY(acosh, E_ACOSH)
UNARY(atanh, E_ATANH)
UNARY(lgamma, E_LGAMMA)
UNARY(digamma, E_DIGAMMA)
UNARY(trigamma, E_TRIGAMMA)
UNARY(erfinv, E_ERFINV)
GRADD_ROWS2_FLOAT(atan2, E_ATAN2)
GRADD_TABLE_FLOAT(atan2)
GRADD_MAP_COMPUTE(atan2)

/* ---- gradient rules -------------------------------------------------------------------------- */

static gradd_val_t number(gradd_builder_t *b, gradd_val_t like, double value) {
    return gradd_const_scalar(b, gradd_val_type(b, like)->dtype, value);
}

static gradd_val_t square(gradd_builder_t *b, gradd_val_t v) {
    return GRADD_EMIT(b, "Mul", v, v);
}

/* x^2 + c, of a value in the type that is computed in. */
static gradd_val_t square_and(gradd_builder_t *b, gradd_val_t x, double c) {
    return GRADD_EMIT(b, "Add", square(b, x), number(b, x, c));
}

/* Passes on dy * slope, or dy / slope. */
static gradd_status_t pass(gradd_grad_t *g, const char *op, gradd_val_t slope) {
    gradd_builder_t *b = g->b;
    const gradd_dtype_t dtype = gradd_val_type(b, g->in[0])->dtype;
    g->din[0] = gradd_cast(b, GRADD_EMIT(b, op, gradd_wide(b, g->dout[0]), slope), dtype);
    return b->status;
}

static gradd_val_t operand(gradd_grad_t *g) {
    return gradd_wide(g->b, g->in[0]);
}

static gradd_status_t grad_tan(gradd_grad_t *g) {
    return pass(g, "Mul", square_and(g->b, gradd_wide(g->b, g->output(g, 0)), 1));
}

/* dy / sqrt(sign x^2 + c) */
static gradd_status_t by_root(gradd_grad_t *g, bool turned, double c) {
    gradd_builder_t *b = g->b;
    gradd_val_t v = square(b, operand(g));
    v = turned ? GRADD_EMIT(b, "Sub", number(b, v, c), v)
               : GRADD_EMIT(b, "Add", v, number(b, v, c));
    return pass(g, "Div", GRADD_EMIT(b, "Sqrt", v));
}

static gradd_status_t grad_asin(gradd_grad_t *g) {
    return by_root(g, true, 1);
}

static gradd_status_t grad_acos(gradd_grad_t *g) {
    GRADD_TRY(by_root(g, true, 1));
    g->din[0] = GRADD_EMIT(g->b, "Neg", g->din[0]);
    return g->b->status;
}

static gradd_status_t grad_atan(gradd_grad_t *g) {
    return pass(g, "Div", square_and(g->b, operand(g), 1));
}

static gradd_status_t grad_sinh(gradd_grad_t *g) {
    return pass(g, "Mul", GRADD_EMIT(g->b, "Cosh", operand(g)));
}

static gradd_status_t grad_cosh(gradd_grad_t *g) {
    return pass(g, "Mul", GRADD_EMIT(g->b, "Sinh", operand(g)));
}

static gradd_status_t grad_asinh(gradd_grad_t *g) {
    return by_root(g, false, 1);
}

static gradd_status_t grad_acosh(gradd_grad_t *g) {
    return by_root(g, false, -1);
}

static gradd_status_t grad_atanh(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    gradd_val_t v = square(b, operand(g));
    return pass(g, "Div", GRADD_EMIT(b, "Sub", number(b, v, 1), v));
}

static gradd_status_t grad_lgamma(gradd_grad_t *g) {
    return pass(g, "Mul", GRADD_EMIT(g->b, "Digamma", operand(g)));
}

static gradd_status_t grad_digamma(gradd_grad_t *g) {
    return pass(g, "Mul", GRADD_EMIT(g->b, "Trigamma", operand(g)));
}

static gradd_status_t grad_trigamma(gradd_grad_t *g) {
    (void)g;
    return GRADD_FAIL(UNSUPPORTED, "the slope of trigamma is not there");
}

static gradd_status_t grad_erfinv(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    gradd_val_t e = GRADD_EMIT(b, "Exp", square(b, gradd_wide(b, g->output(g, 0))));
    return pass(g, "Mul", GRADD_EMIT(b, "Mul", e, number(b, e, 0.886226925452758014)));
}

static gradd_status_t grad_atan2(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    const gradd_dtype_t dtype = gradd_val_type(b, g->in[0])->dtype;
    gradd_val_t y = operand(g), x = gradd_wide(b, g->in[1]);
    gradd_val_t all = GRADD_EMIT(b, "Add", square(b, y), square(b, x));
    gradd_val_t zero = number(b, all, 0), none = GRADD_EMIT(b, "Equal", all, zero);
    gradd_val_t share = GRADD_EMIT(b, "Div", gradd_wide(b, g->dout[0]), all);
    share = GRADD_EMIT(b, "Where", none, zero, share); /* as torch has it */
    const gradd_val_t slopes[] = {x, GRADD_EMIT(b, "Neg", y)};
    for (int i = 0; i < 2; i++)
        if (g->need[i]) {
            gradd_val_t d = gradd_reduce_to(b, GRADD_EMIT(b, "Mul", share, slopes[i]), g->in[i]);
            g->din[i] = gradd_cast(b, d, dtype);
        }
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

#define FUNCTION(title, domain, since, fn, range)                                                  \
    GRADD_OP(                                                                                      \
        title, domain, since, (1, 1), (1, 1), .types = {GRADD_T_FLOAT}, .infer = gradd_infer_same, \
        .rowwise = gradd_rowwise_map, .grad = grad_##fn, .ref = GRADD_REF(compute_##fn##_ref),     \
        .cases = GRADD_CASES({.text = "f32[3,5]" range}, {.text = "f32[]" range},                  \
                             {.text = "f32[0,2]"}, {.text = "f32[211,173]" range, .grad_tol = -1}, \
                             {.text = "f32[8]={0,-0.0,1,-1,2,-2,0.5,-0.5}", .grad_tol = -1},       \
                             {.text = "f32[5]={inf,-inf,nan,1e-22,80}", .grad_tol = -1}))

GRADD_OPS(special, FUNCTION("Tan", "", 7, tan, ":(-1.4,1.4)"),
          FUNCTION("Asin", "", 7, asin, ":(-0.9,0.9)"),
          FUNCTION("Acos", "", 7, acos, ":(-0.9,0.9)"), FUNCTION("Atan", "", 7, atan, ""),
          FUNCTION("Sinh", "", 9, sinh, ""), FUNCTION("Cosh", "", 9, cosh, ""),
          FUNCTION("Asinh", "", 9, asinh, ""), FUNCTION("Acosh", "", 9, acosh, ":(1.2,5)"),
          FUNCTION("Atanh", "", 9, atanh, ":(-0.9,0.9)"),
          FUNCTION("Lgamma", "com.gradd", 1, lgamma, ":(0.2,9)"),
          FUNCTION("Digamma", "com.gradd", 1, digamma, ":(0.3,9)"),
          GRADD_OP("Trigamma", "com.gradd", 1, (1, 1), (1, 1), .types = {GRADD_T_FLOAT},
                   .infer = gradd_infer_same, .rowwise = gradd_rowwise_map, .grad = grad_trigamma,
                   .ref = GRADD_REF(compute_trigamma_ref),
                   .cases = GRADD_CASES({.text = "f32[3,5]:(0.3,9)", .grad_tol = -1},
                                        {.text = "f32[9]={0.5,-0.5,-3.25,0,-1,inf,nan,1e-3,40}",
                                         .grad_tol = -1})),
          FUNCTION("Erfinv", "com.gradd", 1, erfinv, ":(-0.95,0.95)"),
          GRADD_OP("Atan2", "com.gradd", 1, (2, 2), (1, 1), .types = {GRADD_T_FLOAT},
                   .infer = gradd_infer_broadcast, .rowwise = gradd_rowwise_map, .grad = grad_atan2,
                   .ref = GRADD_REF(compute_atan2_ref),
                   .cases = GRADD_CASES(
                       {.text = "f32[3,4]:(0.2,2) f32[4]:(0.2,2)"},
                       {.text = "f32[] f32[2,3]:(1,2)"},
                       {.text = "f32[211,173] f32[211,173]", .grad_tol = -1},
                       {.text = "f32[6]={0,-0.0,1,inf,nan,-1} f32[6]={-1,-1,0,-inf,1,-0.0}",
                        .grad_tol = -1})));

#define LOOP(title, fn)                                                                            \
    GRADD_KERNEL(title, "loop", .types = {GRADD_T_ANY}, .inplace = 1, .compute = compute_##fn)

GRADD_KERNELS(cpu, special, LOOP("Tan", tan), LOOP("Asin", asin), LOOP("Acos", acos),
              LOOP("Atan", atan), LOOP("Sinh", sinh), LOOP("Cosh", cosh), LOOP("Asinh", asinh),
              LOOP("Acosh", acosh), LOOP("Atanh", atanh), LOOP("Lgamma", lgamma),
              LOOP("Digamma", digamma), LOOP("Trigamma", trigamma), LOOP("Erfinv", erfinv),
              LOOP("Atan2", atan2));
