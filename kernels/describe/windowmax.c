/* The expansion of WindowMax: the elements of all windows side by side, and the largest of each.
 * See windowmax.h. */
#include "kernels/describe/windowmax.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/rules/rules.h"

/* The windows of all axes together: m of them with `width` slots each. */
typedef struct slots_s {
    int64_t m, width;
    int64_t *place; /* Owned: [m, width], within a plane; of a slot behind a window's end 0 */
    uint8_t *full;  /* in `place`: [m, width], whether there is an element */
} slots_t;

/* Of one axis: the places [m, width] that windows take, 0 behind their end. */
static gradd_val_t places_of(gradd_builder_t *b, const int64_t *span, int64_t step,
                             const int64_t *m_width) {
    const int64_t n = m_width[0] * m_width[1];
    const gradd_type_t type = {
        GRADD_DT_I64, 2, {m_width[0], m_width[1]}
    };
    int64_t *place = malloc(sizeof *place * (size_t)(n + 1));
    if (!place) b->status = GRADD_FAIL(NOMEM, "no memory for %lld windows", (long long)m_width[0]);
    for (int64_t k = 0; place && k < n; k++) {
        const int64_t *s = span + k / m_width[1] * 2, i = k % m_width[1];
        place[k] = i < s[1] ? s[0] + i * step : 0;
    }
    gradd_val_t value = place ? b->constant(b, &type, place) : GRADD_NONE;
    free(place);
    return value;
}

static gradd_status_t find_slots(const gradd_plane_t *p, const int64_t *width, slots_t *out) {
    slots_t s = {.m = p->m[0] * p->m[1] * p->m[2], .width = width[0] * width[1] * width[2]};
    const int64_t n = s.m * s.width;
    s.place = calloc((size_t)n + 1, sizeof *s.place + 1);
    if (!s.place) return GRADD_FAIL(NOMEM, "no memory for %lld windows", (long long)s.m);
    s.full = (uint8_t *)(s.place + n);
    for (int64_t k = 0; k < n; k++) {
        int64_t window = k / s.width, slot = k % s.width, place = 0, size = 1;
        bool full = true;
        for (int a = GRADD_WINDOW_AXES - 1; a >= 0; a--) {
            const int64_t *span = gradd_plane_span(p, a, window % p->m[a]), i = slot % width[a];
            full = full && i < span[1];
            place += (span[0] + i * p->step[a]) * size;
            size *= p->n[a], window /= p->m[a], slot /= width[a];
        }
        s.full[k] = full;
        if (full) s.place[k] = place;
    }
    *out = s;
    return GRADD_OK;
}

/* [planes, m, width] of x, -inf where a window has no element. */
static gradd_val_t window_slots(gradd_expand_t *e, const gradd_plane_t *p, const int64_t *width,
                                const slots_t *s) {
    static const int64_t turned[] = {0, 1, 3, 5, 2, 4, 6};
    gradd_builder_t *b = e->b;
    const gradd_type_t full = {
        GRADD_DT_BOOL, 2, {s->m, s->width}
    };
    const int64_t dims[] = {p->planes, p->n[0], p->n[1], p->n[2]};
    gradd_val_t v = gradd_reshape_to(b, gradd_wide(b, e->in[0]), dims, 4);
    for (int a = 0; a < GRADD_WINDOW_AXES && !b->status; a++) {
        const gradd_attr_t axis = gradd_make_int("axis", 1 + 2 * a);
        const int64_t m_width[] = {p->m[a], width[a]};
        gradd_val_t in[2] = {v, places_of(b, gradd_plane_span(p, a, 0), p->step[a], m_width)};
        v = gradd_emit_attrs(b, "Gather", in, 2, &axis, 1);
    }
    v = gradd_transpose(b, v, turned, 7);
    v = gradd_reshape_to(b, v, (int64_t[]){p->planes, s->m, s->width}, 3);
    if (b->status) return GRADD_NONE;
    gradd_val_t least = gradd_const_scalar(b, gradd_val_type(b, v)->dtype, -INFINITY);
    return GRADD_EMIT(b, "Where", b->constant(b, &full, s->full), v, least);
}

/* The slot of the largest: the first one, or that of the last NaN. [planes, m, 1] */
static gradd_val_t largest_slot(gradd_builder_t *b, gradd_val_t v) {
    const gradd_attr_t axis = gradd_make_int("axis", 2), keep = gradd_make_int("keepdims", 1);
    const gradd_attr_t last[] = {axis, gradd_make_int("select_last_index", 1)};
    const int64_t two = 2;
    gradd_val_t nan = gradd_cast(b, GRADD_EMIT(b, "IsNaN", v), GRADD_DT_I32);
    gradd_val_t in[2] = {nan, gradd_const_i64s(b, &two, 1)};
    gradd_val_t any = gradd_emit_attrs(b, "ReduceMax", in, 2, &keep, 1);
    gradd_val_t number = gradd_emit_attrs(b, "ArgMax", &v, 1, &axis, 1);
    gradd_val_t of_nan = gradd_emit_attrs(b, "ArgMax", &nan, 1, last, 2);
    return GRADD_EMIT(b, "Where", gradd_cast(b, any, GRADD_DT_BOOL), of_nan, number);
}

static gradd_status_t expand_slots(gradd_expand_t *e, const gradd_plane_t *p, const slots_t *s,
                                   const int64_t *width, const gradd_type_t *y) {
    gradd_builder_t *b = e->b;
    const gradd_attr_t axis = gradd_make_int("axis", 2);
    gradd_val_t v = window_slots(e, p, width, s);
    gradd_val_t both[2] = {v, largest_slot(b, v)};
    v = gradd_emit_attrs(b, "GatherElements", both, 2, &axis, 1);
    e->out[0] = gradd_cast(b, gradd_reshape_to(b, v, y->dims, y->rank), y->dtype);
    if (e->n_out < 2 || b->status) return b->status;
    const gradd_type_t flat = {GRADD_DT_I64, 1, {s->m * s->width}};
    const gradd_val_t ends[] = {gradd_const_scalar(b, GRADD_DT_I64, 0),
                                gradd_const_scalar(b, GRADD_DT_I64, (double)flat.dims[0]),
                                gradd_const_scalar(b, GRADD_DT_I64, (double)s->width)};
    gradd_val_t first =
        gradd_reshape_to(b, gradd_emit_n(b, "Range", 3, ends), (int64_t[]){s->m, 1}, 2);
    gradd_val_t at = GRADD_EMIT(b, "Gather", b->constant(b, &flat, s->place),
                                GRADD_EMIT(b, "Add", both[1], first));
    e->out[1] = gradd_reshape_to(b, at, y->dims, y->rank);
    return b->status;
}

gradd_status_t gradd_window_max_expand(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    gradd_view_t in[1 + GRADD_WINDOW_AXES];
    gradd_type_t y = *gradd_val_type(b, e->in[0]);
    int64_t width[GRADD_WINDOW_AXES] = {1, 1, 1};
    for (int i = 0; i < e->n_in; i++)
        in[i] = (gradd_view_t){*gradd_val_type(b, e->in[i]), (void *)b->data(b, e->in[i])};
    for (int i = 1; i < e->n_in; i++)
        y.dims[y.rank - e->n_in + i] = in[i].type.dims[0];
    const gradd_launch_t as = {.attrs = e->attrs, .n_in = e->n_in, .in = in};
    const gradd_plane_t p = gradd_plane_of(&as, &in[0].type, &y, 1);
    if (!gradd_type_count(&in[0].type) || !gradd_type_count(&y)) { /* no window has an element */
        e->out[0] = gradd_filled(b, &y, -INFINITY);
        y.dtype = GRADD_DT_I64;
        if (e->n_out > 1) e->out[1] = gradd_filled(b, &y, 0);
        return b->status;
    }
    for (int a = 0; a < GRADD_WINDOW_AXES; a++)
        for (int64_t j = 0; p.span[a] && j < p.m[a]; j++) {
            const int64_t n = p.span[a][2 * j + 1];
            if (!n) return GRADD_FAIL(UNSUPPORTED, "WindowMax of an empty window has no expansion");
            if (n > width[a]) width[a] = n;
        }
    slots_t slots = {0};
    GRADD_TRY(find_slots(&p, width, &slots));
    gradd_status_t status = expand_slots(e, &p, &slots, width, &y);
    free(slots.place);
    return status;
}

gradd_status_t gradd_window_max_grad_expand(gradd_expand_t *e) {
    gradd_builder_t *b = e->b;
    const gradd_attr_t attrs[2] = {gradd_make_int("axis", 1),
                                   gradd_make_string("reduction", "add")};
    const gradd_type_t dy = *gradd_val_type(b, e->in[GRADD_WINDOW_DY]);
    gradd_type_t dx = dy;
    int64_t planes = 1;
    for (int i = GRADD_WINDOW_TURNED; i < e->n_in; i++)
        dx.dims[dy.rank - e->n_in + i] = gradd_val_type(b, e->in[i])->dims[0];
    for (int i = 0; i < dy.rank - (e->n_in - GRADD_WINDOW_TURNED); i++)
        planes *= dy.dims[i];
    gradd_val_t v = gradd_wide(b, e->in[GRADD_WINDOW_DY]);
    gradd_type_t flat = {
        gradd_val_type(b, v)->dtype, 2, {planes, 1}
    };
    int64_t from[2] = {planes, 1};
    for (int i = dy.rank - (e->n_in - GRADD_WINDOW_TURNED); i < dy.rank; i++)
        flat.dims[1] *= dx.dims[i], from[1] *= dy.dims[i];
    gradd_val_t in[3] = {gradd_filled(b, &flat, 0),
                         gradd_reshape_to(b, e->in[GRADD_WINDOW_INDEX], from, 2),
                         gradd_reshape_to(b, v, from, 2)};
    v = gradd_emit_attrs(b, "ScatterElements", in, 3, attrs, 2);
    e->out[0] = gradd_cast(b, gradd_reshape_to(b, v, dx.dims, dx.rank), dy.dtype);
    return b->status;
}
