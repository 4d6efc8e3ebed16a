/* Rope: rotary position embedding, the rotation of pairs of elements by angles per position.
 *
 * x is [..., D]; cos and sin are [..., R] with R even and at most D, and broadcast to x in front.
 * With h = R / 2 the pairs are (i, i + h), or (2i, 2i + 1) with interleaved = 1; (a, b) becomes
 * (a cos_a - b sin_a, b cos_b + a sin_b); elements from R on are copied. `transposed` applies the
 * transposed matrix, which is the gradient by x, whatever the tables hold (for the usual ones, with
 * equal angles in a pair, it is the rotation back). The tables have the type of x, or f32 beside a
 * bf16 x; bf16 is computed in f32 and rounded once. Nothing is saved but the tables. A row is read
 * pair by pair before it is written, so y may be x.
 */
#include <string.h>

#include "kernels/cpu/bf16.h"
#include "kernels/dispatch.h"
#include "kernels/infer.h"
#include "kernels/op.h"
#include "kernels/rules.h"

typedef struct rope_s {
    const void *x, *cos, *sin;
    void *y;
    int rank;                       /* axes in front of the last one */
    int64_t dims[GRADD_MAX_RANK];   /* of x */
    int64_t jump_c[GRADD_MAX_RANK]; /* elements of cos per index, 0 where it is broadcast */
    int64_t jump_s[GRADD_MAX_RANK];
    int64_t rows, size, turned; /* R = turned elements of each row of size elements */
    bool interleaved, transposed;
} rope_t;

/* ---- kernels --------------------------------------------------------------------------------- */

/* Turns the pairs (FIRST(i), SECOND(i)): the coefficient of b in the first element is
 * sign * p[FIRST or SECOND], that of a in the second one -sign * the other one. */
#define TURN(FIRST, SECOND, LOAD, LOAD_TABLE, STORE)                                               \
    {                                                                                              \
        const C *p = sin + (r->transposed ? SECOND(0) : 0);                                        \
        const C *q = sin + (r->transposed ? 0 : SECOND(0));                                        \
        _Pragma("omp simd") for (int64_t i = 0; i < half; i++) {                                   \
            const R a = LOAD(x[FIRST(i)]), b = LOAD(x[SECOND(i)]);                                 \
            const R at_a = sign * (b * LOAD_TABLE(p[FIRST(i)]));                                   \
            const R at_b = sign * (a * LOAD_TABLE(q[FIRST(i)]));                                   \
            y[FIRST(i)] = STORE(a * LOAD_TABLE(cos[FIRST(i)]) + at_a);                             \
            y[SECOND(i)] = STORE(b * LOAD_TABLE(cos[SECOND(i)]) - at_b);                           \
        }                                                                                          \
    }
#define HALF_FIRST(i)  (i)
#define HALF_SECOND(i) ((i) + half)
#define PAIR_FIRST(i)  (2 * (i))
#define PAIR_SECOND(i) (2 * (i) + 1)

/* Moves to the next row: indices count like an odometer. */
static inline void next_row(const rope_t *p, int64_t *index, int64_t *at_c, int64_t *at_s) {
    for (int i = p->rank - 1; i >= 0; i--) {
        *at_c += p->jump_c[i];
        *at_s += p->jump_s[i];
        if (++index[i] < p->dims[i]) return;
        *at_c -= p->dims[i] * p->jump_c[i];
        *at_s -= p->dims[i] * p->jump_s[i];
        index[i] = 0;
    }
}

static void seek_row(const rope_t *p, int64_t row, int64_t *index, int64_t *at_c, int64_t *at_s) {
    *at_c = *at_s = 0;
    for (int i = p->rank - 1; i >= 0; i--) {
        index[i] = row % p->dims[i];
        row /= p->dims[i];
        *at_c += index[i] * p->jump_c[i];
        *at_s += index[i] * p->jump_s[i];
    }
}

/* Rows [first, end) of elements T with tables of C, computed in R. */
#define ROPE_ROWS(suffix, T_, C_, R_, LOAD, LOAD_TABLE, STORE)                                     \
    GRADD_MULTIARCH static void rows_##suffix(const rope_t *r, int64_t first, int64_t end) {       \
        typedef T_ T;                                                                              \
        typedef C_ C;                                                                              \
        typedef R_ R;                                                                              \
        const int64_t half = r->turned / 2;                                                        \
        const R sign = r->transposed ? 1 : -1;                                                     \
        int64_t index[GRADD_MAX_RANK], at_c, at_s;                                                 \
        seek_row(r, first, index, &at_c, &at_s);                                                   \
        for (int64_t row = first; row < end; row++) {                                              \
            const T *x = (const T *)r->x + row * r->size;                                          \
            const C *cos = (const C *)r->cos + at_c, *sin = (const C *)r->sin + at_s;              \
            T *y = (T *)r->y + row * r->size;                                                      \
            if (r->interleaved)                                                                    \
                TURN(PAIR_FIRST, PAIR_SECOND, LOAD, LOAD_TABLE, STORE)                             \
            else                                                                                   \
                TURN(HALF_FIRST, HALF_SECOND, LOAD, LOAD_TABLE, STORE)                             \
            if (r->turned < r->size && x != y)                                                     \
                memcpy(y + r->turned, x + r->turned, sizeof(T) * (size_t)(r->size - r->turned));   \
            next_row(r, index, &at_c, &at_s);                                                      \
        }                                                                                          \
    }
#define AS_IS(x) (x)
ROPE_ROWS(f32, float, float, float, AS_IS, AS_IS, AS_IS)
ROPE_ROWS(f64, double, double, double, AS_IS, AS_IS, AS_IS)
ROPE_ROWS(bf16, gradd_bf16_t, gradd_bf16_t, float, gradd_bf16_f32, gradd_bf16_f32, gradd_f32_bf16)
ROPE_ROWS(bf16_f32, gradd_bf16_t, float, float, gradd_bf16_f32, AS_IS, gradd_f32_bf16)

typedef void (*rows_fn_t)(const rope_t *r, int64_t first, int64_t end);

static rows_fn_t pick_rows(gradd_dtype_t x, gradd_dtype_t table) {
    if (x == GRADD_DT_F32) return rows_f32;
    if (x == GRADD_DT_F64) return rows_f64;
    return table == GRADD_DT_F32 ? rows_bf16_f32 : rows_bf16;
}

/* Element distance of a table per index of x's leading axes. */
static void table_jumps(const gradd_type_t *table, const gradd_type_t *x, int64_t *jump) {
    int64_t stride = table->dims[table->rank - 1];
    for (int i = x->rank - 2; i >= 0; i--) {
        int k = i - (x->rank - table->rank);
        int64_t d = k >= 0 ? table->dims[k] : 1;
        jump[i] = d == 1 ? 0 : stride;
        stride *= d;
    }
}

static rope_t describe(const gradd_run_t *r) {
    const gradd_type_t *x = &r->in[0].type;
    rope_t p = {.x = r->in[0].data, .cos = r->in[1].data, .sin = r->in[2].data};
    p.y = r->out[0].data;
    p.rank = x->rank - 1;
    p.rows = 1;
    for (int i = 0; i < p.rank; i++)
        p.rows *= p.dims[i] = x->dims[i];
    p.size = x->dims[p.rank];
    p.turned = r->in[1].type.dims[r->in[1].type.rank - 1];
    table_jumps(&r->in[1].type, x, p.jump_c);
    table_jumps(&r->in[2].type, x, p.jump_s);
    p.interleaved = gradd_attr_int(r->attrs, "interleaved", 0);
    p.transposed = gradd_attr_int(r->attrs, "transposed", 0);
    return p;
}

#define ROW_BLOCK 64

static gradd_status_t run_rope(const gradd_run_t *r) {
    rope_t p = describe(r);
    int64_t blocks = (p.rows + ROW_BLOCK - 1) / ROW_BLOCK;
    rows_fn_t rows = pick_rows(r->in[0].type.dtype, r->in[1].type.dtype);
#pragma omp parallel for schedule(static) if (p.rows * p.size >= GRADD_PARALLEL_MIN)
    for (int64_t k = 0; k < blocks; k++) {
        int64_t end = (k + 1) * ROW_BLOCK;
        rows(&p, k * ROW_BLOCK, end < p.rows ? end : p.rows);
    }
    return GRADD_OK;
}

/* The definition: element by element, partner and sign by index. */
static gradd_status_t ref_rope(const gradd_run_t *r) {
    rope_t p = describe(r);
    int64_t index[GRADD_MAX_RANK], at_c, at_s, half = p.turned / 2;
    GRADD_SWITCH_FLOAT(r->in[0].type.dtype, T, {
        for (int64_t row = 0; row < p.rows; row++) {
            const T *x = (const T *)p.x + row * p.size;
            T *y = (T *)p.y + row * p.size;
            seek_row(&p, row, index, &at_c, &at_s);
            const T *cos = (const T *)p.cos + at_c, *sin = (const T *)p.sin + at_s;
            for (int64_t i = 0; i < p.size; i++) {
                bool first = p.interleaved ? i % 2 == 0 : i < half;
                int64_t step = p.interleaved ? 1 : half, partner = first ? i + step : i - step;
                double sign = first == p.transposed ? 1 : -1;
                if (i < p.turned)
                    y[i] = (T)((double)x[i] * cos[i] +
                               sign * x[partner] * sin[p.transposed ? partner : i]);
                else
                    y[i] = x[i];
            }
        }
    });
    return GRADD_OK;
}

/* ---- shape rule ------------------------------------------------------------------------------ */

static gradd_status_t check_table(const gradd_type_t *t, const gradd_type_t *x) {
    char a[GRADD_TYPE_TEXT], b[GRADD_TYPE_TEXT];
    bool wider = x->dtype == GRADD_DT_BF16 && t->dtype == GRADD_DT_F32;
    bool fits = t->rank >= 1 && t->rank <= x->rank && (wider || t->dtype == x->dtype);
    for (int i = 0; fits && i < t->rank - 1; i++)
        fits = t->dims[i] == 1 || t->dims[i] == x->dims[i + x->rank - t->rank];
    if (fits) {
        int64_t turned = t->dims[t->rank - 1];
        fits = turned % 2 == 0 && turned <= x->dims[x->rank - 1];
    }
    if (!fits)
        return GRADD_FAIL(GRAPH, "a table of type %s does not fit x of type %s",
                          gradd_type_format(t, a), gradd_type_format(x, b));
    return GRADD_OK;
}

static gradd_status_t infer_rope(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type, *cos = &c->in[1].type, *sin = &c->in[2].type;
    if (x->rank < 1) return GRADD_FAIL(GRAPH, "x has no axis to turn");
    GRADD_TRY(check_table(cos, x));
    GRADD_TRY(check_table(sin, x));
    if (cos->dtype != sin->dtype || cos->dims[cos->rank - 1] != sin->dims[sin->rank - 1])
        return GRADD_FAIL(GRAPH, "cos and sin differ in type or width");
    c->out[0] = *x;
    return GRADD_OK;
}

/* ---- gradient rule --------------------------------------------------------------------------- */

/* The turned part of x or dy, in the type of the tables: so are their gradients and the sums. */
static gradd_val_t turned_part(gradd_grad_t *g, gradd_val_t v) {
    const gradd_type_t *type = gradd_val_type(g->b, v), *table = gradd_val_type(g->b, g->in[1]);
    if (g->b->status) return GRADD_NONE;
    int64_t zero = 0, turned = table->dims[table->rank - 1], axis = type->rank - 1;
    gradd_attr_t to = gradd_make_int("to", table->dtype);
    const bool narrow = type->dtype != table->dtype, whole = turned == type->dims[axis];
    if (narrow) v = gradd_emit_attrs(g->b, "Cast", &v, 1, &to, 1);
    if (whole) return v;
    return GRADD_EMIT(g->b, "Slice", v, gradd_const_i64s(g->b, &zero, 1),
                      gradd_const_i64s(g->b, &turned, 1), gradd_const_i64s(g->b, &axis, 1));
}

/* (a, b) -> (-b, a): the rotation by a quarter */
static gradd_val_t quarter_turn(gradd_grad_t *g, gradd_val_t v) {
    gradd_dtype_t dtype = gradd_val_type(g->b, g->in[1])->dtype;
    gradd_val_t zeros = gradd_zeros_like(g->b, g->in[1]);
    gradd_val_t ones = GRADD_EMIT(g->b, "Add", zeros, gradd_const_scalar(g->b, dtype, 1));
    gradd_attr_t attr = gradd_make_int("interleaved", gradd_attr_int(g->attrs, "interleaved", 0));
    gradd_val_t in[3] = {v, zeros, ones};
    return gradd_emit_attrs(g->b, "Rope", in, 3, &attr, 1);
}

/* The tables are linear, too: dcos = dy x and dsin = dy quarter_turn(x), summed over what was
 * broadcast; transposed, it is dy that turns. */
static gradd_status_t grad_tables(gradd_grad_t *g) {
    bool transposed = gradd_attr_int(g->attrs, "transposed", 0);
    gradd_val_t x = turned_part(g, g->in[0]), dy = turned_part(g, g->dout[0]);
    if (g->b->status) return g->b->status;
    if (g->need[1]) g->din[1] = gradd_reduce_to(g->b, GRADD_EMIT(g->b, "Mul", dy, x), g->in[1]);
    if (!g->need[2]) return g->b->status;
    if (transposed)
        dy = quarter_turn(g, dy);
    else
        x = quarter_turn(g, x);
    g->din[2] = gradd_reduce_to(g->b, GRADD_EMIT(g->b, "Mul", dy, x), g->in[2]);
    return g->b->status;
}

static gradd_status_t grad_rope(gradd_grad_t *g) {
    gradd_attr_t attrs[2] = {
        gradd_make_int("interleaved", gradd_attr_int(g->attrs, "interleaved", 0)),
        gradd_make_int("transposed", !gradd_attr_int(g->attrs, "transposed", 0)),
    };
    gradd_val_t in[3] = {g->dout[0], g->in[1], g->in[2]};
    if (g->need[0]) g->din[0] = gradd_emit_attrs(g->b, "Rope", in, 3, attrs, 2);
    return g->need[1] || g->need[2] ? grad_tables(g) : g->b->status;
}

/* ---- row ------------------------------------------------------------------------------------- */

GRADD_OPS(rope, {.name = "Rope",
                 .domain = "com.gradd",
                 .since = 1,
                 .min_in = 3,
                 .max_in = 3,
                 .min_out = 1,
                 .max_out = 1,
                 .flags = GRADD_OP_INTERNAL | GRADD_OP_CHEAP,
                 .inplace = 1,
                 .types = {GRADD_T_FLOAT_BF16},
                 .attrs = GRADD_ATTR_LIST({"interleaved", GRADD_ATTR_INT, false},
                                          {"transposed", GRADD_ATTR_INT, false}),
                 .infer = infer_rope,
                 .grad = grad_rope,
                 .run = run_rope,
                 .ref = ref_rope,
                 .cases = GRADD_CASES(
                     {.text = "f32[2,3,5,8] f32[2,1,5,8] f32[2,1,5,8]"},
                     {.text = "f32[2,3,5,8] f32[1,1,5,8] f32[5,8] | transposed=1"},
                     {.text = "f32[2,5,3,10] f32[2,5,1,6] f32[1,5,1,6]"},
                     {.text = "f32[2,5,3,10] f32[2,5,1,6] f32[1,5,1,6] | interleaved=1"},
                     {.text = "f32[2,3,4,8] f32[4,8] f32[4,8] | interleaved=1 transposed=1"},
                     {.text = "f32[3,2] f32[2] f32[2]"}, {.text = "f32[0,3,4] f32[3,4] f32[3,4]"},
                     {.text = "f32[7,3,60,72] f32[60,64] f32[60,64]"},
                     {.text = "f32[7,60,3,66] f32[60,1,66] f32[60,1,66] | interleaved=1"})});
