/* The gradient of a weight, in parts over images. See conv.h. */
#include <stdlib.h>

#include "kernels/cpu/conv/conv.h"
#include "kernels/cpu/parts.h"
#include "kernels/describe/dispatch.h"

/* Operations of a part for each byte of the weight: to add another sum of that size costs less than
 * a fiftieth of them. */
#define LEAST_FLOPS 1500.0

typedef struct images_s {
    int64_t images, each; /* all, and those of each part but the last */
    gradd_prepared_t all, last;
    size_t sum_at; /* of a part's own sum in the workspace */
} images_t;

static int64_t rest_of(const images_t *k) {
    return k->images - (k->images - 1) / k->each * k->each;
}

/* The same node for some of the images. */
static gradd_infer_t describe(const gradd_infer_t *c, int64_t images, gradd_view_t in[2]) {
    gradd_infer_t some = *c;
    for (int i = 0; i < 2; i++)
        in[i] = c->in[i], in[i].type.dims[0] = images, in[i].data = NULL;
    some.in = in, some.parts = 0;
    return some;
}

/* How many of the images a part has; all, if the launch is not made in parts. */
static int64_t images_each(const gradd_infer_t *c, const gradd_conv_t *v) {
    const double weight = (double)gradd_type_bytes(&c->out[0]);
    gradd_cost_t cost = {0};
    if (c->parts < 2 || v->dtype != GRADD_DT_F32) return v->images;
    gradd_conv_cost(c, &cost);
    const double most = cost.flops / (LEAST_FLOPS * (weight + 1));
    const int64_t parts = most < c->parts ? (int64_t)most : c->parts;
    return parts < 2 ? v->images : (v->images + parts - 1) / parts;
}

static gradd_status_t prepare(images_t *k, const gradd_infer_t *c) {
    gradd_view_t in[2];
    gradd_infer_t some = describe(c, k->each, in);
    if (k->each < k->images && !gradd_conv_onednn_accepts(&some)) k->each = k->images;
    some = describe(c, k->each, in);
    GRADD_TRY(gradd_conv_onednn_prepare(&some, &k->all));
    if (rest_of(k) == k->each) return GRADD_OK;
    some = describe(c, rest_of(k), in);
    return gradd_conv_onednn_prepare(&some, &k->last);
}

gradd_status_t gradd_conv_images_prepare(const gradd_infer_t *c, gradd_prepared_t *out) {
    gradd_conv_t v;
    gradd_conv_made_t made;
    GRADD_TRY(gradd_conv_of_node(c, &v, &made));
    images_t *k = calloc(1, sizeof *k);
    if (!k) return GRADD_FAIL(NOMEM, "convolution");
    k->images = v.images, k->each = images_each(c, &v);
    *out = (gradd_prepared_t){.state = k};
    const gradd_status_t status = prepare(k, c);
    if (status) {
        gradd_conv_images_unprepare(out);
        return status;
    }
    const int64_t parts = (k->images + k->each - 1) / k->each;
    const size_t a = k->all.workspace, b = k->last.workspace;
    k->sum_at = ((a > b ? a : b) + 63) & ~(size_t)63;
    out->workspace = k->sum_at + (parts > 1 ? (size_t)gradd_type_bytes(&c->out[0]) : 0);
    out->bytes = sizeof *k + k->all.bytes + k->last.bytes;
    out->parts = parts > 1 ? (int)parts : 0;
    return GRADD_OK;
}

void gradd_conv_images_unprepare(gradd_prepared_t *prepared) {
    images_t *k = prepared->state;
    if (k->all.state) gradd_conv_onednn_unprepare(&k->all);
    if (k->last.state) gradd_conv_onednn_unprepare(&k->last);
    free(k);
}

static void add(float *to, const float *from, int64_t n) {
#pragma omp parallel for simd schedule(static) if (n >= GRADD_PARALLEL_MIN)
    for (int64_t i = 0; i < n; i++)
        to[i] += from[i];
}

gradd_status_t gradd_conv_images(const gradd_launch_t *r) {
    const images_t *k = r->state;
    const int64_t first = r->part * k->each, left = k->images - first;
    gradd_view_t in[2], out = r->out[0];
    gradd_launch_t some = *r;
    for (int i = 0; i < 2; i++) {
        in[i] = r->in[i];
        in[i].type.dims[0] = left < k->each ? left : k->each;
        in[i].data = (char *)r->in[i].data + gradd_type_bytes(&r->in[i].type) / k->images * first;
    }
    if (r->part) out.data = (char *)r->workspace + k->sum_at;
    some.in = in, some.out = &out, some.part = some.parts = 0;
    some.state = left < k->each ? k->last.state : k->all.state;
    GRADD_TRY(gradd_conv_onednn(&some));
    if (r->part) add(r->out[0].data, out.data, gradd_type_count(&out.type));
    return GRADD_OK;
}
