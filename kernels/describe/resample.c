/* Taps of a resampling. See resample.h. */
#include "kernels/describe/resample.h"

#include <math.h>

static int64_t clamped(int64_t i, int64_t n) {
    return i < 0 ? 0 : i < n ? i : n - 1;
}

/* Adds a tap; elements beyond an end are the last one. Taps of a window come in rising order. */
static void put_tap(gradd_windows_t *w, int64_t j, int64_t at, double weight) {
    int64_t *span = w->span + 2 * j;
    at = clamped(at, w->n);
    if (!span[1]) span[0] = at;
    if (at - span[0] + 1 > span[1]) span[1] = at - span[0] + 1;
    w->weight[j * w->width + at - span[0]] += weight;
}

/* Keys' cubic for distance x. */
static double cubic(double x, double a) {
    x = fabs(x);
    if (x <= 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

static double filter(gradd_resample_kind_t kind, double x, double a) {
    x = fabs(x);
    if (kind == GRADD_RESAMPLE_CUBIC) return cubic(x, a);
    return x < 1 ? 1 - x : 0;
}

static gradd_status_t check(int64_t n, int64_t out, double scale) {
    if (n < 1 && out)
        return GRADD_FAIL(GRAPH, "an empty axis has no %lld elements", (long long)out);
    if (n > INT32_MAX || out > INT32_MAX || !(scale == 0 || scale >= 1e-9) || scale > 1e9)
        return GRADD_FAIL(LIMIT, "%lld elements resampled to %lld, scale %g", (long long)n,
                          (long long)out, scale);
    return GRADD_OK;
}

/* ---- PyTorch --------------------------------------------------------------------------------- */

static double rounded(const gradd_torch_resample_t *how, double v) {
    return how->narrow ? (double)(float)v : v;
}

/* Elements of the axis to one of the result. */
static double torch_step(int64_t n, int64_t out, const gradd_torch_resample_t *how) {
    if (how->align_corners) return out > 1 ? rounded(how, (double)(n - 1) / (double)(out - 1)) : 0;
    if (how->scale > 0) return rounded(how, 1 / how->scale);
    return rounded(how, (double)n / (double)out);
}

static double torch_place(double step, int64_t j, const gradd_torch_resample_t *how) {
    if (how->align_corners) return rounded(how, step * (double)j);
    return rounded(how, rounded(how, step * ((double)j + 0.5)) - 0.5);
}

static int64_t torch_nearest(double step, int64_t j, const gradd_torch_resample_t *how) {
    if (!how->exact) return (int64_t)floorf((float)rounded(how, step * (double)j));
    const double place = torch_place(step, j, how);
    return (int64_t)floorf((float)(rounded(how, (place > 0 ? place : 0) + 0.5)));
}

static void torch_filter(gradd_windows_t *w, int64_t j, double step,
                         const gradd_torch_resample_t *how) {
    const double reach = (how->kind == GRADD_RESAMPLE_CUBIC ? 2 : 1) * (step > 1 ? step : 1);
    const double centre = rounded(how, step * ((double)j + 0.5)), by = step > 1 ? 1 / step : 1;
    int64_t first = (int64_t)rounded(how, centre - reach + 0.5);
    int64_t end = (int64_t)rounded(how, centre + reach + 0.5);
    double sum = 0;
    first = first < 0 ? 0 : first;
    end = end > w->n ? w->n : end;
    if (end - first > w->width) end = first + w->width; /* whatever the f32 numbers say */
    for (int64_t i = first; i < end; i++)
        sum += filter(how->kind, ((double)i - centre + 0.5) * by, -0.5);
    for (int64_t i = first; i < end; i++)
        put_tap(w, j, i,
                filter(how->kind, ((double)i - centre + 0.5) * by, -0.5) / (sum != 0 ? sum : 1));
}

gradd_status_t gradd_windows_torch(int64_t n, int64_t out, const gradd_torch_resample_t *how,
                                   gradd_windows_t *w) {
    GRADD_TRY(check(n, out, how->scale));
    const double step = torch_step(n, out, how);
    const double reach = how->antialias && step > 1 ? step : 1;
    GRADD_TRY(gradd_windows_room(n, out, (int64_t)(4 * reach) + 3, w));
    for (int64_t j = 0; j < out; j++) {
        if (how->kind == GRADD_RESAMPLE_NEAREST) {
            put_tap(w, j, torch_nearest(step, j, how), 1);
            continue;
        }
        if (how->antialias) {
            torch_filter(w, j, step, how);
            continue;
        }
        double place = torch_place(step, j, how);
        if (how->kind == GRADD_RESAMPLE_LINEAR) {
            if (n == out && !how->scale) place = (double)j;
            if (place < 0) place = 0;
            const int64_t first = clamped((int64_t)place, n);
            const double behind = fmin(fmax(rounded(how, place - (double)first), 0), 1);
            put_tap(w, j, first, 1 - behind);
            if (first < n - 1) put_tap(w, j, first + 1, behind);
            if (first == n - 1 && n) w->weight[j * w->width] = 1;
            continue;
        }
        const double first = floor(place), behind = rounded(how, place - first);
        for (int k = -1; k < 3; k++)
            put_tap(w, j, (int64_t)first + k, cubic((double)k - behind, -0.75));
    }
    return GRADD_OK;
}

/* ---- ONNX ------------------------------------------------------------------------------------ */

static double unbounded_place(int64_t n, int64_t out, int64_t j, const gradd_onnx_resample_t *how) {
    const double x = (double)j, length = how->scale * (double)n;
    switch (how->place) {
    case GRADD_PLACE_ASYMMETRIC:
        return x / how->scale;
    case GRADD_PLACE_ALIGN_CORNERS:
        return length == 1 || out == 1 ? 0 : x * (double)(n - 1) / (length - 1);
    case GRADD_PLACE_PYTORCH_HALF_PIXEL:
        if (out == 1) return -0.5;
        break;
    case GRADD_PLACE_HALF_PIXEL_SYMMETRIC:
        return (double)n / 2 * (1 - (double)out / length) + (x + 0.5) / how->scale - 0.5;
    default:
        break;
    }
    return (x + 0.5) / how->scale - 0.5;
}

/* Within what an integer holds; places so far out belong to the ends. */
static double onnx_place(int64_t n, int64_t out, int64_t j, const gradd_onnx_resample_t *how) {
    return fmin(fmax(unbounded_place(n, out, j, how), -1e15), 1e15);
}

static int64_t onnx_nearest(double place, gradd_round_t round) {
    switch (round) {
    case GRADD_ROUND_PREFER_FLOOR:
        return (int64_t)ceil(place - 0.5);
    case GRADD_ROUND_PREFER_CEIL:
        return (int64_t)floor(place + 0.5);
    case GRADD_ROUND_FLOOR:
        return (int64_t)floor(place);
    default:
        return (int64_t)ceil(place);
    }
}

static void onnx_filter(gradd_windows_t *w, int64_t j, double place,
                        const gradd_onnx_resample_t *how) {
    const double by = how->antialias && how->scale < 1 ? how->scale : 1, first = floor(place);
    const double half = how->kind == GRADD_RESAMPLE_CUBIC ? 2 : 1;
    const int64_t start = (int64_t)floor(-half / by) + 1, end = 1 - start;
    double sum = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t k = start; k <= end; k++) {
            const int64_t at = (int64_t)first + k;
            const double v = filter(how->kind, ((double)at - place) * by, how->cubic_a);
            if (how->exclude_outside && (at < 0 || at >= w->n)) continue;
            if (pass)
                put_tap(w, j, at, v / sum);
            else
                sum += v;
        }
}

gradd_status_t gradd_windows_onnx(int64_t n, int64_t out, const gradd_onnx_resample_t *how,
                                  gradd_windows_t *w) {
    GRADD_TRY(check(n, out, how->scale));
    if (how->scale < 1e-9) return GRADD_FAIL(GRAPH, "a scale of %g", how->scale);
    const double reach = how->antialias && how->scale < 1 ? 1 / how->scale : 1;
    GRADD_TRY(gradd_windows_room(n, out, (int64_t)(4 * reach) + 4, w));
    for (int64_t j = 0; j < out; j++) {
        const double place = onnx_place(n, out, j, how);
        if (how->kind == GRADD_RESAMPLE_NEAREST)
            put_tap(w, j, onnx_nearest(place, how->round), 1);
        else
            onnx_filter(w, j, place, how);
    }
    return GRADD_OK;
}
