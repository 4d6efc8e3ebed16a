/* Rope, RopeApart: rotary position embedding, the rotation of pairs of elements by angles per
 * position.
 *
 * x is [..., D]; cos and sin are [..., R] with R even and at most D, and broadcast to x in front.
 * With h = R / 2 the pairs are (i, i + h), or (2i, 2i + 1) with interleaved = 1; (a, b) becomes
 * (a cos_a - b sin_a, b cos_b + a sin_b); elements from R on are copied. `shared` says that the
 * tables are [..., h], one column per pair; `inverse` turns the other way (sin counts negative).
 * `transposed` applies the transposed matrix, which is the gradient by x, whatever the tables hold
 * (for the usual ones, with equal angles in a pair, it is the rotation back). The tables have the
 * type of x, or f32 beside a half; halves are computed in f32 and rounded once. Nothing is saved
 * but the tables. A row is read pair by pair before it is written, so y may be x.
 *
 * RopeApart takes pairs (2i, 2i + 1) and writes them to (i, i + h), as DeepSeek's latent attention
 * does; transposed, it is the other way round. Its tables are shared, and y is not x.
 */
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/half.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/rope.h"
#include "kernels/math/formulas.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

typedef struct rope_s {
    const void *x, *cos, *sin;
    void *y;
    int rank;                       /* axes in front of the last one */
    int64_t dims[GRADD_MAX_RANK];   /* of x */
    int64_t jump_c[GRADD_MAX_RANK]; /* elements of cos per index, 0 where it is broadcast */
    int64_t jump_s[GRADD_MAX_RANK];
    int64_t rows, size, turned; /* R = turned elements of each row of size elements */
    bool interleaved, transposed, shared;
    bool apart;     /* RopeApart */
    bool clockwise; /* signs of the two products with sin: + in the first element */
} rope_t;

/* ---- kernels --------------------------------------------------------------------------------- */

/* Turns the pairs (FIRST(i), SECOND(i)): p and q are the sines of the first and of the second
 * element, which change places when transposed. */
#define TURN(FIRST, SECOND, LOAD, LOAD_TABLE, STORE)                                               \
    {                                                                                              \
        const C *p = sin + (r->transposed ? SECOND(0) : 0);                                        \
        const C *q = sin + (r->transposed ? 0 : SECOND(0));                                        \
        _Pragma("omp simd") for (int64_t i = 0; i < half; i++) {                                   \
            const R a = LOAD(x[FIRST(i)]), b = LOAD(x[SECOND(i)]);                                 \
            const R to_a = sign * LOAD_TABLE(p[FIRST(i)]);                                         \
            const R to_b = sign * LOAD_TABLE(q[FIRST(i)]);                                         \
            y[FIRST(i)] = STORE(E_TURN_FIRST(a, b, LOAD_TABLE(cos[FIRST(i)]), to_a));              \
            y[SECOND(i)] = STORE(E_TURN_SECOND(a, b, LOAD_TABLE(cos[SECOND(i)]), to_b));           \
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

#define AS_IS(x) (x)

#define TURN_ROW(LOAD, LOAD_TABLE, STORE)                                                          \
    if (r->interleaved)                                                                            \
        TURN(PAIR_FIRST, PAIR_SECOND, LOAD, LOAD_TABLE, STORE)                                     \
    else                                                                                           \
        TURN(HALF_FIRST, HALF_SECOND, LOAD, LOAD_TABLE, STORE)

/* With tables of one column per pair, from one order of the elements to the same or another. */
#define TURN_SHARED(FROM, TO, LOAD, LOAD_TABLE, STORE)                                             \
    {                                                                                              \
        _Pragma("omp simd") for (int64_t i = 0; i < half; i++) {                                   \
            const R a = LOAD(x[FROM##_FIRST(i)]), b = LOAD(x[FROM##_SECOND(i)]);                   \
            const R c = LOAD_TABLE(cos[i]), s = sign * LOAD_TABLE(sin[i]);                         \
            y[TO##_FIRST(i)] = STORE(E_TURN_FIRST(a, b, c, s));                                    \
            y[TO##_SECOND(i)] = STORE(E_TURN_SECOND(a, b, c, s));                                  \
        }                                                                                          \
    }

#define TURN_SHARED_ROW(LOAD, LOAD_TABLE, STORE)                                                   \
    if (r->apart && r->transposed)                                                                 \
        TURN_SHARED(HALF, PAIR, LOAD, LOAD_TABLE, STORE)                                           \
    else if (r->apart)                                                                             \
        TURN_SHARED(PAIR, HALF, LOAD, LOAD_TABLE, STORE)                                           \
    else if (r->interleaved)                                                                       \
        TURN_SHARED(PAIR, PAIR, LOAD, LOAD_TABLE, STORE)                                           \
    else                                                                                           \
        TURN_SHARED(HALF, HALF, LOAD, LOAD_TABLE, STORE)

/* Rows [first, end) of elements T with tables of C, computed in R. */
#define ROPE_ROWS(name, BODY, T_, C_, R_, LOAD, LOAD_TABLE, STORE)                                 \
    GRADD_MULTIARCH static void name(const rope_t *r, int64_t first, int64_t end) {                \
        typedef T_ T;                                                                              \
        typedef C_ C;                                                                              \
        typedef R_ R;                                                                              \
        const int64_t half = r->turned / 2;                                                        \
        const R sign = r->clockwise ? 1 : -1;                                                      \
        int64_t index[GRADD_MAX_RANK], at_c, at_s;                                                 \
        seek_row(r, first, index, &at_c, &at_s);                                                   \
        for (int64_t row = first; row < end; row++) {                                              \
            const T *x = (const T *)r->x + row * r->size;                                          \
            const C *cos = (const C *)r->cos + at_c, *sin = (const C *)r->sin + at_s;              \
            T *y = (T *)r->y + row * r->size;                                                      \
            BODY(LOAD, LOAD_TABLE, STORE)                                                          \
            if (r->turned < r->size && x != y)                                                     \
                memcpy(y + r->turned, x + r->turned, sizeof(T) * (size_t)(r->size - r->turned));   \
            next_row(r, index, &at_c, &at_s);                                                      \
        }                                                                                          \
    }
#define BOTH_ROWS(suffix, ...)                                                                     \
    ROPE_ROWS(rows_##suffix, TURN_ROW, __VA_ARGS__)                                                \
    ROPE_ROWS(shared_##suffix, TURN_SHARED_ROW, __VA_ARGS__)

BOTH_ROWS(f32, float, float, float, AS_IS, AS_IS, AS_IS)
BOTH_ROWS(f64, double, double, double, AS_IS, AS_IS, AS_IS)
BOTH_ROWS(bf16, gradd_bf16_t, gradd_bf16_t, float, gradd_bf16_f32, gradd_bf16_f32, gradd_f32_bf16)
BOTH_ROWS(bf16_f32, gradd_bf16_t, float, float, gradd_bf16_f32, AS_IS, gradd_f32_bf16)
BOTH_ROWS(f16, gradd_f16_t, gradd_f16_t, float, gradd_f16_f32, gradd_f16_f32, gradd_f32_f16)
BOTH_ROWS(f16_f32, gradd_f16_t, float, float, gradd_f16_f32, AS_IS, gradd_f32_f16)

typedef void (*rows_fn_t)(const rope_t *r, int64_t first, int64_t end);

static rows_fn_t pick_rows(gradd_dtype_t x, gradd_dtype_t table, bool shared) {
    if (x == GRADD_DT_F32) return shared ? shared_f32 : rows_f32;
    if (x == GRADD_DT_F64) return shared ? shared_f64 : rows_f64;
    if (x == GRADD_DT_F16 && table == GRADD_DT_F32) return shared ? shared_f16_f32 : rows_f16_f32;
    if (x == GRADD_DT_F16) return shared ? shared_f16 : rows_f16;
    if (table == GRADD_DT_F32) return shared ? shared_bf16_f32 : rows_bf16_f32;
    return shared ? shared_bf16 : rows_bf16;
}

/* R, from the type of a table. */
static int64_t turned_size(const gradd_type_t *table, bool shared) {
    return table->dims[table->rank - 1] * (shared ? 2 : 1);
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

static rope_t describe(const gradd_launch_t *r, bool apart) {
    const gradd_type_t *x = &r->in[GRADD_ROPE_X].type;
    rope_t p = {.x = r->in[GRADD_ROPE_X].data,
                .cos = r->in[GRADD_ROPE_COS].data,
                .sin = r->in[GRADD_ROPE_SIN].data,
                .apart = apart};
    p.y = r->out[0].data;
    p.rank = x->rank - 1;
    p.rows = 1;
    for (int i = 0; i < p.rank; i++)
        p.rows *= p.dims[i] = x->dims[i];
    p.size = x->dims[p.rank];
    p.shared = apart || gradd_attr_int(r->attrs, GRADD_ROPE_SHARED, 0);
    p.turned = turned_size(&r->in[GRADD_ROPE_COS].type, p.shared);
    table_jumps(&r->in[GRADD_ROPE_COS].type, x, p.jump_c);
    table_jumps(&r->in[GRADD_ROPE_SIN].type, x, p.jump_s);
    p.interleaved = gradd_attr_int(r->attrs, GRADD_ROPE_INTERLEAVED, 0);
    p.transposed = gradd_attr_int(r->attrs, GRADD_ROPE_TRANSPOSED, 0);
    p.clockwise = p.transposed != (gradd_attr_int(r->attrs, GRADD_ROPE_INVERSE, 0) != 0);
    return p;
}

#define ROW_BLOCK 64

static gradd_status_t compute(const gradd_launch_t *r, bool apart) {
    rope_t p = describe(r, apart);
    int64_t blocks = (p.rows + ROW_BLOCK - 1) / ROW_BLOCK;
    rows_fn_t rows =
        pick_rows(r->in[GRADD_ROPE_X].type.dtype, r->in[GRADD_ROPE_COS].type.dtype, p.shared);
#pragma omp parallel for schedule(static) if (p.rows * p.size >= GRADD_PARALLEL_MIN)
    for (int64_t k = 0; k < blocks; k++) {
        int64_t end = (k + 1) * ROW_BLOCK;
        rows(&p, k * ROW_BLOCK, end < p.rows ? end : p.rows);
    }
    return GRADD_OK;
}

static gradd_status_t compute_rope(const gradd_launch_t *r) {
    return compute(r, false);
}
static gradd_status_t compute_apart(const gradd_launch_t *r) {
    return compute(r, true);
}

/* Where element `second` of pair i stands in a row. */
static int64_t place(bool in_pairs, int64_t half, int64_t i, int second) {
    return in_pairs ? 2 * i + second : i + second * half;
}

/* The definition: element by element, partner and sign by index. */
static gradd_status_t ref(const gradd_launch_t *r, bool apart) {
    rope_t p = describe(r, apart);
    int64_t index[GRADD_MAX_RANK], at_c, at_s, half = p.turned / 2;
    bool from_pairs = apart ? !p.transposed : p.interleaved;
    bool to_pairs = apart ? p.transposed : p.interleaved;
    GRADD_SWITCH_FLOAT(r->in[GRADD_ROPE_X].type.dtype, T, {
        for (int64_t row = 0; row < p.rows; row++) {
            const T *x = (const T *)p.x + row * p.size;
            T *y = (T *)p.y + row * p.size;
            seek_row(&p, row, index, &at_c, &at_s);
            const T *cos = (const T *)p.cos + at_c, *sin = (const T *)p.sin + at_s;
            for (int64_t k = 0; k < p.turned; k++) {
                int64_t i = k / 2;
                int second = k % 2;
                double sign = (second == 0) == p.clockwise ? 1 : -1;
                int64_t of_sin = p.transposed ? 1 - second : second;
                double c = cos[p.shared ? i : place(to_pairs, half, i, second)];
                double s = sin[p.shared ? i : place(to_pairs, half, i, (int)of_sin)];
                y[place(to_pairs, half, i, second)] =
                    (T)(c * x[place(from_pairs, half, i, second)] +
                        sign * s * x[place(from_pairs, half, i, 1 - second)]);
            }
            for (int64_t k = p.turned; k < p.size; k++)
                y[k] = x[k];
        }
    });
    return GRADD_OK;
}

static gradd_status_t ref_rope(const gradd_launch_t *r) {
    return ref(r, false);
}
static gradd_status_t ref_apart(const gradd_launch_t *r) {
    return ref(r, true);
}

/* ---- shape rule ------------------------------------------------------------------------------ */

static gradd_status_t check_table(const gradd_type_t *t, const gradd_type_t *x, bool shared) {
    char a[GRADD_TYPE_TEXT], b[GRADD_TYPE_TEXT];
    bool wider = gradd_dtype_is_half(x->dtype) && t->dtype == GRADD_DT_F32;
    bool fits = t->rank >= 1 && t->rank <= x->rank && (wider || t->dtype == x->dtype);
    for (int i = 0; fits && i < t->rank - 1; i++)
        fits = t->dims[i] == 1 || t->dims[i] == x->dims[i + x->rank - t->rank];
    if (fits) {
        int64_t width = t->dims[t->rank - 1], most = x->dims[x->rank - 1];
        fits = shared ? width <= most / 2 : width % 2 == 0 && width <= most;
    }
    if (!fits)
        return GRADD_FAIL(GRAPH, "a table of type %s does not fit x of type %s",
                          gradd_type_format(t, a), gradd_type_format(x, b));
    return GRADD_OK;
}

static gradd_status_t infer(gradd_infer_t *c, bool shared) {
    const gradd_type_t *x = &c->in[GRADD_ROPE_X].type, *cos = &c->in[GRADD_ROPE_COS].type,
                       *sin = &c->in[GRADD_ROPE_SIN].type;
    if (x->rank < 1) return GRADD_FAIL(GRAPH, "x has no axis to turn");
    GRADD_TRY(check_table(cos, x, shared));
    GRADD_TRY(check_table(sin, x, shared));
    if (cos->dtype != sin->dtype || cos->dims[cos->rank - 1] != sin->dims[sin->rank - 1])
        return GRADD_FAIL(GRAPH, "cos and sin differ in type or width");
    c->out[0] = *x;
    return GRADD_OK;
}

static gradd_status_t infer_rope(gradd_infer_t *c) {
    return infer(c, gradd_attr_int(c->attrs, GRADD_ROPE_SHARED, 0));
}

static gradd_status_t infer_apart(gradd_infer_t *c) {
    return infer(c, true);
}

/* ---- gradient rule --------------------------------------------------------------------------- */

/* The first or second elements of the pairs of x, dy or a table, in the type of sums. */
static gradd_val_t members(gradd_builder_t *b, gradd_val_t v, int64_t turned, bool in_pairs,
                           int second, gradd_dtype_t dtype) {
    v = gradd_cast(b, v, dtype);
    if (in_pairs) return gradd_slice(b, v, -1, second, turned, 2);
    return gradd_slice(b, v, -1, second * turned / 2, (second + 1) * turned / 2, 1);
}

/* The members of one pair, put where they stand in a row. */
static gradd_val_t joined(gradd_builder_t *b, gradd_val_t first, gradd_val_t second,
                          bool in_pairs) {
    gradd_val_t in[2] = {first, second};
    if (!in_pairs) return gradd_concat(b, in, 2, -1);
    if (b->status) return GRADD_NONE;
    gradd_type_t type = *gradd_val_type(b, first);
    int64_t last = -1;
    for (int k = 0; k < 2; k++)
        in[k] = GRADD_EMIT(b, "Unsqueeze", in[k], gradd_const_i64s(b, &last, 1));
    gradd_val_t pairs = gradd_concat(b, in, 2, -1);
    type.dims[type.rank - 1] *= 2;
    return gradd_reshape_to(b, pairs, type.dims, type.rank);
}

/* The tables are linear, too. With x = (a, b) and dy = (p, q) in pairs, and sign -1 for the usual
 * direction: dcos = (p a, q b) and dsin = sign (p b, -q a), or, transposed, sign (-q a, p b); the
 * two columns are summed where they are one, and both over what was broadcast. */
static gradd_status_t grad_tables(gradd_grad_t *g, bool apart) {
    bool transposed = gradd_attr_int(g->attrs, GRADD_ROPE_TRANSPOSED, 0);
    bool shared = apart || gradd_attr_int(g->attrs, GRADD_ROPE_SHARED, 0);
    bool interleaved = gradd_attr_int(g->attrs, GRADD_ROPE_INTERLEAVED, 0);
    bool clockwise = transposed != (gradd_attr_int(g->attrs, GRADD_ROPE_INVERSE, 0) != 0);
    if (g->b->status) return g->b->status;
    int64_t turned = turned_size(gradd_val_type(g->b, g->in[GRADD_ROPE_COS]), shared);
    bool from_pairs = apart ? !transposed : interleaved,
         to_pairs = apart ? transposed : interleaved;
    /* in the type of the tables, which is that of their gradients */
    const gradd_dtype_t dtype = gradd_val_type(g->b, g->in[GRADD_ROPE_COS])->dtype;
    gradd_val_t a = members(g->b, g->in[GRADD_ROPE_X], turned, from_pairs, 0, dtype);
    gradd_val_t b = members(g->b, g->in[GRADD_ROPE_X], turned, from_pairs, 1, dtype);
    gradd_val_t p = members(g->b, g->dout[0], turned, to_pairs, 0, dtype);
    gradd_val_t q = members(g->b, g->dout[0], turned, to_pairs, 1, dtype);
    gradd_val_t by_cos[2] = {GRADD_EMIT(g->b, "Mul", p, a), GRADD_EMIT(g->b, "Mul", q, b)};
    gradd_val_t pb = GRADD_EMIT(g->b, "Mul", p, b), qa = GRADD_EMIT(g->b, "Mul", q, a);
    if (clockwise)
        qa = GRADD_EMIT(g->b, "Neg", qa);
    else
        pb = GRADD_EMIT(g->b, "Neg", pb);
    gradd_val_t by_sin[2] = {transposed ? qa : pb, transposed ? pb : qa};
    gradd_val_t *by[2] = {by_cos, by_sin};
    for (int k = 0; k < 2; k++) {
        if (!g->need[1 + k]) continue;
        gradd_val_t sum = shared ? GRADD_EMIT(g->b, "Add", by[k][0], by[k][1])
                                 : joined(g->b, by[k][0], by[k][1], to_pairs);
        g->din[1 + k] = gradd_reduce_to(g->b, sum, g->in[1 + k]);
    }
    return g->b->status;
}

static gradd_status_t grad(gradd_grad_t *g, bool apart) {
    gradd_attr_t attrs[GRADD_ROPE_ATTRS] = {
        gradd_make_int(GRADD_ROPE_TRANSPOSED, !gradd_attr_int(g->attrs, GRADD_ROPE_TRANSPOSED, 0)),
        gradd_make_int(GRADD_ROPE_INVERSE, gradd_attr_int(g->attrs, GRADD_ROPE_INVERSE, 0)),
        gradd_make_int(GRADD_ROPE_INTERLEAVED, gradd_attr_int(g->attrs, GRADD_ROPE_INTERLEAVED, 0)),
        gradd_make_int(GRADD_ROPE_SHARED, gradd_attr_int(g->attrs, GRADD_ROPE_SHARED, 0)),
    };
    gradd_val_t in[GRADD_ROPE_INPUTS] = {g->dout[0], g->in[GRADD_ROPE_COS], g->in[GRADD_ROPE_SIN]};
    if (g->need[GRADD_ROPE_X])
        g->din[GRADD_ROPE_X] =
            gradd_emit_attrs(g->b, apart ? "RopeApart" : "Rope", in, GRADD_ROPE_INPUTS, attrs,
                             apart ? GRADD_ROPE_APART_ATTRS : GRADD_ROPE_ATTRS);
    return g->need[GRADD_ROPE_COS] || g->need[GRADD_ROPE_SIN] ? grad_tables(g, apart)
                                                              : g->b->status;
}

static gradd_status_t grad_rope(gradd_grad_t *g) {
    return grad(g, false);
}
static gradd_status_t grad_apart(gradd_grad_t *g) {
    return grad(g, true);
}

/* ---- expansion ------------------------------------------------------------------------------- */

/* (a, b) -> (a cos_a - b sin_a, b cos_b + a sin_b), with the signs and columns of the attributes.
 */
static gradd_status_t expand(gradd_expand_t *x, bool apart) {
    gradd_builder_t *b = x->b;
    const gradd_type_t type = *gradd_val_type(b, x->in[GRADD_ROPE_X]),
                       table = *gradd_val_type(b, x->in[GRADD_ROPE_COS]);
    const bool transposed = gradd_attr_int(x->attrs, GRADD_ROPE_TRANSPOSED, 0);
    const bool shared = apart || gradd_attr_int(x->attrs, GRADD_ROPE_SHARED, 0);
    const bool interleaved = gradd_attr_int(x->attrs, GRADD_ROPE_INTERLEAVED, 0);
    const bool clockwise = transposed != (gradd_attr_int(x->attrs, GRADD_ROPE_INVERSE, 0) != 0);
    const bool from_pairs = apart ? !transposed : interleaved;
    const bool to_pairs = apart ? transposed : interleaved;
    const gradd_dtype_t wide = gradd_dtype_is_half(type.dtype) ? GRADD_DT_F32 : type.dtype;
    const int64_t size = type.dims[type.rank - 1], turned = turned_size(&table, shared);
    gradd_val_t v[2], cos[2], sin[2], y[2];
    for (int k = 0; k < 2; k++) {
        v[k] = members(b, x->in[GRADD_ROPE_X], turned, from_pairs, k, wide);
        cos[k] = sin[k] = GRADD_NONE;
        if (shared) continue;
        cos[k] = members(b, x->in[GRADD_ROPE_COS], turned, to_pairs, k, wide);
        sin[k] = members(b, x->in[GRADD_ROPE_SIN], turned, to_pairs, transposed ? 1 - k : k, wide);
    }
    if (shared) cos[0] = cos[1] = gradd_cast(b, x->in[GRADD_ROPE_COS], wide);
    if (shared) sin[0] = sin[1] = gradd_cast(b, x->in[GRADD_ROPE_SIN], wide);
    for (int k = 0; k < 2; k++)
        y[k] =
            GRADD_EMIT(b, (k == 0) == clockwise ? "Add" : "Sub", GRADD_EMIT(b, "Mul", v[k], cos[k]),
                       GRADD_EMIT(b, "Mul", v[1 - k], sin[k]));
    gradd_val_t row[2] = {gradd_cast(b, joined(b, y[0], y[1], to_pairs), type.dtype)};
    if (turned < size) row[1] = gradd_slice(b, x->in[GRADD_ROPE_X], -1, turned, size, 1);
    x->out[0] = turned < size ? gradd_concat(b, row, 2, -1) : row[0];
    return b->status;
}

static gradd_status_t expand_rope(gradd_expand_t *x) {
    return expand(x, false);
}
static gradd_status_t expand_apart(gradd_expand_t *x) {
    return expand(x, true);
}

/* The last axis is whole in every row. */
static bool rowwise_rope(gradd_rowwise_t *r) {
    return r->lead < r->out[0].rank && gradd_rowwise_map(r);
}

/* ---- row ------------------------------------------------------------------------------------- */

GRADD_OPS(
    rope,
    GRADD_OP("Rope", "com.gradd", 1, (GRADD_ROPE_INPUTS, GRADD_ROPE_INPUTS), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST({GRADD_ROPE_INTERLEAVED, GRADD_ATTR_INT, false},
                                      {GRADD_ROPE_INVERSE, GRADD_ATTR_INT, false},
                                      {GRADD_ROPE_SHARED, GRADD_ATTR_INT, false},
                                      {GRADD_ROPE_TRANSPOSED, GRADD_ATTR_INT, false}),
             .infer = infer_rope, .rowwise = rowwise_rope, .grad = grad_rope, .expand = expand_rope,
             .ref = GRADD_REF(ref_rope),
             .cases = GRADD_CASES(
                 {.text = "f32[2,3,5,8] f32[2,1,5,8] f32[2,1,5,8]"},
                 {.text = "f32[2,3,5,8] f32[1,1,5,8] f32[5,8] | transposed=1"},
                 {.text = "f32[2,5,3,10] f32[2,5,1,6] f32[1,5,1,6]"},
                 {.text = "f32[2,5,3,10] f32[2,5,1,6] f32[1,5,1,6] | interleaved=1"},
                 {.text = "f32[2,3,4,8] f32[4,8] f32[4,8] | interleaved=1 transposed=1"},
                 {.text = "f32[2,3,4,8] f32[4,8] f32[4,8] | inverse=1"},
                 {.text = "f32[2,3,4,8] f32[4,8] f32[1,1,4,8] | inverse=1 transposed=1"},
                 {.text = "f32[2,3,4,8] f32[4,4] f32[1,1,4,4] | shared=1"},
                 {.text = "f32[2,3,4,9] f32[4,3] f32[4,3] | shared=1 inverse=1 transposed=1"},
                 {.text = "f32[2,3,4,9] f32[4,3] f32[4,3] | shared=1 interleaved=1"},
                 {.text = "f32[2,3,4,8] f32[4,4] f32[4,4] | shared=1 interleaved=1 transposed=1"},
                 {.text = "f32[3,2] f32[2] f32[2]"}, {.text = "f32[0,3,4] f32[3,4] f32[3,4]"},
                 {.text = "f32[7,3,60,72] f32[60,64] f32[60,64]"},
                 {.text = "f32[7,3,60,72] f32[60,32] f32[60,32] | shared=1"},
                 {.text = "f32[7,60,3,66] f32[60,1,66] f32[60,1,66] | interleaved=1"},
                 {.text = "f32[3,5,4,72] f32[5,1,64] f32[3,1,4,64] | interleaved=1 transposed=1"},
                 {.text = "f32[3,5,4,72] f32[4,64] f32[4,64] | transposed=1 inverse=1"},
                 {.text = "f32[3,5,4,72] f32[5,1,32] f32[5,1,32] | shared=1 interleaved=1"})),
    GRADD_OP("RopeApart", "com.gradd", 1, (GRADD_ROPE_INPUTS, GRADD_ROPE_INPUTS), (1, 1),
             .flags = GRADD_OP_INTERNAL | GRADD_OP_CHEAP, .types = {GRADD_T_FLOAT},
             .attrs = GRADD_ATTR_LIST({GRADD_ROPE_INVERSE, GRADD_ATTR_INT, false},
                                      {GRADD_ROPE_TRANSPOSED, GRADD_ATTR_INT, false}),
             .infer = infer_apart, .rowwise = rowwise_rope, .grad = grad_apart,
             .expand = expand_apart, .ref = GRADD_REF(ref_apart),
             .cases = GRADD_CASES(
                 {.text = "f32[2,3,5,8] f32[2,1,5,4] f32[2,1,5,4]"},
                 {.text = "f32[2,3,5,8] f32[1,1,5,4] f32[5,4] | transposed=1"},
                 {.text = "f32[2,5,3,10] f32[2,5,1,3] f32[1,5,1,3] | inverse=1"},
                 {.text = "f32[2,5,3,10] f32[5,1,3] f32[5,1,3] | inverse=1 transposed=1"},
                 {.text = "f32[3,2] f32[1] f32[1]"}, {.text = "f32[0,3,4] f32[3,2] f32[3,2]"},
                 {.text = "f32[7,3,60,66] f32[60,32] f32[60,32]"},
                 {.text = "f32[3,5,4,72] f32[5,1,32] f32[5,1,32]"},
                 {.text = "f32[3,5,4,72] f32[4,32] f32[4,32] | transposed=1"},
                 {.text = "f32[7,3,60,66] f32[60,32] f32[60,32] | transposed=1"})));

GRADD_KERNELS(cpu, rope,
              GRADD_KERNEL("Rope", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_rope),
              GRADD_KERNEL("RopeApart", "loop", .types = {GRADD_T_ANY}, .compute = compute_apart));
