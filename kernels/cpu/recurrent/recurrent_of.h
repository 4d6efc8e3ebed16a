/* What follows the products of a step, for a stretch of cells of one sequence, written once for
 * f32, bf16, f16 and f64.
 *
 * Included by recurrent.c with CELL (the stored type), REAL (the type of sums), NAME(x) (appends a
 * suffix), OF(x) (that of REAL), and LOAD and STORE between the two; there is no guard on purpose.
 * Pointers of a row stand at the sequence's first cell, those of gates at its first gate.
 */

GRADD_MULTIARCH static void NAME(lstm)(const rnn_row_t *w, int64_t from, int64_t to) {
    const int64_t n = w->cells;
    const CELL *x = w->x;
    const REAL *p = w->product, *bias = w->bias, *before = w->before;
    REAL *cell = w->cell;
    CELL *out = w->out, *gates = w->gates;
    _Pragma("omp simd") for (int64_t j = from; j < to; j++) {
        const OF(lstm_t) s =
            OF(lstm_cell)(LOAD(x[j]) + (p[j] + bias[j]), LOAD(x[n + j]) + (p[n + j] + bias[n + j]),
                          LOAD(x[2 * n + j]) + (p[2 * n + j] + bias[2 * n + j]),
                          LOAD(x[3 * n + j]) + (p[3 * n + j] + bias[3 * n + j]), before[j]);
        cell[j] = s.cell, out[j] = STORE(s.out);
        gates[j] = STORE(s.i), gates[n + j] = STORE(s.f);
        gates[2 * n + j] = STORE(s.g), gates[3 * n + j] = STORE(s.o);
    }
}

GRADD_MULTIARCH static void NAME(gru)(const rnn_row_t *w, int64_t from, int64_t to) {
    const int64_t n = w->cells;
    const CELL *x = w->x, *before = w->before;
    const REAL *p = w->product, *bias = w->bias;
    REAL *kept = w->cell;
    CELL *out = w->out, *gates = w->gates;
    _Pragma("omp simd") for (int64_t j = from; j < to; j++) {
        const OF(gru_t) s =
            OF(gru_cell)(LOAD(x[j]) + (p[j] + bias[j]), LOAD(x[n + j]) + (p[n + j] + bias[n + j]),
                         LOAD(x[2 * n + j]), p[2 * n + j] + bias[2 * n + j], LOAD(before[j]));
        kept[j] = s.kept, out[j] = STORE(s.out);
        gates[j] = STORE(s.r), gates[n + j] = STORE(s.z), gates[2 * n + j] = STORE(s.n);
    }
}

GRADD_MULTIARCH static void NAME(plain)(const rnn_row_t *w, int64_t from, int64_t to) {
    const CELL *x = w->x;
    const REAL *p = w->product, *bias = w->bias;
    CELL *out = w->out, *gates = w->gates;
    const bool relu = w->relu;
    _Pragma("omp simd") for (int64_t j = from; j < to; j++) {
        const CELL y = STORE(OF(rnn_cell)(LOAD(x[j]) + (p[j] + bias[j]), relu));
        out[j] = y, gates[j] = y;
    }
}

/* Backward: x are the gates, product what comes from the next step, and gates their gradients. */
GRADD_MULTIARCH static void NAME(lstm_back_row)(const rnn_row_t *w, int64_t from, int64_t to) {
    const int64_t n = w->cells;
    const CELL *x = w->x, *dy = w->dy;
    const REAL *cell = w->cell, *before = w->before, *dout = w->product;
    REAL *dcell = w->dcell;
    CELL *dx = w->gates, *out = w->out;
    _Pragma("omp simd") for (int64_t j = from; j < to; j++) {
        OF(lstm_t) s = {0}, d;
        s.i = LOAD(x[j]), s.f = LOAD(x[n + j]), s.g = LOAD(x[2 * n + j]);
        s.o = LOAD(x[3 * n + j]), s.cell = cell[j];
        d = OF(lstm_back)(s, before[j], dout[j] + LOAD(dy[j]), dcell[j]);
        dcell[j] = d.cell, out[j] = STORE(d.out);
        dx[j] = STORE(d.i), dx[n + j] = STORE(d.f);
        dx[2 * n + j] = STORE(d.g), dx[3 * n + j] = STORE(d.o);
    }
}

GRADD_MULTIARCH static void NAME(gru_back_row)(const rnn_row_t *w, int64_t from, int64_t to) {
    const int64_t n = w->cells;
    const CELL *x = w->x, *dy = w->dy, *before = w->before;
    const REAL *kept = w->cell;
    REAL *dout = w->product;
    CELL *dx = w->gates, *dp = w->dproduct;
    _Pragma("omp simd") for (int64_t j = from; j < to; j++) {
        OF(gru_t) s = {0}, d;
        s.r = LOAD(x[j]), s.z = LOAD(x[n + j]), s.n = LOAD(x[2 * n + j]), s.kept = kept[j];
        d = OF(gru_back)(s, LOAD(before[j]), dout[j] + LOAD(dy[j]));
        dout[j] = d.out;
        dx[j] = STORE(d.r), dx[n + j] = STORE(d.z), dx[2 * n + j] = STORE(d.n);
        dp[j] = STORE(d.r), dp[n + j] = STORE(d.z), dp[2 * n + j] = STORE(d.kept);
    }
}

GRADD_MULTIARCH static void NAME(plain_back_row)(const rnn_row_t *w, int64_t from, int64_t to) {
    const CELL *x = w->x, *dy = w->dy;
    const REAL *dout = w->product;
    CELL *dx = w->gates;
    const bool relu = w->relu;
    _Pragma("omp simd") for (int64_t j = from; j < to; j++) dx[j] =
        STORE(OF(rnn_back)(LOAD(x[j]), dout[j] + LOAD(dy[j]), relu));
}

/* The state's gradient in the stored type, for the product with PROJ. */
GRADD_MULTIARCH static void NAME(add_row)(CELL *z, const REAL *x, const CELL *y, int64_t n) {
    _Pragma("omp simd") for (int64_t i = 0; i < n; i++) z[i] = STORE(x[i] + LOAD(y[i]));
}

static void NAME(to_real)(void *to, const void *from, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        ((REAL *)to)[i] = LOAD(((const CELL *)from)[i]);
}

static void NAME(from_real)(void *to, const void *from, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        ((CELL *)to)[i] = STORE(((const REAL *)from)[i]);
}

static void NAME(add)(void *z, const void *x, const void *y, int64_t n) {
    NAME(add_row)(z, x, y, n);
}

static const rnn_functions_t NAME(functions) = {
    .forward = {NAME(lstm),          NAME(gru),          NAME(plain),          NAME(plain)         },
    .back = {NAME(lstm_back_row), NAME(gru_back_row), NAME(plain_back_row), NAME(plain_back_row)},
    .to_real = NAME(to_real),
    .from_real = NAME(from_real),
    .add = NAME(add),
};
