/* Convolutions by plain loops, and what all ways of computing them share. See conv.h. */
#include "kernels/cpu/conv/conv.h"

#include <string.h>

#include "kernels/describe/dispatch.h"

/* ---- nodes and launches ---------------------------------------------------------------------- */

gradd_status_t gradd_conv_of_node(const gradd_infer_t *c, gradd_conv_t *out,
                                  gradd_conv_made_t *out_made) {
    return gradd_conv_of_op(c->op, c->in, c->n_in, c->attrs, out, out_made);
}

gradd_status_t gradd_conv_of_launch(const gradd_launch_t *r, gradd_conv_t *out,
                                    gradd_conv_made_t *out_made) {
    return gradd_conv_of_op(r->op, r->in, r->n_in, r->attrs, out, out_made);
}

static const void *data_of(const gradd_launch_t *r, int i) {
    return i < r->n_in && r->in[i].type.dtype ? r->in[i].data : NULL;
}

gradd_conv_memory_t gradd_conv_memory(const gradd_launch_t *r, gradd_conv_made_t made) {
    gradd_conv_memory_t m = {.workspace = r->workspace};
    void *out = r->out[0].data;
    switch (made) {
    case GRADD_CONV_MAKES_Y:
        m.x = r->in[GRADD_CONV_X].data, m.w = r->in[GRADD_CONV_W].data, m.y = out;
        m.bias = data_of(r, GRADD_CONV_BIAS);
        break;
    case GRADD_CONV_MAKES_X:
        m.y = r->in[GRADD_CONV_DATA_DY].data, m.w = r->in[GRADD_CONV_DATA_W].data, m.x = out;
        m.bias = data_of(r, GRADD_CONV_DATA_BIAS);
        break;
    case GRADD_CONV_MAKES_W:
        m.x = r->in[GRADD_CONV_WEIGHT_X].data, m.y = r->in[GRADD_CONV_WEIGHT_DY].data, m.w = out;
        break;
    }
    return m;
}

/* ---- the definition -------------------------------------------------------------------------- */

typedef struct three_s {
    int64_t v[GRADD_CONV_AXES];
} three_t;

static three_t split(int64_t at, const int64_t *size) {
    return (three_t){
        {at / (size[1] * size[2]), at / size[2] % size[1], at % size[2]}
    };
}

static int64_t join(const int64_t *at, const int64_t *size) {
    return (at[0] * size[1] + at[1]) * size[2] + at[2];
}

/* The element of x that position o reads by tap k, -1: a zero. */
static int64_t read_by(const gradd_conv_t *v, int64_t o, int64_t k) {
    const three_t position = split(o, v->y), tap = split(k, v->kernel);
    three_t at;
    for (int i = 0; i < GRADD_CONV_AXES; i++) {
        at.v[i] = gradd_conv_at(v, i, position.v[i], tap.v[i]);
        if (at.v[i] < 0 || at.v[i] >= v->x[i]) return -1;
    }
    return join(at.v, v->x);
}

/* The position that reads element i of x by tap k, -1: there is none. */
static int64_t reader_of(const gradd_conv_t *v, int64_t i, int64_t k) {
    const three_t element = split(i, v->x), tap = split(k, v->kernel);
    three_t o;
    for (int a = 0; a < GRADD_CONV_AXES; a++) {
        o.v[a] = gradd_conv_reader(v, a, element.v[a], tap.v[a]);
        if (o.v[a] < 0) return -1;
    }
    return join(o.v, v->y);
}

/* Sizes of the loops. */
typedef struct counts_s {
    int64_t in, out;    /* channels of a group */
    int64_t x, y, taps; /* elements of a channel */
} counts_t;

static counts_t count(const gradd_conv_t *v) {
    return (counts_t){v->in / v->groups, v->out / v->groups, gradd_conv_volume(v->x),
                      gradd_conv_volume(v->y), gradd_conv_volume(v->kernel)};
}

/* Where element i of a channel of x lies; the same of y. */
static int64_t x_at(const gradd_conv_t *v, int64_t image, int64_t channel, int64_t i) {
    return gradd_conv_element(v, v->in, gradd_conv_volume(v->x), image, channel, i);
}
static int64_t y_at(const gradd_conv_t *v, int64_t image, int64_t channel, int64_t o) {
    return gradd_conv_element(v, v->out, gradd_conv_volume(v->y), image, channel, o);
}

static gradd_status_t plain_y(const gradd_conv_t *v, const gradd_conv_memory_t *t) {
    const counts_t n = count(v);
    GRADD_SWITCH_FLOAT(v->dtype, T, {
        const T *x = t->x;
        for (int64_t at = 0; at < v->images * v->out * n.y; at++) {
            const int64_t o = at % n.y, m = at / n.y % v->out, image = at / n.y / v->out;
            const T *w = (const T *)t->w + m * n.in * n.taps;
            double sum = t->bias ? (double)((const T *)t->bias)[m] : 0;
            for (int64_t c = 0; c < n.in; c++)
                for (int64_t k = 0; k < n.taps; k++) {
                    const int64_t i = read_by(v, o, k);
                    if (i >= 0)
                        sum += (double)x[x_at(v, image, m / n.out * n.in + c, i)] *
                               (double)w[c * n.taps + k];
                }
            ((T *)t->y)[y_at(v, image, m, o)] = (T)sum;
        }
    });
    return GRADD_OK;
}

static gradd_status_t plain_x(const gradd_conv_t *v, const gradd_conv_memory_t *t) {
    const counts_t n = count(v);
    GRADD_SWITCH_FLOAT(v->dtype, T, {
        const T *y = t->y;
        for (int64_t at = 0; at < v->images * v->in * n.x; at++) {
            const int64_t i = at % n.x, channel = at / n.x % v->in, image = at / n.x / v->in;
            const int64_t first = channel / n.in * n.out, c = channel % n.in;
            const T *w = (const T *)t->w + (first * n.in + c) * n.taps;
            double sum = t->bias ? (double)((const T *)t->bias)[channel] : 0;
            for (int64_t m = 0; m < n.out; m++)
                for (int64_t k = 0; k < n.taps; k++) {
                    const int64_t o = reader_of(v, i, k);
                    if (o >= 0)
                        sum += (double)y[y_at(v, image, first + m, o)] *
                               (double)w[m * n.in * n.taps + k];
                }
            ((T *)t->x)[x_at(v, image, channel, i)] = (T)sum;
        }
    });
    return GRADD_OK;
}

static gradd_status_t plain_w(const gradd_conv_t *v, const gradd_conv_memory_t *t) {
    const counts_t n = count(v);
    GRADD_SWITCH_FLOAT(v->dtype, T, {
        const T *x = t->x, *y = t->y;
        for (int64_t at = 0; at < v->out * n.in * n.taps; at++) {
            const int64_t k = at % n.taps, c = at / n.taps % n.in, m = at / n.taps / n.in;
            double sum = 0;
            for (int64_t image = 0; image < v->images; image++)
                for (int64_t o = 0; o < n.y; o++) {
                    const int64_t i = read_by(v, o, k);
                    if (i >= 0)
                        sum += (double)x[x_at(v, image, m / n.out * n.in + c, i)] *
                               (double)y[y_at(v, image, m, o)];
                }
            ((T *)t->w)[at] = (T)sum;
        }
    });
    return GRADD_OK;
}

gradd_status_t gradd_conv_ref(const gradd_launch_t *r) {
    gradd_conv_t v;
    gradd_conv_made_t made;
    GRADD_TRY(gradd_conv_of_launch(r, &v, &made));
    const gradd_conv_memory_t t = gradd_conv_memory(r, made);
    switch (made) {
    case GRADD_CONV_MAKES_X:
        return plain_x(&v, &t);
    case GRADD_CONV_MAKES_W:
        return plain_w(&v, &t);
    case GRADD_CONV_MAKES_Y:
        break;
    }
    return plain_y(&v, &t);
}
