/* Depthwise convolutions in the element type T; NAME(x) is a name for that type. Included by
 * conv_depthwise.c, once for each type, and by nothing else. */

/* out[i] = sum over taps of w[k] from[offset[k] + i], for i < n; up to GROUP_BYTES more are read
 * and written. An element is one chain of multiply-adds, so its bits do not depend on `bytes`. */
#define CORRELATE(name, bytes, target)                                                             \
    GRADD_FUSED target static void name(const T *from, const depthwise_t *k, const T *w,           \
                                        int64_t n, T *out) {                                       \
        GRADD_FUSED_BLOCK                                                                          \
        typedef T vec_t __attribute__((vector_size(bytes), aligned(sizeof(T)), may_alias));        \
        enum { EACH = (bytes) / sizeof(T), PARTS = GROUP_BYTES / (bytes) };                        \
        for (int64_t i = 0; i < n; i += GROUP_BYTES / (int64_t)sizeof(T)) {                        \
            vec_t sum[PARTS] = {0};                                                                \
            for (int64_t tap = 0; tap < k->taps; tap++) {                                          \
                const T *x = from + k->offset[tap] + i, f = w[tap];                                \
                _Pragma("GCC unroll 8") for (int v = 0; v < PARTS; v++) sum[v] +=                  \
                    f * *(const vec_t *)(x + v * EACH);                                            \
            }                                                                                      \
            for (int v = 0; v < PARTS; v++)                                                        \
                *(vec_t *)(out + i + v * EACH) = sum[v];                                           \
        }                                                                                          \
    }

/* total[k] += sum over i < n of y[i] from[offset[k] + i]; y is zero from n on, up to a multiple of
 * LANE_BYTES. Sums have as many lanes with either length of vectors. */
#define ADD_PRODUCTS(name, bytes, target)                                                          \
    GRADD_FUSED target static void name(const T *from, const depthwise_t *k, const T *y,           \
                                        int64_t n, double *total) {                                \
        GRADD_FUSED_BLOCK                                                                          \
        typedef T vec_t __attribute__((vector_size(bytes), aligned(sizeof(T)), may_alias));        \
        enum { EACH = (bytes) / sizeof(T), PARTS = LANE_BYTES / (bytes), LANES = EACH * PARTS };   \
        for (int64_t first = 0; first < k->taps; first += TAPS) {                                  \
            const T *x[TAPS];                                                                      \
            vec_t sum[TAPS][PARTS] = {0};                                                          \
            for (int j = 0; j < TAPS; j++)                                                         \
                x[j] = from + k->offset[first + j < k->taps ? first + j : first];                  \
            for (int64_t i = 0; i < n; i += LANES)                                                 \
                _Pragma("GCC unroll 4") for (int v = 0; v < PARTS; v++) {                          \
                    const vec_t here = *(const vec_t *)(y + i + v * EACH);                         \
                    _Pragma("GCC unroll 8") for (int j = 0; j < TAPS; j++) sum[j][v] +=            \
                        here * *(const vec_t *)(x[j] + i + v * EACH);                              \
                }                                                                                  \
            for (int j = 0; j < TAPS && first + j < k->taps; j++)                                  \
                for (int v = 0; v < PARTS; v++)                                                    \
                    for (int e = 0; e < EACH; e++)                                                 \
                        total[first + j] += (double)sum[j][v][e];                                  \
        }                                                                                          \
    }

CORRELATE(NAME(correlate_narrow), GRADD_VECTOR_BYTES, )
CORRELATE(NAME(correlate_wide), GRADD_WIDE_BYTES, GRADD_WIDE)
ADD_PRODUCTS(NAME(add_products_narrow), GRADD_VECTOR_BYTES, )
ADD_PRODUCTS(NAME(add_products_wide), GRADD_WIDE_BYTES, GRADD_WIDE)
#undef CORRELATE
#undef ADD_PRODUCTS

/* A row of the source into the field, from its first phase and row on. */
static void NAME(put_row)(const depthwise_t *k, const T *row, T *to) {
    const depthwise_source_t *s = &k->source;
    const int64_t phases = k->phase[2], step = s->step[2];
    int64_t at = s->from * step + s->front[2]; /* index along the padded axis */
    if (phases == 1 && step == 1) {
        if (s->to > s->from) memcpy(to + at, row + s->from, (size_t)(s->to - s->from) * sizeof(T));
        return;
    }
    int64_t phase = at % phases, place = at / phases;
    for (int64_t i = s->from; i < s->to; i++) {
        to[phase * k->block + place] = row[i];
        phase += step;
        while (phase >= phases)
            phase -= phases, place++;
    }
}

/* A channel of the source into the field, whose other elements are zeros. */
static void NAME(put)(const depthwise_t *k, const T *plane, T *field) {
    const depthwise_source_t *s = &k->source;
    for (int64_t z = 0; z < s->size[0]; z++)
        for (int64_t y = 0; y < s->size[1]; y++) {
            const int64_t at =
                field_row(k, z * s->step[0] + s->front[0], y * s->step[1] + s->front[1]);
            if (at >= 0) NAME(put_row)(k, plane + (z * s->size[1] + y) * s->size[2], field + at);
        }
}

/* Rows of a result lie in the line of sums as the field's rows do. */
static void NAME(take)(const depthwise_t *k, const T *line, T start, bool add, T *plane) {
    const int64_t *n = k->result;
    for (int64_t z = 0; z < n[0]; z++)
        for (int64_t y = 0; y < n[1]; y++, plane += n[2]) {
            const T *row = line + (z * k->field[1] + y) * k->field[2];
            for (int64_t i = 0; i < n[2]; i++)
                plane[i] = (add ? plane[i] : start) + row[i];
        }
}

/* dy as a line, between zeros. */
static void NAME(put_line)(const depthwise_t *k, const T *plane, T *line) {
    const int64_t *n = k->result;
    for (int64_t z = 0; z < n[0]; z++)
        for (int64_t y = 0; y < n[1]; y++, plane += n[2])
            memcpy(line + (z * k->field[1] + y) * k->field[2], plane, (size_t)n[2] * sizeof(T));
}

static void NAME(correlate)(const depthwise_t *k, const T *field, const T *w, T *line) {
    (GRADD_IS_WIDE() ? NAME(correlate_wide) : NAME(correlate_narrow))(field, k, w, k->length, line);
}

static void NAME(y_plane)(const depthwise_t *k, const gradd_conv_memory_t *m, int64_t at,
                          const depthwise_room_t *room) {
    const int64_t channel = at % k->v.out, image = at / k->v.out;
    const int64_t from = image * k->v.in + channel / k->each;
    NAME(put)(k, (const T *)m->x + from * k->x, room->field);
    NAME(correlate)(k, room->field, (const T *)m->w + channel * k->taps, room->line);
    NAME(take)(k, room->line, m->bias ? ((const T *)m->bias)[channel] : 0, false,
               (T *)m->y + at * k->y);
}

static void NAME(x_plane)(const depthwise_t *k, const gradd_conv_memory_t *m, int64_t at,
                          const depthwise_room_t *room) {
    const int64_t channel = at % k->v.in, image = at / k->v.in;
    for (int64_t j = 0; j < k->each; j++) {
        const int64_t from = channel * k->each + j;
        NAME(put)(k, (const T *)m->y + (image * k->v.out + from) * k->y, room->field);
        NAME(correlate)(k, room->field, (const T *)m->w + from * k->taps, room->line);
        NAME(take)(k, room->line, m->bias ? ((const T *)m->bias)[channel] : 0, j > 0,
                   (T *)m->x + at * k->x);
    }
}

static void NAME(w_plane)(const depthwise_t *k, const gradd_conv_memory_t *m, int64_t at,
                          const depthwise_room_t *room) {
    memset(room->total, 0, (size_t)k->taps * sizeof(double));
    for (int64_t image = 0; image < k->v.images; image++) {
        NAME(put)(k, (const T *)m->x + (image * k->v.in + at / k->each) * k->x, room->field);
        NAME(put_line)(k, (const T *)m->y + (image * k->v.out + at) * k->y, room->line);
        (GRADD_IS_WIDE() ? NAME(add_products_wide) : NAME(add_products_narrow))(
            room->field, k, room->line, k->length, room->total);
    }
    for (int64_t tap = 0; tap < k->taps; tap++)
        ((T *)m->w)[at * k->taps + tap] = (T)room->total[tap];
}

static void NAME(plane)(const depthwise_t *k, const gradd_conv_memory_t *m, int64_t at,
                        const depthwise_room_t *room) {
    switch (k->made) {
    case GRADD_CONV_MAKES_Y:
        NAME(y_plane)(k, m, at, room);
        break;
    case GRADD_CONV_MAKES_X:
        NAME(x_plane)(k, m, at, room);
        break;
    case GRADD_CONV_MAKES_W:
        NAME(w_plane)(k, m, at, room);
        break;
    }
}
