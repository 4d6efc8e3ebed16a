/* Depthwise convolutions over channels-last tensors of the element type T; NAME(x) is a name for
 * that type, WIDE and NARROW convert an element from and to f32, VECTORS_OF(n) has the
 * type vec_t of n floats, and LOAD(p) reads one. Included by conv_depthwise_last.c, once for each
 * type, and by nothing else. */

/* Where the row that is read by a tap of the first two axes begins; NULL: outside. */
static inline const T *NAME(row_read)(const last_t *k, const task_t *t, conv_row_t row, int64_t z,
                                      int64_t y) {
    const int64_t *kernel = k->v.kernel;
    const int64_t from_z = k->reads[0][row.at[0] * kernel[0] + z];
    const int64_t from_y = k->reads[1][row.at[1] * kernel[1] + y];
    if (from_z < 0 || from_y < 0) return NULL;
    const int64_t before = (row.image * k->from[0] + from_z) * k->from[1] + from_y;
    return (const T *)t->from + before * k->from[2] * k->channels;
}

/* What a position reads of a row by a tap of the last axis. */
static inline const T *NAME(read)(const last_t *k, const task_t *t, const T *row, int64_t at) {
    return at < 0 ? (const T *)t->zeros : row + at * k->channels;
}

static inline void NAME(put)(T *to, const float *sum, const T *bias, int64_t n) {
    for (int64_t e = 0; e < n; e++)
        to[e] = NARROW(sum[e] + (bias ? WIDE(bias[e]) : 0));
}

/* Channels [c, c + n each) of SIDE positions. A sum is one chain of multiply-adds in the order of
 * the taps, so its bits do not depend on the length of vectors. */
#define POSITIONS(name, n, each, target)                                                           \
    GRADD_FUSED target static void NAME(positions_##name)(const last_t *k, const task_t *t,        \
                                                          const int64_t *at, int64_t c) {          \
        GRADD_FUSED_BLOCK                                                                          \
        VECTORS_OF(n);                                                                             \
        const int64_t *kernel = k->v.kernel;                                                       \
        const T *bias = t->bias ? (const T *)t->bias + c : NULL;                                   \
        vec_t sum[SIDE][each] = {0};                                                               \
        for (int64_t i = 0; i < kernel[0] * kernel[1]; i++) {                                      \
            const T *row = NAME(row_read)(k, t, t->row, i / kernel[1], i % kernel[1]);             \
            const float *w = t->w + i * kernel[2] * k->channels + c;                               \
            for (int64_t tap = 0; row && tap < kernel[2]; tap++, w += k->channels) {               \
                const T *x[SIDE];                                                                  \
                for (int p = 0; p < SIDE; p++)                                                     \
                    x[p] = NAME(read)(k, t, row + c, k->reads[2][at[p] * kernel[2] + tap]);        \
                _Pragma("GCC unroll 2") for (int j = 0; j < (each); j++) {                         \
                    const vec_t f = *(const vec_t *)(w + j * (n));                                 \
                    _Pragma("GCC unroll 4") for (int p = 0; p < SIDE; p++) sum[p][j] +=            \
                        f * LOAD(x[p] + j * (n));                                                  \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        for (int p = 0; p < SIDE; p++)                                                             \
            NAME(put)((T *)t->to + at[p] * k->channels + c, (const float *)sum[p], bias,           \
                      (n) * (each));                                                               \
    }

/* sums[tap][e] += sum over the rows of dy of x dy, of TAPS taps and n each channels: f32 along the
 * rows. `i` counts taps of the first two axes. */
#define SUM_ROWS(name, n, each, target)                                                            \
    GRADD_FUSED target static void NAME(sum_rows_##name)(const last_t *k, const task_t *t,         \
                                                         int64_t i, int64_t first, int64_t c) {    \
        GRADD_FUSED_BLOCK                                                                          \
        VECTORS_OF(n);                                                                             \
        const int64_t *kernel = k->v.kernel;                                                       \
        const int taps = kernel[2] - first < TAPS ? (int)(kernel[2] - first) : TAPS;               \
        vec_t sum[TAPS][each] = {0};                                                               \
        for (int64_t r = t->begin; r < t->end; r++) {                                              \
            const T *dy = (const T *)t->dy + r * k->to[2] * k->channels + c;                       \
            const conv_row_t to = row_of(k->to, r);                                                \
            const T *row = NAME(row_read)(k, t, to, i / kernel[1], i % kernel[1]);                 \
            const int64_t *reads = k->reads[2] + first;                                            \
            for (int64_t o = 0; row && o < k->to[2]; o++, dy += k->channels, reads += kernel[2]) { \
                const T *x[TAPS];                                                                  \
                for (int j = 0; j < TAPS; j++)                                                     \
                    x[j] = NAME(read)(k, t, row + c, j < taps ? reads[j] : -1);                    \
                _Pragma("GCC unroll 2") for (int j = 0; j < (each); j++) {                         \
                    const vec_t d = LOAD(dy + j * (n));                                            \
                    _Pragma("GCC unroll 4") for (int p = 0; p < TAPS; p++) sum[p][j] +=            \
                        d * LOAD(x[p] + j * (n));                                                  \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        for (int p = 0; p < taps; p++) {                                                           \
            double *sums = t->sums + (i * kernel[2] + first + p) * k->channels + c;                \
            for (int e = 0; e < (n) * (each); e++)                                                 \
                sums[e] += (double)((const float *)sum[p])[e];                                     \
        }                                                                                          \
    }

#define BOTH(what, name, target, bytes)                                                            \
    what(name##_two, (bytes) / 4, 2, target) what(name##_one, (bytes) / 4, 1, target)              \
        what(name##_rest, 1, 1, target)
BOTH(POSITIONS, narrow, , GRADD_VECTOR_BYTES)
BOTH(POSITIONS, wide, GRADD_WIDE, GRADD_WIDE_BYTES)
BOTH(SUM_ROWS, narrow, , GRADD_VECTOR_BYTES)
BOTH(SUM_ROWS, wide, GRADD_WIDE, GRADD_WIDE_BYTES)
#undef BOTH
#undef POSITIONS
#undef SUM_ROWS

/* The positions [begin, end), in order, of the task's row. */
static void NAME(make_row)(const last_t *k, const task_t *t) {
    static void (*const of[2][3])(const last_t *, const task_t *, const int64_t *, int64_t) = {
        {NAME(positions_narrow_two), NAME(positions_narrow_one), NAME(positions_narrow_rest)},
        {NAME(positions_wide_two),   NAME(positions_wide_one),   NAME(positions_wide_rest)  }
    };
    const bool wide = GRADD_IS_WIDE();
    const steps_t steps = steps_of(wide, k->channels);
    for (int s = 0; s < 3; s++)
        for (int64_t c = steps.begin[s]; c < steps.begin[s + 1]; c += steps.width[s])
            for (int64_t i = t->begin; i < t->end; i += SIDE) {
                int64_t at[SIDE];
                for (int p = 0; p < SIDE; p++)
                    at[p] = k->order[i + p < t->end ? i + p : t->end - 1];
                of[wide][s](k, t, at, c);
            }
}

/* The sums of a group of images, of `channels` channels from c on. */
static void NAME(make_sums)(const last_t *k, const task_t *group, int64_t from, int64_t channels) {
    static void (*const of[2][3])(const last_t *, const task_t *, int64_t, int64_t, int64_t) = {
        {NAME(sum_rows_narrow_two), NAME(sum_rows_narrow_one), NAME(sum_rows_narrow_rest)},
        {NAME(sum_rows_wide_two),   NAME(sum_rows_wide_one),   NAME(sum_rows_wide_rest)  }
    };
    const bool wide = GRADD_IS_WIDE();
    const int64_t *kernel = k->v.kernel, each = k->to[2] ? 1 + (LEAST - 1) / k->to[2] : 1;
    const steps_t steps = steps_of(wide, channels);
    for (int s = 0; s < 3; s++)
        for (int64_t c = steps.begin[s]; c < steps.begin[s + 1]; c += steps.width[s])
            for (int64_t r = group->begin; r < group->end; r += each) {
                task_t t = *group;
                t.begin = r, t.end = r + each < group->end ? r + each : group->end;
                for (int64_t i = 0; i < kernel[0] * kernel[1]; i++)
                    for (int64_t tap = 0; tap < kernel[2]; tap += TAPS)
                        of[wide][s](k, &t, i, tap, from + c);
            }
}
