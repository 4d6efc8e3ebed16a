/* Which row of a device runs a node, and whether a device's rows are complete. See kernel.h and
 * backend.h. */
#include "kernels/contract/kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/backend.h"
#include "kernels/contract/cut.h"
#include "kernels/contract/registry.h"

bool gradd_kernel_takes(const gradd_kernel_t *kernel, const gradd_op_t *op, int input,
                        gradd_dtype_t dtype) {
    const uint32_t own = gradd_types_at(kernel->types, input);
    const uint32_t mask = own && own != GRADD_T_ANY ? own : gradd_types_at(op->types, input);
    if (!mask || mask == GRADD_T_ANY) return true;
    if (!own && kernel->widens_f16 && dtype == GRADD_DT_F16) return false;
    return mask & 1u << dtype;
}

/* The first operand that the row would read on the host, and which is not known; -1 = none. */
static int unknown_on_host(const gradd_kernel_t *kernel, const gradd_infer_t *c) {
    for (int i = 0; i < c->n_in && i < 32; i++)
        if (kernel->host_in >> i & 1 && c->in[i].type.dtype && !c->in[i].data) return i;
    return -1;
}

/* Apart from what has to be known. */
static bool fits(const gradd_kernel_t *kernel, const gradd_infer_t *c) {
    const char *name = c->op->name; /* most rows differ in the first character already */
    if (kernel->op[0] != name[0] || strcmp(kernel->op, name)) return false;
    for (int i = 0; i < c->n_in; i++) {
        gradd_dtype_t dtype = c->in[i].type.dtype;
        if (dtype && !gradd_kernel_takes(kernel, c->op, i, dtype)) return false;
    }
    return !kernel->accepts || kernel->accepts(c);
}

static bool accepts(const gradd_kernel_t *kernel, const gradd_infer_t *c) {
    return fits(kernel, c) && unknown_on_host(kernel, c) < 0;
}

static gradd_status_t prepare_whole(const gradd_kernel_t *kernel, const gradd_infer_t *c,
                                    gradd_prepared_t *out) {
    if (kernel->prepare) return kernel->prepare(c, out);
    *out = (gradd_prepared_t){.workspace = kernel->workspace ? kernel->workspace(c) : 0};
    if (c->parts > 1 && kernel->parts) out->parts = kernel->parts(c);
    return GRADD_OK;
}

/* For parts of so many rows. */
static gradd_status_t prepare_rows(const gradd_kernel_t *kernel, const gradd_infer_t *c,
                                   const gradd_cut_t *cut, int64_t rows, gradd_prepared_t *out) {
    gradd_view_t in[GRADD_OP_MAX_IN];
    gradd_type_t types[GRADD_OP_MAX_OUT];
    const gradd_infer_t part = gradd_cut_describe(cut, c, rows, in, types);
    return prepare_whole(kernel, &part, out);
}

/* Takes the cut over. */
static gradd_status_t prepare_cut(const gradd_kernel_t *kernel, const gradd_infer_t *c,
                                  gradd_cut_t *cut, gradd_prepared_t *out) {
    const int64_t rest = cut->rows - cut->each * (cut->parts - 1);
    gradd_status_t status = prepare_rows(kernel, c, cut, cut->each, &cut->all);
    if (!status && rest < cut->each) status = prepare_rows(kernel, c, cut, rest, &cut->last);
    const size_t a = cut->all.workspace, b = cut->last.workspace;
    *out = (gradd_prepared_t){.workspace = a > b ? a : b,
                              .bytes = sizeof *cut + cut->all.bytes + cut->last.bytes,
                              .parts = cut->parts,
                              .cut = cut};
    if (status) gradd_kernel_unprepare(kernel, out);
    return status;
}

gradd_status_t gradd_kernel_prepare(const gradd_kernel_t *kernel, const gradd_infer_t *c,
                                    gradd_prepared_t *out) {
    gradd_cut_t *cut = c->parts > 1 && !kernel->makes_parts ? gradd_cut_find(kernel, c) : NULL;
    return cut ? prepare_cut(kernel, c, cut, out) : prepare_whole(kernel, c, out);
}

gradd_status_t gradd_kernel_compute(const gradd_kernel_t *kernel, const gradd_launch_t *launch) {
    return launch->cut ? gradd_cut_compute(kernel, launch) : kernel->compute(launch);
}

void gradd_kernel_unprepare(const gradd_kernel_t *kernel, gradd_prepared_t *prepared) {
    gradd_cut_t *cut = prepared->cut;
    if (cut && cut->all.state) kernel->unprepare(&cut->all);
    if (cut && cut->last.state) kernel->unprepare(&cut->last);
    free(cut);
    if (prepared->state) kernel->unprepare(prepared);
    *prepared = (gradd_prepared_t){0};
}

typedef bool (*suits_t)(const gradd_kernel_t *kernel, const gradd_infer_t *c);

static const gradd_kernel_t *find(const gradd_backend_t *backend, const gradd_infer_t *c,
                                  suits_t suits) {
    for (size_t f = 0; f < backend->n_kernels; f++)
        for (size_t i = 0; i < backend->kernels[f]->n; i++)
            if (suits(&backend->kernels[f]->v[i], c)) return &backend->kernels[f]->v[i];
    return NULL;
}

const gradd_kernel_t *gradd_backend_kernel(const gradd_backend_t *backend, const gradd_infer_t *c) {
    return find(backend, c, accepts);
}

gradd_status_t gradd_no_kernel(const gradd_backend_t *backend, const gradd_infer_t *c) {
    char types[256] = "";
    size_t at = 0;
    const gradd_kernel_t *close = find(backend, c, fits);
    if (close)
        return GRADD_FAIL(UNSUPPORTED,
                          "the device '%s' runs %s only where input %d is known when the plan is "
                          "made",
                          backend->name, c->op->name, unknown_on_host(close, c));
    for (int i = 0; i < c->n_in && at + 16 < sizeof types; i++)
        at += (size_t)snprintf(types + at, sizeof types - at, "%s%s", i ? ", " : " of ",
                               gradd_dtype_name(c->in[i].type.dtype));
    return GRADD_FAIL(UNSUPPORTED, "the device '%s' has no kernel for %s%s", backend->name,
                      c->op->name, types);
}
