/* Cast, CastLike: conversion between element types.
 *
 * Math: z = (type)a. A float becomes an integer by truncation, out of range by saturation, NaN
 * becomes 0; anything but 0 becomes true. Integers among themselves keep their low bits. bf16 and
 * f16 are rounded from f32 to nearest, ties to even. The gradient between floats is the cast back;
 * nothing is saved. */
#include "kernels/contract/kernel.h"
#include "kernels/cpu/half.h"
#include "kernels/describe/cost.h"
#include "kernels/describe/dispatch.h"
#include "kernels/math/formulas.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

#include <math.h>

/* ---- kernels -------------------------------------------------------------------------------- */

/* Between floats, and from integers: the conversion of the language. READ and WRITE are the
 * identity but for bf16 and f16, which go through f32. */
#define PLAIN(name, from, to, READ, WRITE)                                                         \
    GRADD_MULTIARCH static void name(const void *in, void *out, int64_t n) {                       \
        const from *x = in;                                                                        \
        to *z = out;                                                                               \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) z[i] = WRITE(READ(x[i]));              \
    }
#define SATURATE(name, from, to, lo, hi, READ)                                                     \
    static void name(const void *in, void *out, int64_t n) {                                       \
        const from *x = in;                                                                        \
        to *z = out;                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const double a = (double)READ(x[i]);                                                   \
            z[i] = E_SATURATE(to, lo, hi);                                                         \
        }                                                                                          \
    }
#define TRUTH(name, from, READ)                                                                    \
    GRADD_MULTIARCH static void name(const void *in, void *out, int64_t n) {                       \
        const from *x = in;                                                                        \
        uint8_t *z = out;                                                                          \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                      \
            const __typeof__(READ(x[i])) a = READ(x[i]);                                           \
            z[i] = E_TRUTH(v);                                                                     \
        }                                                                                          \
    }
#define TO_BF16(a) gradd_f32_bf16((float)(a))
#define TO_F16(a)  gradd_f32_f16((float)(a))

#define FROM_FLOAT(code, to, lo, hi, tag, from, READ)                                              \
    SATURATE(cast_##tag##_##code, from, to, lo, hi, READ)
#define FROM_ANY(code, to, lo, hi, tag, from, READ) PLAIN(cast_##tag##_##code, from, to, READ, (to))

/* bool is apart, its value is a truth. */
#define FLOAT_TYPES(X, ...)                                                                        \
    X(F32, float, 0, 0, __VA_ARGS__)                                                               \
    X(F64, double, 0, 0, __VA_ARGS__)

#define ALL_FROM_FLOAT(tag, from, READ)                                                            \
    FLOAT_TYPES(FROM_ANY, tag, from, READ)                                                         \
    GRADD_INT_TYPES(FROM_FLOAT, tag, from, READ)                                                   \
    TRUTH(cast_##tag##_BOOL, from, READ)                                                           \
    PLAIN(cast_##tag##_BF16, from, gradd_bf16_t, READ, TO_BF16)                                    \
    PLAIN(cast_##tag##_F16, from, gradd_f16_t, READ, TO_F16)
#define ALL_FROM_INT(tag, from)                                                                    \
    FLOAT_TYPES(FROM_ANY, tag, from, )                                                             \
    GRADD_INT_TYPES(FROM_ANY, tag, from, )                                                         \
    TRUTH(cast_##tag##_BOOL, from, )                                                               \
    PLAIN(cast_##tag##_BF16, from, gradd_bf16_t, , TO_BF16)                                        \
    PLAIN(cast_##tag##_F16, from, gradd_f16_t, , TO_F16)

ALL_FROM_FLOAT(F32, float, )
ALL_FROM_FLOAT(F64, double, )
ALL_FROM_FLOAT(BF16, gradd_bf16_t, gradd_bf16_f32)
ALL_FROM_FLOAT(F16, gradd_f16_t, gradd_f16_f32)
ALL_FROM_INT(I8, int8_t)
ALL_FROM_INT(U8, uint8_t)
ALL_FROM_INT(I16, int16_t)
ALL_FROM_INT(U16, uint16_t)
ALL_FROM_INT(I32, int32_t)
ALL_FROM_INT(I64, int64_t)
ALL_FROM_INT(BOOL, uint8_t)

typedef void (*cast_fn)(const void *in, void *out, int64_t n);

#define CELL(tag, code) [GRADD_DT_##tag][GRADD_DT_##code] = cast_##tag##_##code
#define LINE(tag)                                                                                  \
    CELL(tag, F32), CELL(tag, F64), CELL(tag, BF16), CELL(tag, F16), CELL(tag, I8), CELL(tag, U8), \
        CELL(tag, I16), CELL(tag, U16), CELL(tag, I32), CELL(tag, I64), CELL(tag, BOOL)
static const cast_fn casts[GRADD_DT_END][GRADD_DT_END] = {
    LINE(F32), LINE(F64), LINE(BF16), LINE(F16), LINE(I8),  LINE(U8),
    LINE(I16), LINE(U16), LINE(I32),  LINE(I64), LINE(BOOL)};

static gradd_status_t compute_cast(const gradd_launch_t *r) {
    gradd_dtype_t from = r->in[0].type.dtype, to = r->out[0].type.dtype;
    cast_fn fn = casts[from][to];
    if (from == to) return gradd_compute_copy(r);
    if (!fn)
        return GRADD_FAIL(UNSUPPORTED, "cast from %s to %s", gradd_dtype_name(from),
                          gradd_dtype_name(to));
    const char *in = r->in[0].data;
    char *out = r->out[0].data;
    const int64_t n = gradd_type_count(&r->in[0].type), block = 8192;
    const int64_t size_in = (int64_t)gradd_dtype_bytes(from);
    const int64_t size_out = (int64_t)gradd_dtype_bytes(to);
#pragma omp parallel for schedule(static) if (n >= GRADD_PARALLEL_MIN)
    for (int64_t i = 0; i < n; i += block)
        fn(in + i * size_in, out + i * size_out, n - i < block ? n - i : block);
    return GRADD_OK;
}

/* ---- shape rules ---------------------------------------------------------------------------- */

static gradd_status_t infer_to(gradd_infer_t *c, int64_t code) {
    c->out[0] = c->in[0].type;
    GRADD_TRY(gradd_dtype_check(code, &c->out[0].dtype));
    if (!casts[c->in[0].type.dtype][c->out[0].dtype])
        return GRADD_FAIL(UNSUPPORTED, "cast from %s to %s", gradd_dtype_name(c->in[0].type.dtype),
                          gradd_dtype_name(c->out[0].dtype));
    return GRADD_OK;
}

static gradd_status_t infer_cast(gradd_infer_t *c) {
    return infer_to(c, gradd_attr_int(c->attrs, "to", 0));
}

static gradd_status_t infer_cast_like(gradd_infer_t *c) {
    return infer_to(c, (int64_t)c->in[1].type.dtype);
}

/* ---- gradient rules ------------------------------------------------------------------------- */

static gradd_status_t grad_cast(gradd_grad_t *g) {
    gradd_dtype_t dtype = gradd_val_type(g->b, g->in[0])->dtype;
    if (!g->need[0] || g->dout[0] == GRADD_NONE) return GRADD_OK;
    if (!gradd_dtype_is_float(dtype)) return GRADD_OK;
    if (!gradd_dtype_is_float(gradd_val_type(g->b, g->dout[0])->dtype)) return GRADD_OK;
    gradd_attr_t to = gradd_make_int("to", dtype);
    g->din[0] = gradd_emit_attrs(g->b, "Cast", &g->dout[0], 1, &to, 1);
    return g->b->status;
}

/* ---- cases and rows ------------------------------------------------------------------------- */

#define CAST_MASK (GRADD_T_ALL | GRADD_DTB(I8) | GRADD_DTB(U8) | GRADD_DTB(I16) | GRADD_DTB(U16))

GRADD_OPS(
    cast,
    GRADD_OP("Cast", "", 9, (1, 1), (1, 1), .flags = GRADD_OP_CHEAP, .types = {CAST_MASK},
             .attrs = GRADD_ATTR_LIST({"to", GRADD_ATTR_INT, true},
                                      {"saturate", GRADD_ATTR_INT, false},
                                      {"round_mode", GRADD_ATTR_STRING, false}),
             .infer = infer_cast, .rowwise = gradd_rowwise_map, .grad = grad_cast,
             .ref = GRADD_REF(compute_cast),
             .cases = GRADD_CASES(
                 {.text = "f32[2,3] | to=11"}, {.text = "f32[2,3] | to=1"},
                 {.text = "f32[7]={-1.7,1.7,0,0.3,3e9,-3e9,nan} | to=6"},
                 {.text = "f32[4]={-1.7,1.7,1e30,-1e30} | to=7"},
                 {.text = "f32[4]={0,-0.0,0.2,nan} | to=9"}, {.text = "bool[5] | to=1"},
                 {.text = "bool[5] | to=7"}, {.text = "i64[5]:(-3,3) | to=1"},
                 {.text = "i64[5]:(-3,3) | to=11"}, {.text = "i64[5]:(-3,3) | to=6"},
                 {.text = "i64[5]:(-1,1) | to=9"}, {.text = "i32[5]:(-3,3) | to=7"},
                 {.text = "i64[] | to=1"}, {.text = "f32[0,2] | to=7"},
                 {.text = "i32[3]={1,-2,300} | to=3"}, {.text = "u8[3]={1,2,200} | to=1"},
                 {.text = "i64[211,173] | to=1"}, {.text = "f32[2,3] | to=16", .grad_tol = -1},
                 {.text = "bf16[2,3] | to=1"}, {.text = "bf16[211,173] | to=11"},
                 {.text = "bf16[5] | to=7"}, {.text = "i32[5]:(-3,3) | to=16"},
                 {.text = "bf16[3]={0,-0.0,2} | to=9"},
                 {.text = "f32[5]={-1.7,300,-300,nan,inf} | to=2"},
                 {.text = "f32[5]={-1.7,300,-300,nan,-inf} | to=3"},
                 {.text = "f32[5]={3.4e38,-inf,nan,1e-40,65520} | to=16", .grad_tol = -1},
                 {.text = "u8[67]:(0,255) | to=3"}, {.text = "u8[67]:(0,2) | to=9"},
                 {.text = "i8[67]:(-128,127) | to=2"}, {.text = "i8[67]:(-128,127) | to=7"},
                 {.text = "i8[67]:(-128,127) | to=16"}, {.text = "i64[67]:(-300,300) | to=2"},
                 {.text = "bool[67] | to=16"}, {.text = "bool[67] | to=2"},
                 {.text = "f64[67] | to=16", .grad_tol = -1},
                 {.text = "bf16[67]:(-300,300) | to=3"}, {.text = "u8[40] | to=2"},
                 {.text = "f32[2,3] | to=10", .grad_tol = -1}, {.text = "f16[2,3] | to=1"},
                 {.text = "f16[211,173] | to=11"}, {.text = "f16[5] | to=7"},
                 {.text = "i32[5]:(-3,3) | to=10"}, {.text = "f16[3]={0,-0.0,2} | to=9"},
                 {.text = "f32[7]={65519,65520,-inf,nan,6e-8,2e-8,1e-5} | to=10", .grad_tol = -1},
                 {.text = "i64[3]={70000,-70000,2049} | to=10"},
                 {.text = "f64[67] | to=10", .grad_tol = -1}, {.text = "bool[67] | to=10"},
                 {.text = "f16[67] | to=16", .grad_tol = -1},
                 {.text = "bf16[4]={1e5,-1e-6,1,nan} | to=10", .grad_tol = -1},
                 {.text = "f16[67]:(-300,300) | to=3"}, {.text = "i16[67]:(-32768,32767) | to=1"},
                 {.text = "u16[67]:(0,65535) | to=7"}, {.text = "u16[67]:(0,2) | to=9"},
                 {.text = "i64[67]:(-70000,70000) | to=5"},
                 {.text = "f32[5]={-1.7,70000,-70000,nan,inf} | to=4"},
                 {.text = "bf16[5]={-1.7,70000,-70000,nan,-inf} | to=5"},
                 {.text = "u16[3]={1,40000,65535} | to=3"}, {.text = "i8[67]:(-128,127) | to=4"},
                 {.text = "i16[67] | to=16"})),
    GRADD_OP("CastLike", "", 15, (2, 2), (1, 1), .flags = GRADD_OP_CHEAP, .no_diff = 2,
             .types = {CAST_MASK},
             .attrs = GRADD_ATTR_LIST({"saturate", GRADD_ATTR_INT, false},
                                      {"round_mode", GRADD_ATTR_STRING, false}),
             .infer = infer_cast_like, .grad = grad_cast, .ref = GRADD_REF(compute_cast),
             .cases = GRADD_CASES({.text = "f32[2,3] f64[1]"}, {.text = "i64[3] f32[]"},
                                  {.text = "f32[3] bool[]"}, {.text = "f32[3] f32[2]"})));

GRADD_KERNELS(cpu, cast,
              GRADD_KERNEL("Cast", "loop", .types = {GRADD_T_ANY}, .compute = compute_cast,
                           .cost = gradd_cost_move),
              GRADD_KERNEL("CastLike", "loop", .types = {GRADD_T_ANY}, .compute = compute_cast,
                           .cost = gradd_cost_move));
