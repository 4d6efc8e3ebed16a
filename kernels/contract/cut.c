/* See cut.h. */
#include "kernels/contract/cut.h"

#include <stdlib.h>

/* Parts begin at multiples of so many rows where there are enough: all data stays aligned. */
#define STEP 64

/* The first `lead` axes of all outputs that there may be; false if they have others. */
static bool count_rows(const gradd_infer_t *c, int lead, int64_t *out_rows) {
    *out_rows = 1;
    for (int d = 0; d < lead; d++)
        *out_rows *= c->out[0].dims[d];
    for (int j = 0; j < c->n_out; j++) {
        if (!c->out[j].dtype) continue;
        if (c->out[j].rank < lead) return false;
        for (int d = 0; d < lead; d++)
            if (c->out[j].dims[d] != c->out[0].dims[d]) return false;
    }
    return true;
}

/* Whether each operand has either the rows or nothing of them, none of which the host reads. */
static bool is_apart(const gradd_kernel_t *kernel, const gradd_rowwise_t *r) {
    for (int i = 0; i < r->n_in; i++) {
        if (!r->in[i].type.dtype || r->use[i] == GRADD_USE_WHOLE) continue;
        if (r->use[i] == GRADD_USE_SPREAD || (i < 32 && kernel->host_in >> i & 1)) return false;
    }
    return !r->resizes;
}

static int64_t row_bytes(const gradd_type_t *type, int64_t rows) {
    return gradd_type_bytes(type) / rows;
}

static gradd_cut_t *make(const gradd_infer_t *c, const gradd_rowwise_t *r) {
    const int64_t rows = r->rows;
    int64_t each = (rows + c->parts - 1) / c->parts;
    if (each > 4 * STEP) each = (each + STEP - 1) / STEP * STEP;
    gradd_cut_t *cut = calloc(1, sizeof *cut + sizeof cut->of[0] * (size_t)(c->n_in + c->n_out));
    if (!cut) return NULL;
    cut->rows = rows;
    cut->each = each;
    cut->parts = (int)((rows + each - 1) / each);
    cut->n_in = c->n_in;
    cut->n_out = c->n_out;
    for (int i = 0; i < c->n_in; i++)
        if (c->in[i].type.dtype && r->use[i] == GRADD_USE_ROWS)
            cut->of[i] = (gradd_cut_operand_t){r->in_lead[i], row_bytes(&c->in[i].type, rows)};
    for (int j = 0; j < c->n_out; j++)
        if (c->out[j].dtype)
            cut->of[c->n_in + j] = (gradd_cut_operand_t){r->lead, row_bytes(&c->out[j], rows)};
    return cut;
}

gradd_cut_t *gradd_cut_find(const gradd_kernel_t *kernel, const gradd_infer_t *c) {
    bool (*rule)(gradd_rowwise_t *) = kernel->rowwise ? kernel->rowwise : c->op->rowwise;
    int64_t rows;
    if (!rule || c->op->flags & GRADD_OP_RANDOM || c->parts < 2 || !c->n_out) return NULL;
    for (int lead = c->out[0].rank; lead > 0; lead--) {
        if (!count_rows(c, lead, &rows) || rows < 2) continue;
        gradd_rowwise_t r = {.op = c->op,
                             .attrs = c->attrs,
                             .n_in = c->n_in,
                             .n_out = c->n_out,
                             .in = c->in,
                             .out = c->out,
                             .lead = lead,
                             .rows = rows};
        if (rule(&r) && is_apart(kernel, &r)) return make(c, &r);
    }
    return NULL;
}

static void shorten(gradd_type_t *type, const gradd_cut_operand_t *of, int64_t rows) {
    for (int d = 0; d < of->lead; d++)
        type->dims[d] = d + 1 < of->lead ? 1 : rows;
}

gradd_infer_t gradd_cut_describe(const gradd_cut_t *cut, const gradd_infer_t *c, int64_t rows,
                                 gradd_view_t *in, gradd_type_t *out) {
    gradd_infer_t part = *c;
    part.in = in, part.out = out, part.parts = 0;
    for (int i = 0; i < c->n_in; i++) {
        in[i] = c->in[i];
        if (!cut->of[i].lead) continue;
        shorten(&in[i].type, &cut->of[i], rows);
        in[i].data = NULL; /* each part has other elements */
    }
    for (int j = 0; j < c->n_out; j++) {
        out[j] = c->out[j];
        shorten(&out[j], &cut->of[c->n_in + j], rows);
    }
    return part;
}

gradd_status_t gradd_cut_compute(const gradd_kernel_t *kernel, const gradd_launch_t *r) {
    gradd_view_t in[GRADD_OP_MAX_IN], out[GRADD_OP_MAX_OUT];
    const gradd_cut_t *cut = r->cut;
    const int64_t first = r->part * cut->each, rest = cut->rows - first;
    const int64_t rows = rest < cut->each ? rest : cut->each;
    gradd_launch_t part = *r;
    for (int k = 0; k < r->n_in + r->n_out; k++) {
        gradd_view_t *view = k < r->n_in ? &in[k] : &out[k - r->n_in];
        *view = k < r->n_in ? r->in[k] : r->out[k - r->n_in];
        if (!cut->of[k].lead) continue;
        shorten(&view->type, &cut->of[k], rows);
        if (view->data) view->data = (char *)view->data + first * cut->of[k].bytes;
    }
    part.in = in, part.out = out, part.cut = NULL;
    part.part = part.parts = 0;
    part.state = rows < cut->each ? cut->last.state : cut->all.state;
    return kernel->compute(&part);
}
