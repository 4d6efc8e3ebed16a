/* Windows along one axis. See windows.h. */
#include "kernels/describe/windows.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/rules/rules.h"

/* Weights of one axis, 128 MiB. */
#define MOST_TAPS (INT64_C(1) << 24)
/* Elements of all windows of an axis: to turn them around takes a second. */
#define MOST_ELEMENTS (INT64_C(1) << 28)

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

void gradd_windows_finish(gradd_windows_t *windows) {
    free(windows->span);
    free(windows->weight);
    *windows = (gradd_windows_t){0};
}

static gradd_status_t make_room(int64_t n, int64_t out, int64_t width, bool weights,
                                gradd_windows_t *w) {
    width = larger(width, 1);
    if (out > MOST_TAPS || (weights && out && width > MOST_TAPS / out))
        return GRADD_FAIL(LIMIT, "windows of %lld by %lld elements, at most %lld together",
                          (long long)out, (long long)width, (long long)MOST_TAPS);
    *w = (gradd_windows_t){.n = n, .out = out, .width = width};
    w->span = calloc((size_t)larger(2 * out, 1), sizeof *w->span);
    if (weights) w->weight = calloc((size_t)larger(out * width, 1), sizeof *w->weight);
    if (w->span && (w->weight || !weights)) return GRADD_OK;
    gradd_windows_finish(w);
    return GRADD_FAIL(NOMEM, "no memory for the windows of an axis");
}

gradd_status_t gradd_windows_room(int64_t n, int64_t out, int64_t width, gradd_windows_t *windows) {
    return make_room(n, out, width, true, windows);
}

/* ---- pooling --------------------------------------------------------------------------------- */

gradd_status_t gradd_pool_count(int64_t n, const gradd_pool_axis_t *axis, int64_t *out_count) {
    const int64_t most = INT32_MAX;
    if (axis->kernel < 1 || axis->stride < 1 || axis->dilation < 1 || axis->before < 0 ||
        axis->after < 0 || axis->kernel > most || axis->stride > most || axis->dilation > most ||
        axis->before > most || axis->after > most)
        return GRADD_FAIL(GRAPH,
                          "a window of %lld elements, stride %lld, dilation %lld, padding "
                          "%lld and %lld",
                          (long long)axis->kernel, (long long)axis->stride,
                          (long long)axis->dilation, (long long)axis->before,
                          (long long)axis->after);
    const int64_t reach = (axis->kernel - 1) * axis->dilation + 1;
    const int64_t room = n + axis->before + axis->after - reach;
    if (axis->before >= reach || axis->after >= reach)
        return GRADD_FAIL(GRAPH, "padding of %lld and %lld beside windows that reach over %lld",
                          (long long)axis->before, (long long)axis->after, (long long)reach);
    if (room < 0 && !axis->ceil)
        return GRADD_FAIL(GRAPH, "a window reaches over %lld elements, the padded axis has %lld",
                          (long long)reach, (long long)(room + reach));
    int64_t count = room < 0 ? 1 : room / axis->stride + 1;
    if (axis->ceil && room >= 0 && room % axis->stride) count++;
    if (axis->ceil && (count - 1) * axis->stride >= n + axis->before) count--;
    *out_count = larger(count, 0);
    return GRADD_OK;
}

gradd_status_t gradd_windows_pool(int64_t n, const gradd_pool_axis_t *axis, gradd_windows_t *out) {
    int64_t count;
    GRADD_TRY(gradd_pool_count(n, axis, &count));
    GRADD_TRY(make_room(n, count, smaller(axis->kernel, n), false, out));
    for (int64_t j = 0; j < count; j++) {
        int64_t at = j * axis->stride - axis->before, skipped = 0;
        if (at < 0) skipped = (-at + axis->dilation - 1) / axis->dilation;
        at += skipped * axis->dilation;
        const int64_t fit = at < n ? (n - 1 - at) / axis->dilation + 1 : 0;
        out->span[2 * j] = smaller(at, n);
        out->span[2 * j + 1] = larger(smaller(axis->kernel - skipped, fit), 0);
    }
    return GRADD_OK;
}

gradd_status_t gradd_windows_average(int64_t n, const gradd_pool_axis_t *axis, bool with_padding,
                                     gradd_windows_t *out) {
    int64_t count;
    GRADD_TRY(gradd_windows_pool(n, axis, out));
    count = out->out;
    gradd_windows_t all;
    gradd_status_t status = make_room(n, count, out->width, true, &all);
    for (int64_t j = 0; j < count && !status; j++) {
        const int64_t at = j * axis->stride - axis->before, size = out->span[2 * j + 1];
        const int64_t padded = smaller(at + axis->kernel, n + axis->after) - at;
        const double weight = 1.0 / (double)(with_padding ? padded : size);
        for (int64_t t = 0; t < size; t++)
            all.weight[j * all.width + t] = weight;
    }
    if (!status) memcpy(all.span, out->span, sizeof *all.span * 2 * (size_t)count);
    gradd_windows_finish(out);
    if (!status) *out = all;
    return status;
}

gradd_status_t gradd_windows_adaptive(int64_t n, int64_t count, bool weights,
                                      gradd_windows_t *out) {
    if (count < 0 || n > INT32_MAX || count > INT32_MAX)
        return GRADD_FAIL(LIMIT, "%lld elements in %lld parts", (long long)n, (long long)count);
    GRADD_TRY(make_room(n, count, count ? n / count + 2 : 1, weights, out));
    for (int64_t j = 0; j < count; j++) {
        const int64_t first = j * n / count, end = ((j + 1) * n + count - 1) / count;
        out->span[2 * j] = first;
        out->span[2 * j + 1] = end - first;
        for (int64_t t = 0; weights && t < end - first; t++)
            out->weight[j * out->width + t] = 1.0 / (double)(end - first);
    }
    return GRADD_OK;
}

/* ---- turned around --------------------------------------------------------------------------- */

/* The last element of a span. */
static int64_t last_of(const int64_t *span, int64_t j, int64_t step) {
    return span[2 * j] + (span[2 * j + 1] - 1) * step;
}

gradd_status_t gradd_windows_turned(const gradd_windows_t *w, int64_t step, gradd_windows_t *out) {
    gradd_windows_t t;
    int64_t all_elements = 0;
    for (int64_t j = 0; j < w->out; j++) {
        all_elements += w->span[2 * j + 1];
        if (all_elements > MOST_ELEMENTS)
            return GRADD_FAIL(LIMIT, "windows of more than %lld elements together",
                              (long long)MOST_ELEMENTS);
    }
    GRADD_TRY(make_room(w->out, w->n, 1, false, &t));
    for (int64_t j = w->out - 1; j >= 0; j--)
        for (int64_t i = w->span[2 * j]; w->span[2 * j + 1] && i <= last_of(w->span, j, step);
             i += step) {
            const int64_t end = t.span[2 * i + 1] ? t.span[2 * i] + t.span[2 * i + 1] : j + 1;
            t.span[2 * i] = j;
            t.span[2 * i + 1] = end - j;
            t.width = larger(t.width, end - j);
        }
    gradd_status_t status = GRADD_OK;
    if (w->weight) {
        gradd_windows_t all;
        status = make_room(w->out, w->n, t.width, true, &all);
        for (int64_t j = 0; j < w->out && !status; j++)
            for (int64_t k = 0; k < w->span[2 * j + 1]; k++) {
                const int64_t i = w->span[2 * j] + k * step;
                all.weight[i * all.width + j - t.span[2 * i]] = w->weight[j * w->width + k];
            }
        if (!status) t.weight = all.weight, free(all.span);
    }
    if (status)
        gradd_windows_finish(&t);
    else
        *out = t;
    return status;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

gradd_status_t gradd_check_span(const gradd_infer_t *c, int input, int64_t n, int64_t step) {
    const gradd_view_t *v = &c->in[input];
    if (v->type.dtype != GRADD_DT_I64 || v->type.rank != 2 || v->type.dims[1] != 2)
        return GRADD_FAIL(GRAPH, "input %d must be spans, i64[n,2]", input);
    if (!v->data)
        return GRADD_FAIL(UNSUPPORTED, "input %d depends on data that is not known before the run",
                          input);
    const int64_t *span = v->data;
    for (int64_t j = 0; j < v->type.dims[0]; j++) {
        const int64_t first = span[2 * j], size = span[2 * j + 1];
        const bool fits = first >= 0 && first <= n && size >= 0 && size <= n &&
                          (!size || (size - 1) <= (n - 1 - first) / step);
        if (!fits || (size && first >= n))
            return GRADD_FAIL(GRAPH, "span %lld has %lld elements from %lld on, the axis %lld",
                              (long long)j, (long long)size, (long long)first, (long long)n);
    }
    return GRADD_OK;
}

gradd_val_t gradd_windows_span(gradd_builder_t *b, const gradd_windows_t *w) {
    const gradd_type_t type = {
        .dtype = GRADD_DT_I64, .rank = 2, .dims = {w->out, 2}
    };
    return b->status ? GRADD_NONE : b->constant(b, &type, w->span);
}

gradd_val_t gradd_windows_weight(gradd_builder_t *b, const gradd_windows_t *w,
                                 gradd_dtype_t dtype) {
    const gradd_type_t type = {
        .dtype = dtype, .rank = 2, .dims = {w->out, w->width}
    };
    const int64_t n = w->out * w->width;
    if (b->status) return GRADD_NONE;
    if (dtype == GRADD_DT_F64) return b->constant(b, &type, w->weight);
    float *narrow = malloc(sizeof *narrow * (size_t)larger(n, 1));
    if (!narrow) {
        b->status = GRADD_FAIL(NOMEM, "no memory for the weights of windows");
        return GRADD_NONE;
    }
    for (int64_t i = 0; i < n; i++)
        narrow[i] = (float)w->weight[i];
    const gradd_val_t made = b->constant(b, &type, narrow);
    free(narrow);
    return made;
}

gradd_val_t gradd_emit_taps(gradd_builder_t *b, gradd_val_t x, int axis, const gradd_windows_t *w) {
    gradd_val_t wide = gradd_wide(b, x);
    const gradd_val_t in[] = {wide, gradd_windows_span(b, w),
                              gradd_windows_weight(b, w, gradd_val_type(b, wide)->dtype)};
    const gradd_attr_t attr = gradd_make_int("axis", axis);
    return gradd_emit_attrs(b, "Taps", in, 3, &attr, 1);
}
