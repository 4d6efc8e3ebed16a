/* Columns in the element type T; NAME(x) is a name for that type. Included by conv_columns.c, once
 * for each type, and by nothing else. */

/* n elements, each `step` behind the one before. */
static inline void NAME(pick)(const T *x, int64_t step, int64_t n, T *out) {
    if (step == 1) {
        memcpy(out, x, (size_t)n * sizeof(T));
    } else if (step == 2) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            out[i] = x[2 * i];
    } else {
        for (int64_t i = 0; i < n; i++)
            out[i] = x[i * step];
    }
}

/* Positions [col, col + n) of a row. */
static inline void NAME(take_row)(const gradd_conv_t *v, const tap_t *t, const T *row, int64_t col,
                                  int64_t n, T *out) {
    const int64_t from = larger(col, smaller(t->from, col + n));
    const int64_t to = larger(from, smaller(t->to, col + n));
    for (int64_t i = col; i < from; i++)
        *out++ = 0;
    if (to > from)
        NAME(pick)(row + gradd_conv_at(v, 2, from, t->at[2]), v->stride[2], to - from, out);
    out += to - from;
    for (int64_t i = to; i < col + n; i++)
        *out++ = 0;
}

/* Positions [from, to) of an image; `plane` is the channel there. */
static void NAME(take)(const gradd_conv_t *v, const tap_t *t, const T *plane, int64_t from,
                       int64_t to, T *out) {
    const int64_t width = v->y[2], row = from / width;
    int64_t i = row / v->y[1], j = row % v->y[1], col = from - row * width;
    for (int64_t left = to - from; left > 0; col = 0) {
        const int64_t n = smaller(width - col, left), read = row_read(v, t, i, j);
        if (read < 0)
            memset(out, 0, (size_t)n * sizeof(T));
        else
            NAME(take_row)(v, t, plane + read, col, n, out);
        left -= n, out += n;
        if (++j == v->y[1]) i++, j = 0;
    }
}

/* The other way round: columns of one channel, [taps, Y], are added to its plane. */
static void NAME(give)(const gradd_conv_t *v, const T *columns, T start, T *plane) {
    const int64_t n = gradd_conv_volume(v->x);
    const int64_t taps = gradd_conv_volume(v->kernel), step = v->stride[2];
    for (int64_t i = 0; i < n; i++)
        plane[i] = start;
    for (int64_t k = 0; k < taps; k++) {
        const tap_t t = tap_of(v, k);
        const int64_t from = gradd_conv_at(v, 2, t.from, t.at[2]);
        for (int64_t i = 0; i < v->y[0]; i++)
            for (int64_t j = 0; j < v->y[1]; j++, columns += v->y[2]) {
                const int64_t read = row_read(v, &t, i, j);
                if (read < 0) continue;
                T *x = plane + read + from;
                for (int64_t o = t.from; o < t.to; o++, x += step)
                    *x += columns[o];
            }
    }
}

/* Columns [images, groups, channels, taps, Y] of a piece. */
static void NAME(take_piece)(const columns_t *k, const T *x, T *out) {
    const gradd_conv_t *v = &k->v;
    const int64_t plane = gradd_conv_volume(v->x);
    const int64_t rows = k->images * v->groups * k->channels * k->taps;
#pragma omp parallel for schedule(static) if (rows * k->y >= GRADD_PARALLEL_MIN)
    for (int64_t r = 0; r < rows; r++) {
        const int64_t channel = r / k->taps, at = channel / k->channels;
        const tap_t t = tap_of(v, r % k->taps);
        NAME(take)(v, &t, x + (at * k->in + channel % k->channels) * plane, 0, k->y,
                   out + r * k->y);
    }
}

static void NAME(give_piece)(const columns_t *k, const T *columns, const T *bias, T *x) {
    const gradd_conv_t *v = &k->v;
    const int64_t plane = gradd_conv_volume(v->x), each = k->taps * k->y;
    const int64_t channels = k->images * v->groups * k->channels;
#pragma omp parallel for schedule(static) if (channels * each >= GRADD_PARALLEL_MIN)
    for (int64_t r = 0; r < channels; r++) {
        const int64_t at = r / k->channels * k->in + r % k->channels;
        NAME(give)(v, columns + r * each, bias ? bias[at % v->in] : 0, x + at * plane);
    }
}

/* Columns [channels of x, taps, length] of the positions of all images from q on; zeros
 * behind the last. */
static void NAME(take_length)(const columns_t *k, const T *x, int64_t q, T *out) {
    const gradd_conv_t *v = &k->v;
    const int64_t plane = gradd_conv_volume(v->x), rows = v->in * k->taps;
    const int64_t end = smaller(q + k->length, v->images * k->y);
#pragma omp parallel for schedule(static) if (rows * k->length >= GRADD_PARALLEL_MIN)
    for (int64_t r = 0; r < rows; r++) {
        const tap_t t = tap_of(v, r % k->taps);
        T *to = out + r * k->length;
        for (int64_t at = q; at < end;) {
            const int64_t image = at / k->y, from = at % k->y;
            const int64_t n = smaller(k->y - from, end - at);
            NAME(take)(v, &t, x + (image * v->in + r / k->taps) * plane, from, from + n,
                       to + at - q);
            at += n;
        }
        memset(to + end - q, 0, (size_t)(q + k->length - end) * sizeof(T));
    }
}

static void NAME(take_y)(const columns_t *k, const T *y, int64_t q, T *out) {
    const gradd_conv_t *v = &k->v;
    const int64_t end = smaller(q + k->length, v->images * k->y);
#pragma omp parallel for schedule(static) if (v->out * k->length >= GRADD_PARALLEL_MIN)
    for (int64_t m = 0; m < v->out; m++) {
        T *to = out + m * k->length;
        for (int64_t at = q; at < end;) {
            const int64_t n = smaller(k->y - at % k->y, end - at);
            memcpy(to + at - q, y + (at / k->y * v->out + m) * k->y + at % k->y,
                   (size_t)n * sizeof(T));
            at += n;
        }
        memset(to + end - q, 0, (size_t)(q + k->length - end) * sizeof(T));
    }
}

/* The bias of each channel, or zeros. */
static void NAME(spread)(int64_t planes, int64_t channels, int64_t n, const T *bias, T *out) {
#pragma omp parallel for schedule(static) if (planes * n >= GRADD_PARALLEL_MIN)
    for (int64_t p = 0; p < planes; p++) {
        const T value = bias ? bias[p % channels] : 0;
        for (int64_t i = 0; i < n; i++)
            out[p * n + i] = value;
    }
}

static gradd_status_t NAME(make_y)(const columns_t *k, const gradd_conv_memory_t *m) {
    const gradd_conv_t *v = &k->v;
    const int64_t plane = gradd_conv_volume(v->x);
    T *columns = (T *)((char *)m->workspace + k->columns_at);
    if (k->empty || v->has_bias || k->channels < k->in)
        NAME(spread)(v->images * v->out, v->out, k->y, m->bias, m->y);
    if (k->empty) return GRADD_OK;
    for (int64_t i = 0; i < v->images; i += k->images)
        for (int64_t c = 0; c < k->in; c += k->channels) {
            const T *x = (const T *)m->x + (i * v->in + c) * plane;
            if (!k->direct) NAME(take_piece)(k, x, columns);
            GRADD_TRY(gradd_gemm(k->product.state, (const T *)m->w + c * k->taps,
                                 k->direct ? x : columns, NULL, (T *)m->y + i * v->out * k->y,
                                 m->workspace));
        }
    return GRADD_OK;
}

static gradd_status_t NAME(make_x)(const columns_t *k, const gradd_conv_memory_t *m) {
    const gradd_conv_t *v = &k->v;
    const int64_t plane = gradd_conv_volume(v->x);
    T *columns = (T *)((char *)m->workspace + k->columns_at);
    if (k->empty || (k->direct && v->has_bias))
        NAME(spread)(v->images * v->in, v->in, plane, m->bias, m->x);
    if (k->empty) return GRADD_OK;
    for (int64_t i = 0; i < v->images; i += k->images)
        for (int64_t c = 0; c < k->in; c += k->channels) {
            T *x = (T *)m->x + (i * v->in + c) * plane;
            GRADD_TRY(gradd_gemm(k->product.state, (const T *)m->w + c * k->taps,
                                 (const T *)m->y + i * v->out * k->y, NULL, k->direct ? x : columns,
                                 m->workspace));
            const T *bias = m->bias ? (const T *)m->bias + c : NULL;
            if (!k->direct) NAME(give_piece)(k, columns, bias, x);
        }
    return GRADD_OK;
}

/* Some of the pieces, one after the other; the first ones begin with zeros. */
static gradd_status_t NAME(make_w)(const columns_t *k, const gradd_conv_memory_t *m,
                                   gradd_range_t pieces) {
    const gradd_conv_t *v = &k->v;
    T *columns = (T *)((char *)m->workspace + k->columns_at);
    T *y = (T *)((char *)m->workspace + k->y_at);
    if (!pieces.from) NAME(spread)(1, 1, v->out * k->in * k->taps, NULL, m->w);
    for (int64_t q = pieces.from * k->length; pieces.from < pieces.to;
         q += k->length, pieces.from++) {
        NAME(take_length)(k, m->x, q, columns);
        NAME(take_y)(k, m->y, q, y);
        GRADD_TRY(gradd_gemm(k->product.state, y, columns, NULL, m->w, m->workspace));
    }
    return GRADD_OK;
}

static gradd_status_t NAME(make)(const columns_t *k, const gradd_conv_memory_t *m,
                                 gradd_range_t pieces) {
    switch (k->made) {
    case GRADD_CONV_MAKES_X:
        return NAME(make_x)(k, m);
    case GRADD_CONV_MAKES_W:
        return NAME(make_w)(k, m, pieces);
    case GRADD_CONV_MAKES_Y:
        break;
    }
    return NAME(make_y)(k, m);
}
