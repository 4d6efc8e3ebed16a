/* The definition of recurrent layers: plain loops, all in double. See recurrent.h. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/recurrent/recurrent.h"
#include "kernels/describe/recurrence.h"
#include "kernels/math/formulas.h"

#define REAL    double
#define NAME(x) x##_f64
#include "kernels/math/recurrent.h"
#undef REAL
#undef NAME

/* State and cells of one sequence, their gradients, and the gates of a step. */
typedef struct plain_s {
    const gradd_launch_t *r;
    gradd_rnn_t v;
    double *state, *cells, *gates, *product, *out;
    double *room;
} plain_t;

static double get(const gradd_view_t *list, int n, int i, int64_t at) {
    if (i >= n || list[i].type.dtype == GRADD_DT_NONE) return 0;
    return gradd_real_at(list[i].data, at, (int)list[i].type.dtype);
}

#define IN(i, at) get(p->r->in, p->r->n_in, (i), (at))

static void put(const plain_t *p, int j, int64_t at, double x) {
    if (j >= p->r->n_out || !p->r->out[j].data) return;
    if (p->r->out[j].type.dtype == GRADD_DT_F64)
        ((double *)p->r->out[j].data)[at] = x;
    else
        ((float *)p->r->out[j].data)[at] = (float)x;
}

static gradd_status_t open_plain(plain_t *p) {
    const gradd_rnn_t *v = &p->v;
    const int64_t all = v->state + v->cells * (2 + 2 * v->gates);
    p->room = calloc((size_t)all + 1, sizeof(double));
    if (!p->room) return GRADD_FAIL(NOMEM, "recurrent layer");
    p->state = p->room, p->cells = p->state + v->state;
    p->gates = p->cells + v->cells, p->product = p->gates + v->gates * v->cells;
    p->out = p->product + v->gates * v->cells;
    return GRADD_OK;
}

/* ---- forward --------------------------------------------------------------------------------- */

/* The state times U^T, and the bias, into p->product. */
static void multiply(const plain_t *p) {
    const gradd_rnn_t *v = &p->v;
    for (int64_t j = 0; j < v->gates * v->cells; j++) {
        double sum = v->has_bias ? IN(GRADD_RNN_BIAS, j) : 0;
        for (int64_t k = 0; k < v->state; k++)
            sum += p->state[k] * IN(GRADD_RNN_U, j * v->state + k);
        p->product[j] = sum;
    }
}

/* Cell j of row `row` of all steps and sequences; its output into p->out. */
static void step_cell(const plain_t *p, int64_t row, int64_t j) {
    const gradd_rnn_t *v = &p->v;
    const int64_t n = v->cells, at = row * v->gates * n;
    double a[4], s[4] = {0};
    for (int g = 0; g < v->gates; g++)
        a[g] = IN(GRADD_RNN_X, at + g * n + j);
    const double *h = p->product + j;
    if (v->kind == GRADD_RNN_LSTM) {
        lstm_t_f64 c =
            lstm_cell_f64(a[0] + h[0], a[1] + h[n], a[2] + h[2 * n], a[3] + h[3 * n], p->cells[j]);
        s[0] = c.i, s[1] = c.f, s[2] = c.g, s[3] = c.o;
        p->cells[j] = c.cell, p->out[j] = c.out;
        put(p, GRADD_RNN_KEPT, row * n + j, c.cell);
    } else if (v->kind == GRADD_RNN_GRU) {
        gru_t_f64 c = gru_cell_f64(a[0] + h[0], a[1] + h[n], a[2], h[2 * n], p->state[j]);
        s[0] = c.r, s[1] = c.z, s[2] = c.n;
        p->out[j] = c.out;
        put(p, GRADD_RNN_KEPT, row * n + j, c.kept);
    } else {
        s[0] = p->out[j] = rnn_cell_f64(a[0] + h[0], v->kind == GRADD_RNN_RELU);
    }
    for (int g = 0; g < v->gates; g++)
        put(p, GRADD_RNN_GATES, at + g * n + j, s[g]);
}

static void forward(const plain_t *p, int64_t b) {
    const gradd_rnn_t *v = &p->v;
    for (int64_t k = 0; k < v->state; k++)
        p->state[k] = IN(GRADD_RNN_STATE, b * v->state + k);
    for (int64_t j = 0; j < v->cells; j++)
        p->cells[j] = IN(GRADD_RNN_CELLS, b * v->cells + j);
    for (int64_t i = 0; i < v->steps; i++) {
        const int64_t row = gradd_rnn_at(v, i) * v->batch + b;
        multiply(p);
        for (int64_t j = 0; j < v->cells; j++)
            step_cell(p, row, j);
        for (int64_t k = 0; k < v->state; k++) {
            double sum = v->has_proj ? 0 : p->out[k];
            for (int64_t j = 0; v->has_proj && j < v->cells; j++)
                sum += p->out[j] * IN(GRADD_RNN_PROJ, k * v->cells + j);
            p->state[k] = sum;
            put(p, GRADD_RNN_Y, row * v->state + k, sum);
        }
    }
    for (int64_t k = 0; k < v->state; k++)
        put(p, GRADD_RNN_LAST, b * v->state + k, p->state[k]);
    for (int64_t j = 0; j < v->cells; j++)
        put(p, GRADD_RNN_LAST_CELLS, b * v->cells + j, p->cells[j]);
}

gradd_status_t gradd_rnn_ref(const gradd_launch_t *r) {
    plain_t p = {.r = r};
    GRADD_TRY(gradd_rnn_of(r->in, r->n_in, r->attrs, &p.v));
    GRADD_TRY(open_plain(&p));
    for (int64_t b = 0; b < p.v.batch; b++)
        forward(&p, b);
    free(p.room);
    return GRADD_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Of cell j at step i, whose output has the gradient p->out[j]: p->gates and p->product become the
 * gradients of the two products. Returns what goes to the state before, but by the product. */
static double back_cell(const plain_t *p, int64_t i, int64_t b, int64_t j) {
    const gradd_rnn_t *v = &p->v;
    const int64_t n = v->cells, row = gradd_rnn_at(v, i) * v->batch + b, at = row * v->gates * n;
    const int64_t before = (i ? gradd_rnn_at(v, i - 1) : 0) * v->batch + b;
    double s[4], kept = IN(GRADD_RNN_GRAD_KEPT, row * n + j), dout = p->out[j], rest = 0;
    double *d = p->gates + j;
    for (int g = 0; g < v->gates; g++)
        s[g] = IN(GRADD_RNN_GRAD_GATES, at + g * n + j);
    if (v->kind == GRADD_RNN_LSTM) {
        const double c =
            i ? IN(GRADD_RNN_GRAD_KEPT, before * n + j) : IN(GRADD_RNN_GRAD_CELLS, b * n + j);
        const lstm_t_f64 whole = {s[0], s[1], s[2], s[3], kept, 0};
        lstm_t_f64 g = lstm_back_f64(whole, c, dout, p->cells[j]);
        d[0] = g.i, d[n] = g.f, d[2 * n] = g.g, d[3 * n] = g.o;
        p->cells[j] = g.cell;
        put(p, GRADD_RNN_PROJECTS, row * n + j, g.out);
    } else if (v->kind == GRADD_RNN_GRU) {
        const double h =
            i ? IN(GRADD_RNN_GRAD_Y, before * n + j) : IN(GRADD_RNN_GRAD_STATE, b * n + j);
        gru_t_f64 g = gru_back_f64((gru_t_f64){s[0], s[1], s[2], kept, 0}, h, dout);
        d[0] = g.r, d[n] = g.z, d[2 * n] = g.n;
        p->product[2 * n + j] = g.kept;
        rest = g.out;
    } else {
        d[0] = rnn_back_f64(s[0], dout, v->kind == GRADD_RNN_RELU);
    }
    for (int g = 0; g < v->gates; g++) {
        if (v->kind != GRADD_RNN_GRU || g < 2) p->product[g * n + j] = d[g * n];
        put(p, GRADD_RNN_DX, at + g * n + j, d[g * n]);
        put(p, GRADD_RNN_DPRODUCT, at + g * n + j, p->product[g * n + j]);
    }
    return rest;
}

static void back_step(const plain_t *p, int64_t i, int64_t b) {
    const gradd_rnn_t *v = &p->v;
    const int64_t row = gradd_rnn_at(v, i) * v->batch + b;
    for (int64_t k = 0; k < v->state; k++) {
        p->state[k] += IN(GRADD_RNN_GRAD_DY, row * v->state + k);
        put(p, GRADD_RNN_DPROJECTED, row * v->state + k, p->state[k]);
    }
    for (int64_t j = 0; j < v->cells; j++) {
        double sum = v->has_proj ? 0 : p->state[j];
        for (int64_t k = 0; v->has_proj && k < v->state; k++)
            sum += p->state[k] * IN(GRADD_RNN_GRAD_PROJ, k * v->cells + j);
        p->out[j] = sum;
    }
    for (int64_t k = 0; k < v->state; k++)
        p->state[k] = 0;
    for (int64_t j = 0; j < v->cells; j++) {
        const double rest = back_cell(p, i, b, j);
        if (!v->has_proj) p->state[j] = rest;
    }
    for (int64_t k = 0; k < v->state; k++)
        for (int64_t j = 0; j < v->gates * v->cells; j++)
            p->state[k] += p->product[j] * IN(GRADD_RNN_GRAD_U, j * v->state + k);
}

static void backward(const plain_t *p, int64_t b) {
    const gradd_rnn_t *v = &p->v;
    for (int64_t k = 0; k < v->state; k++)
        p->state[k] = IN(GRADD_RNN_GRAD_DLAST, b * v->state + k);
    for (int64_t j = 0; j < v->cells; j++)
        p->cells[j] = IN(GRADD_RNN_GRAD_DLAST_CELLS, b * v->cells + j);
    for (int64_t i = v->steps - 1; i >= 0; i--)
        back_step(p, i, b);
    for (int64_t k = 0; k < v->state; k++)
        put(p, GRADD_RNN_DSTATE, b * v->state + k, p->state[k]);
    for (int64_t j = 0; j < v->cells; j++)
        put(p, GRADD_RNN_DCELLS, b * v->cells + j, p->cells[j]);
}

gradd_status_t gradd_rnn_grad_ref(const gradd_launch_t *r) {
    plain_t p = {.r = r};
    GRADD_TRY(gradd_rnn_of_grad(r->in, r->n_in, r->attrs, &p.v));
    GRADD_TRY(open_plain(&p));
    for (int64_t b = 0; b < p.v.batch; b++)
        backward(&p, b);
    free(p.room);
    return GRADD_OK;
}
