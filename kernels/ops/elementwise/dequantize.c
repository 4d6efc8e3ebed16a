/* DequantizeLinear: floats of integers, with a scale and a zero point for all of them, for each
 * position on an axis, or for each block along it.
 *
 * Math: y = (x - zero) scale, in the type of the scale (f32 where that is bf16 or f16). The
 * gradient of a scale is the sum of dy (x - zero) over the elements that it scales; x and zero have
 * none.
 *
 * QuantizeLinear: round(x / scale) + zero, halves to even, within the range of the integers. It is
 * written out. Its result has no gradient, being integers, but what a DequantizeLinear makes of it
 * does (graph_add_node): dx = dy where x is in range (Bengio et al., 2013, arXiv:1308.3432), and
 * the scale has that of Esser et al., 2020, arXiv:1902.08153, without its factor.
 *
 * Frozen weights stay integers: the result is never a folded constant, it is made directly before
 * its reader, and the backward makes it again (GRADD_OP_UNPACKS). */
#include "kernels/describe/dequantize.h"
#include "kernels/contract/kernel.h"
#include "kernels/describe/dispatch.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

#include <stdlib.h>

enum { X = GRADD_DEQUANTIZE_X, SCALES = GRADD_DEQUANTIZE_SCALES, ZEROS = GRADD_DEQUANTIZE_ZEROS };

#define BLOCK 8192 /* elements that a thread takes at a time */

/* ---- kernels -------------------------------------------------------------------------------- */

static bool has_zero(int n_in, const gradd_view_t *in) {
    return n_in > ZEROS && in[ZEROS].type.dtype != GRADD_DT_NONE;
}

/* n elements with one scale (step 0) or one each (step 1). zero may be NULL. */
typedef void (*run_fn)(int64_t n, void *y, const void *x, const void *scale, const void *zero,
                       int64_t step);

#define RUN(name, T, R)                                                                            \
    GRADD_MULTIARCH static void name(int64_t n, void *y, const void *x, const void *scale,         \
                                     const void *zero, int64_t step) {                             \
        R *to = y;                                                                                 \
        const T *from = x, *z = zero;                                                              \
        const R *s = scale;                                                                        \
        const R s0 = *s, z0 = z ? (R) * z : 0;                                                     \
        if (!step)                                                                                 \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) to[i] = ((R)from[i] - z0) * s0;    \
        else if (z)                                                                                \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) to[i] =                            \
                ((R)from[i] - (R)z[i]) * s[i];                                                     \
        else                                                                                       \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) to[i] = (R)from[i] * s[i];         \
    }
#define RUNS(tag, T)                                                                               \
    RUN(run_##tag##_f32, T, float)                                                                 \
    RUN(run_##tag##_f64, T, double)
RUNS(i8, int8_t)
RUNS(u8, uint8_t)
RUNS(i32, int32_t)

static run_fn run_for(gradd_dtype_t x, gradd_dtype_t scale) {
    const bool wide = gradd_dtype_is_f64(scale);
    switch ((int)x) {
    case GRADD_DT_I8:
        return wide ? run_i8_f64 : run_i8_f32;
    case GRADD_DT_U8:
        return wide ? run_u8_f64 : run_u8_f32;
    default:
        return wide ? run_i32_f64 : run_i32_f32;
    }
}

/* How many elements from p on have one scale (*step is 0) or the next scale each. */
static int64_t length_of(const gradd_scales_t *s, int64_t p, int64_t *step) {
    const int64_t a = p / s->inner % s->axis, left = s->axis - a,
                  in_block = s->block - a % s->block;
    if (s->inner > 1) {
        *step = s->inner_step;
        return s->inner - p % s->inner;
    }
    *step = s->block == 1 ? s->axis_step : 0;
    return s->block == 1 || left < in_block ? left : in_block;
}

typedef struct unpack_s {
    gradd_scales_t scales;
    run_fn run;
    char *y;
    const char *x, *scale, *zero;
    size_t y_bytes, x_bytes; /* of an element */
} unpack_t;

static void from_to(const unpack_t *j, int64_t p, int64_t end) {
    while (p < end) {
        int64_t step, n = length_of(&j->scales, p, &step);
        const size_t k = (size_t)gradd_scale_of(&j->scales, p), at = (size_t)p;
        if (n > end - p) n = end - p;
        j->run(n, j->y + at * j->y_bytes, j->x + at * j->x_bytes, j->scale + k * j->y_bytes,
               j->zero ? j->zero + k * j->x_bytes : NULL, step);
        p += n;
    }
}

static gradd_status_t scales_of(const gradd_launch_t *r, gradd_scales_t *out) {
    const gradd_infer_t c = {.op = r->op, .attrs = r->attrs, .n_in = r->n_in, .in = r->in};
    return gradd_scales_find(&c, out);
}

static gradd_status_t compute_dequantize(const gradd_launch_t *r) {
    unpack_t j = {.run = run_for(r->in[X].type.dtype, r->in[SCALES].type.dtype)};
    const int64_t n = gradd_type_count(&r->in[X].type);
    GRADD_TRY(scales_of(r, &j.scales));
    j.y = r->out[0].data;
    j.x = r->in[X].data;
    j.scale = r->in[SCALES].data;
    j.zero = has_zero(r->n_in, r->in) ? r->in[ZEROS].data : NULL;
    j.y_bytes = gradd_dtype_bytes(r->out[0].type.dtype);
    j.x_bytes = gradd_dtype_bytes(r->in[X].type.dtype);
#pragma omp parallel for schedule(static) if (n >= GRADD_PARALLEL_MIN)
    for (int64_t i = 0; i < n; i += BLOCK)
        from_to(&j, i, n - i < BLOCK ? n : i + BLOCK);
    return GRADD_OK;
}

static double integer_at(const gradd_view_t *v, int64_t i) {
    switch ((int)v->type.dtype) {
    case GRADD_DT_I8:
        return ((const int8_t *)v->data)[i];
    case GRADD_DT_U8:
        return ((const uint8_t *)v->data)[i];
    default:
        return ((const int32_t *)v->data)[i];
    }
}

static gradd_status_t compute_dequantize_ref(const gradd_launch_t *r) {
    gradd_scales_t scales;
    GRADD_TRY(scales_of(r, &scales));
    GRADD_SWITCH_FLOAT(r->out[0].type.dtype, T, {
        for (int64_t i = 0, n = gradd_type_count(&r->out[0].type); i < n; i++) {
            const int64_t k = gradd_scale_of(&scales, i);
            const double zero = has_zero(r->n_in, r->in) ? integer_at(&r->in[ZEROS], k) : 0;
            ((T *)r->out[0].data)[i] =
                (T)((integer_at(&r->in[X], i) - zero) * (double)((const T *)r->in[SCALES].data)[k]);
        }
    });
    return GRADD_OK;
}

/* ---- rules ---------------------------------------------------------------------------------- */

static gradd_status_t infer_dequantize(gradd_infer_t *c) {
    gradd_scales_t scales;
    const gradd_dtype_t scale = c->in[SCALES].type.dtype;
    const int64_t wanted = gradd_attr_int(c->attrs, "output_dtype", 0);
    if (wanted && wanted != (int64_t)scale)
        return GRADD_FAIL(UNSUPPORTED, "output_dtype %lld differs from x_scale's type, %s",
                          (long long)wanted, gradd_dtype_name(scale));
    GRADD_TRY(gradd_scales_find(c, &scales));
    c->out[0] = c->in[X].type;
    c->out[0].dtype = scale;
    return GRADD_OK;
}

/* What the rules below read of a node. */
typedef struct parts_s {
    gradd_builder_t *b;
    gradd_type_t x, scale; /* types */
    int axis;
    int64_t block; /* 0 = none */
    bool whole;    /* one scale for all */
} parts_t;

static parts_t parts_of(gradd_builder_t *b, gradd_attrs_t attrs, const gradd_val_t *in) {
    parts_t p = {.b = b, .x = *gradd_val_type(b, in[X]), .scale = *gradd_val_type(b, in[SCALES])};
    p.block = gradd_attr_int(attrs, GRADD_DEQUANTIZE_BLOCK, 0);
    p.whole = !p.block && p.scale.rank < 2 && gradd_type_count(&p.scale) == 1;
    p.axis = (int)gradd_attr_int(attrs, GRADD_DEQUANTIZE_AXIS, 1);
    if (p.axis < 0) p.axis += p.x.rank;
    return p;
}

/* Per position on the axis, the number of its block. */
static gradd_val_t blocks_of(const parts_t *p) {
    const gradd_type_t type = {.dtype = GRADD_DT_I64, .rank = 1, .dims = {p->x.dims[p->axis]}};
    int64_t *numbers = malloc(sizeof *numbers * ((size_t)type.dims[0] + 1));
    if (!numbers && !p->b->status)
        p->b->status = GRADD_FAIL(NOMEM, "no memory for the numbers of blocks");
    for (int64_t i = 0; numbers && i < type.dims[0]; i++)
        numbers[i] = i / p->block;
    const gradd_val_t v = numbers ? p->b->constant(p->b, &type, numbers) : GRADD_NONE;
    free(numbers);
    return v;
}

/* Scales or zero points, so that they broadcast over x. */
static gradd_val_t spread(const parts_t *p, gradd_val_t v) {
    const gradd_attr_t axis = gradd_make_int("axis", p->axis);
    int64_t dims[GRADD_MAX_RANK] = {0};
    if (p->block)
        return gradd_emit_attrs(p->b, "Gather", (gradd_val_t[]){v, blocks_of(p)}, 2, &axis, 1);
    if (p->whole) return gradd_reshape_to(p->b, v, dims, 0);
    for (int i = 0; i < p->x.rank; i++)
        dims[i] = i == p->axis ? p->x.dims[i] : 1;
    return gradd_reshape_to(p->b, v, dims, p->x.rank);
}

/* x - zero, in a float type. */
static gradd_val_t centred(const parts_t *p, const gradd_val_t *in, int n_in, gradd_dtype_t dtype) {
    const gradd_val_t x = gradd_cast(p->b, in[X], dtype);
    if (n_in <= ZEROS || in[ZEROS] == GRADD_NONE) return x;
    return GRADD_EMIT(p->b, "Sub", x, spread(p, gradd_cast(p->b, in[ZEROS], dtype)));
}

static gradd_status_t expand_dequantize(gradd_expand_t *e) {
    const parts_t p = parts_of(e->b, e->attrs, e->in);
    const gradd_val_t scale = gradd_wide(e->b, e->in[SCALES]);
    if (scale == GRADD_NONE) return e->b->status;
    const gradd_val_t x = centred(&p, e->in, e->n_in, gradd_val_type(e->b, scale)->dtype);
    e->out[0] = gradd_cast(e->b, GRADD_EMIT(e->b, "Mul", x, spread(&p, scale)), p.scale.dtype);
    return e->b->status;
}

static gradd_status_t grad_dequantize(gradd_grad_t *g) {
    if (!g->need[SCALES]) return GRADD_OK;
    gradd_builder_t *b = g->b;
    const parts_t p = parts_of(b, g->attrs, g->in);
    const gradd_val_t dy = gradd_wide(b, g->dout[0]);
    if (dy == GRADD_NONE) return b->status;
    const gradd_dtype_t dtype = gradd_val_type(b, dy)->dtype;
    gradd_val_t sum = GRADD_EMIT(b, "Mul", dy, centred(&p, g->in, g->n_in, dtype));
    if (p.block) {
        const gradd_attr_t attrs[] = {gradd_make_ints("dims", p.scale.dims, (size_t)p.scale.rank),
                                      gradd_make_int("axis", p.axis)};
        sum = gradd_emit_attrs(b, "GatherGrad", (gradd_val_t[]){sum, blocks_of(&p)}, 2, attrs, 2);
    } else {
        sum = gradd_reduce_to(b, sum, spread(&p, g->in[SCALES]));
        sum = gradd_reshape_as(b, sum, g->in[SCALES]);
    }
    g->din[SCALES] = gradd_cast(b, sum, p.scale.dtype);
    return b->status;
}

/* ---- QuantizeLinear -------------------------------------------------------------------------- */

static gradd_dtype_t quantised_type(gradd_attrs_t attrs, gradd_dtype_t zero) {
    const int64_t wanted = gradd_attr_int(attrs, "output_dtype", 0);
    return wanted ? (gradd_dtype_t)wanted : zero ? zero : GRADD_DT_U8;
}

static gradd_status_t infer_quantize(gradd_infer_t *c) {
    gradd_scales_t scales;
    gradd_view_t in[3] = {c->in[X], c->in[SCALES]};
    const gradd_dtype_t zero = c->n_in > ZEROS ? c->in[ZEROS].type.dtype : GRADD_DT_NONE;
    const gradd_dtype_t dtype = quantised_type(c->attrs, zero);
    if (dtype != GRADD_DT_I8 && dtype != GRADD_DT_U8)
        return GRADD_FAIL(UNSUPPORTED, "output_dtype %d: i8 (3) and u8 (2) are supported",
                          (int)dtype);
    in[X].type.dtype = dtype;
    if (c->n_in > ZEROS) in[ZEROS] = c->in[ZEROS];
    const gradd_infer_t as_integers = {.op = c->op, .attrs = c->attrs, .n_in = c->n_in, .in = in};
    GRADD_TRY(gradd_scales_find(&as_integers, &scales));
    c->out[0] = in[X].type;
    return GRADD_OK;
}

/* The integers as floats, which are what the derivative goes through: x / scale + zero, clipped,
 * where they are in range. */
static gradd_status_t expand_quantize(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const bool zeros = e->n_in > ZEROS && e->in[ZEROS] != GRADD_NONE;
    const parts_t p = parts_of(b, e->attrs, e->in);
    const gradd_val_t x = gradd_wide(b, e->in[X]), scale = gradd_wide(b, e->in[SCALES]);
    if (x == GRADD_NONE || scale == GRADD_NONE) return b->status;
    const gradd_dtype_t dtype = gradd_val_type(b, x)->dtype;
    const gradd_dtype_t to =
        quantised_type(e->attrs, zeros ? gradd_val_type(b, e->in[ZEROS])->dtype : GRADD_DT_NONE);
    const double low = to == GRADD_DT_I8 ? -128 : 0, high = low + 255;
    gradd_val_t exact = GRADD_EMIT(b, "Div", x, spread(&p, gradd_cast(b, scale, dtype)));
    gradd_val_t whole = GRADD_EMIT(b, "Round", exact);
    if (zeros) {
        const gradd_val_t zero = spread(&p, gradd_cast(b, e->in[ZEROS], dtype));
        exact = GRADD_EMIT(b, "Add", exact, zero);
        whole = GRADD_EMIT(b, "Add", whole, zero);
    }
    exact = GRADD_EMIT(b, "Clip", exact, gradd_const_scalar(b, dtype, low - 0.5),
                       gradd_const_scalar(b, dtype, high + 0.5));
    whole = GRADD_EMIT(b, "Clip", whole, gradd_const_scalar(b, dtype, low),
                       gradd_const_scalar(b, dtype, high));
    e->out[0] = gradd_cast(b, GRADD_EMIT(b, "StraightThrough", whole, exact), to);
    return b->status;
}

/* ---- cases and rows ------------------------------------------------------------------------- */

#define QUANTISED (GRADD_DTB(I8) | GRADD_DTB(U8) | GRADD_DTB(I32))

GRADD_OPS(
    dequantize,
    GRADD_OP(
        "QuantizeLinear", "", 10, (2, 3), (1, 1),
        .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_DTB(I8) | GRADD_DTB(U8)},
        .attrs = GRADD_ATTR_LIST({GRADD_DEQUANTIZE_AXIS, GRADD_ATTR_INT, false},
                                 {GRADD_DEQUANTIZE_BLOCK, GRADD_ATTR_INT, false},
                                 {"output_dtype", GRADD_ATTR_INT, false},
                                 {"precision", GRADD_ATTR_INT, false},
                                 {"saturate", GRADD_ATTR_INT, false}),
        .infer = infer_quantize, .expand = expand_quantize,
        .cases = GRADD_CASES({.text = "f32[3,5]:(-9,9) f32[]:(0.01,0.1)"},
                             {.text = "f32[4,3]:(-9,9) f32[3]:(0.01,0.1) i8[3]:(-9,9)"},
                             {.text = "f32[4,3]:(-9,9) f32[4]:(0.01,0.1) u8[4] | axis=0"},
                             {.text = "f32[6]={-inf,inf,0.5,1.5,-0.5,-1.5} f32[]={1} i8[]={0}"},
                             {.text = "f32[2,6] f32[2,3]:(0.01,0.1) i8[2,3] | block_size=2"},
                             {.text = "f32[3] f32[]:(0.01,0.1) | output_dtype=3"},
                             {.text = "f32[0,4] f32[4]:(0.01,0.1) u8[4]"})),
    GRADD_OP("DequantizeLinear", "", 10, (2, 3), (1, 1), .flags = GRADD_OP_CHEAP | GRADD_OP_UNPACKS,
             .types = {QUANTISED, GRADD_T_FLOAT, QUANTISED},
             .attrs = GRADD_ATTR_LIST({GRADD_DEQUANTIZE_AXIS, GRADD_ATTR_INT, false},
                                      {GRADD_DEQUANTIZE_BLOCK, GRADD_ATTR_INT, false},
                                      {"output_dtype", GRADD_ATTR_INT, false}),
             .infer = infer_dequantize, .grad = grad_dequantize,
             .expand = GRADD_EXPANSION(expand_dequantize), .ref = GRADD_REF(compute_dequantize_ref),
             .cases = GRADD_CASES(
                 {.text = "i8[3,5]:(-128,127) f32[]:(0.01,0.1)"},
                 {.text = "i8[4]={-128,-1,0,127} f32[] i8[]={127}"},
                 {.text = "u8[4]={0,1,128,255} f32[1] u8[]={255}"},
                 {.text = "u8[3,4]:(0,255) f32[4]:(0.01,0.1) u8[4]:(0,255)"},
                 {.text = "i8[3,4,5]:(-128,127) f32[3]:(0.01,0.1) i8[3]:(-9,9) | axis=0"},
                 {.text = "i8[3,4,5]:(-128,127) f32[4]:(0.01,0.1) | axis=-2"},
                 {.text = "i8[3,1]:(-128,127) f32[1]={-0.5} i8[1]={3}"},
                 {.text = "i32[3,4]:(-99999,99999) f32[3] | axis=0"},
                 {.text = "i32[2,3]={2147483647,-2147483648,16777217,0,1,-1} f32[] i32[]={0}"},
                 {.text = "i8[2]={-3,4} f32[2]={inf,0} | axis=0", .grad_tol = -1},
                 {.text = "u8[] f32[] u8[]"}, {.text = "i8[0,4] f32[4] i8[4]"},
                 {.text = "i8[4,0] f32[4] | axis=0"}, {.text = "i8[3,0] f32[0] i8[0]"},
                 {.text = "i8[2,6]:(-128,127) f32[2,3] i8[2,3]:(-9,9) | block_size=2"},
                 {.text = "u8[2,7]:(0,255) f32[2,3] u8[2,3]:(0,255) | block_size=3"},
                 {.text = "i8[5,3,2]:(-128,127) f32[3,3,2] i8[3,3,2] | axis=0 block_size=2"},
                 {.text = "i8[3,4]:(-128,127) f32[3,4] | block_size=1"},
                 {.text = "i8[3,4]:(-128,127) f32[1,4] | axis=0 block_size=99"},
                 {.text = "i8[0,4] f32[0,2] | block_size=2"},
                 {.text = "i8[211,173]:(-128,127) f32[173]:(0.01,0.1) i8[173]:(-9,9)"},
                 {.text = "u8[211,173]:(0,255) f32[211]:(0.01,0.1) u8[211]:(0,255) | axis=0"},
                 {.text = "u8[40001]:(0,255) f32[]:(0.01,0.1) u8[]={128}"},
                 {.text = "i8[211,173]:(-128,127) f32[211,6] i8[211,6] | block_size=32"})));

GRADD_KERNELS(cpu, dequantize,
              GRADD_KERNEL("DequantizeLinear", "loop",
                           .types = {GRADD_T_ANY, GRADD_T_F32_F64, GRADD_T_ANY},
                           .compute = compute_dequantize));
