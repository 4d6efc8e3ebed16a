/* Lookup in the operator table. See registry.h. */
#include "kernels/contract/registry.h"

#include <string.h>

#define X(family) extern const gradd_ops_t gradd_ops_##family;
#include "op_list.inc"
#undef X

const gradd_ops_t *const gradd_op_families[] = {
#define X(family) &gradd_ops_##family,
#include "op_list.inc"
#undef X
};
const size_t gradd_op_family_count = sizeof gradd_op_families / sizeof gradd_op_families[0];

static bool same_domain(const char *a, const char *b) {
    if (!strcmp(a, "ai.onnx")) a = "";
    return !strcmp(a, b);
}

const gradd_op_t *gradd_op_find(const char *domain, const char *name, int opset) {
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++) {
            const gradd_op_t *op = &gradd_op_families[f]->v[i];
            if (op->name[0] != name[0] || strcmp(op->name, name)) continue;
            if (!same_domain(domain, op->domain)) continue;
            if (opset >= op->since && (!op->until || opset <= op->until)) return op;
        }
    return NULL;
}

const gradd_op_t *gradd_op_by_name(const char *name) {
    const gradd_op_t *best = NULL;
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++) {
            const gradd_op_t *op = &gradd_op_families[f]->v[i];
            /* most rows differ in the first character already */
            if (op->name[0] == name[0] && !strcmp(op->name, name) &&
                (!best || op->since > best->since))
                best = op;
        }
    return best;
}

bool gradd_op_accepts(const gradd_op_t *op, int input, gradd_dtype_t dtype) {
    uint32_t mask = gradd_types_at(op->types, input);
    return !mask || mask & 1u << dtype;
}

bool gradd_op_carries(const gradd_op_t *op, int input) {
    const uint32_t floats = GRADD_DTB(F32) | GRADD_DTB(F64) | GRADD_DTB(F16) | GRADD_DTB(BF16);
    uint32_t mask = gradd_types_at(op->types, input);
    return (!mask || mask & floats) && !(op->no_diff >> (input < 31 ? input : 31) & 1);
}

static gradd_status_t check_attrs(const gradd_infer_t *c) {
    for (int i = 0; i < c->attrs.n; i++) {
        const gradd_attr_t *attr = &c->attrs.v[i];
        const gradd_attr_spec_t *spec = c->op->attrs;
        while (spec && spec->name && strcmp(spec->name, attr->name))
            spec++;
        if (!spec || !spec->name)
            return GRADD_FAIL(UNSUPPORTED, "attribute '%s' is not supported", attr->name);
        if (spec->kind != attr->kind)
            return GRADD_FAIL(GRAPH, "attribute '%s' has the wrong kind", attr->name);
    }
    for (const gradd_attr_spec_t *spec = c->op->attrs; spec && spec->name; spec++)
        if (spec->required && !gradd_attr_find(c->attrs, spec->name))
            return GRADD_FAIL(GRAPH, "attribute '%s' is missing", spec->name);
    return GRADD_OK;
}

static gradd_status_t check_built(const char *what, int i, gradd_dtype_t dtype) {
    if (gradd_dtype_is_built(dtype)) return GRADD_OK;
    return GRADD_FAIL(UNSUPPORTED, "%s %d: this library was built without element type %s", what, i,
                      gradd_dtype_name(dtype));
}

static gradd_status_t check_inputs(const gradd_infer_t *c) {
    const gradd_op_t *op = c->op;
    if (c->n_in < op->min_in || c->n_in > op->max_in)
        return GRADD_FAIL(GRAPH, "expected %d to %d inputs, got %d", op->min_in, op->max_in,
                          c->n_in);
    if (c->n_out < op->min_out || c->n_out > op->max_out)
        return GRADD_FAIL(GRAPH, "expected %d to %d outputs, got %d", op->min_out, op->max_out,
                          c->n_out);
    for (int i = 0; i < c->n_in; i++) {
        gradd_dtype_t dtype = c->in[i].type.dtype;
        if (dtype == GRADD_DT_NONE) {
            if (i < op->min_in) return GRADD_FAIL(GRAPH, "input %d is missing", i);
            continue;
        }
        if (!gradd_op_accepts(op, i, dtype))
            return GRADD_FAIL(UNSUPPORTED, "input %d: element type %s is not supported", i,
                              gradd_dtype_name(dtype));
        GRADD_TRY(check_built("input", i, dtype));
    }
    return GRADD_OK;
}

gradd_status_t gradd_op_infer(gradd_infer_t *c) {
    GRADD_TRY(check_inputs(c));
    GRADD_TRY(check_attrs(c));
    memset(c->out, 0, sizeof c->out[0] * (size_t)c->n_out);
    GRADD_TRY(c->op->infer(c));
    for (int j = 0; j < c->n_out; j++) {
        if (c->out[j].dtype == GRADD_DT_NONE && j >= c->op->min_out) continue;
        gradd_status_t status = gradd_type_check(&c->out[j]);
        if (status) return gradd_wrap(status, "output %d", j);
        GRADD_TRY(check_built("output", j, c->out[j].dtype));
    }
    return GRADD_OK;
}
