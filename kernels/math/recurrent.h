/* One cell of a recurrent layer at one step, forward and backward, written once for f32 and f64.
 *
 * Included with REAL (the C type) and NAME(x) (appends a suffix) defined, once per type, behind
 * kernels/math/formulas.h; there is no guard on purpose. No branches, so that they vectorise inside
 * `#pragma omp simd` loops. Gates are in torch's order.
 */

GRADD_HD REAL NAME(rnn_sigmoid)(REAL x) {
    return 1 / (1 + vexp(-x));
}

typedef struct NAME(lstm_s) {
    REAL i, f, g, o, cell, out;
} NAME(lstm_t);

/* i, f, g, o in front of their functions; the cell of the step before. */
GRADD_HD NAME(lstm_t) NAME(lstm_cell)(REAL i, REAL f, REAL g, REAL o, REAL cell) {
    NAME(lstm_t) s;
    s.i = NAME(rnn_sigmoid)(i), s.f = NAME(rnn_sigmoid)(f);
    s.g = vtanh(g), s.o = NAME(rnn_sigmoid)(o);
    s.cell = s.f * cell + s.i * s.g;
    s.out = s.o * vtanh(s.cell);
    return s;
}

/* s: the gates and the cell; the cell before; the gradients of out and cell. Gives the gradients in
 * front of the gates' functions, that of the cell before, and out. */
GRADD_HD NAME(lstm_t) NAME(lstm_back)(NAME(lstm_t) s, REAL before, REAL dout, REAL dcell) {
    NAME(lstm_t) d;
    const REAL t = vtanh(s.cell);
    dcell += dout * s.o * (1 - t * t);
    d.i = dcell * s.g * s.i * (1 - s.i);
    d.f = dcell * before * s.f * (1 - s.f);
    d.g = dcell * s.i * (1 - s.g * s.g);
    d.o = dout * t * s.o * (1 - s.o);
    d.cell = dcell * s.f;
    d.out = s.o * t;
    return d;
}

typedef struct NAME(gru_s) {
    REAL r, z, n, kept, out;
} NAME(gru_t);

/* r, z: the sums of both products; the input's product of n, and the state's; the state before. */
GRADD_HD NAME(gru_t) NAME(gru_cell)(REAL r, REAL z, REAL n, REAL kept, REAL state) {
    NAME(gru_t) s;
    s.r = NAME(rnn_sigmoid)(r), s.z = NAME(rnn_sigmoid)(z);
    s.n = vtanh(n + s.r * kept);
    s.kept = kept;
    s.out = (state - s.n) * s.z + s.n;
    return s;
}

/* Gives the gradients in front of the functions, kept: of the state's product of n; out: of the
 * state before, without what comes by the product. */
GRADD_HD NAME(gru_t) NAME(gru_back)(NAME(gru_t) s, REAL before, REAL dout) {
    NAME(gru_t) d;
    d.n = dout * (1 - s.z) * (1 - s.n * s.n);
    d.z = dout * (before - s.n) * s.z * (1 - s.z);
    d.r = d.n * s.kept * s.r * (1 - s.r);
    d.kept = d.n * s.r;
    d.out = dout * s.z;
    return d;
}

GRADD_HD REAL NAME(rnn_cell)(REAL x, bool relu) {
    return relu ? (x < 0 ? 0 : x) : vtanh(x);
}

/* y: what rnn_cell gave. */
GRADD_HD REAL NAME(rnn_back)(REAL y, REAL dout, bool relu) {
    return relu ? (y <= 0 ? 0 : dout) : dout * (1 - y * y);
}
