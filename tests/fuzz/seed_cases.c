/* See seed_cases.h. Literals of a case become initializers, everything else graph inputs, so that
 * the planner sees what is known as it would in a real model. */
#include "tests/fuzz/seed_cases.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cases/cases.h"
#include "kernels/contract/registry.h"
#include "tests/c/onnx_build.h"

static void add_attr(Onnx__NodeProto *node, const gradd_attr_t *a) {
    static const int kinds[] = {
        [GRADD_ATTR_INT] = BUILD_KIND(INT),       [GRADD_ATTR_FLOAT] = BUILD_KIND(FLOAT),
        [GRADD_ATTR_STRING] = BUILD_KIND(STRING), [GRADD_ATTR_INTS] = BUILD_KIND(INTS),
        [GRADD_ATTR_FLOATS] = BUILD_KIND(FLOATS),
    };
    if (a->kind == GRADD_ATTR_INTS) {
        build_attr_ints(node, a->name, a->n, a->ints);
        return;
    }
    if (a->kind == GRADD_ATTR_TENSOR || a->kind == GRADD_ATTR_END) return;
    Onnx__AttributeProto *made = build_attr(node, a->name, kinds[a->kind]);
    made->has_i = a->kind == GRADD_ATTR_INT;
    made->has_f = a->kind == GRADD_ATTR_FLOAT;
    made->has_s = a->kind == GRADD_ATTR_STRING;
    if (made->has_i) made->i = a->i;
    if (made->has_f) made->f = (float)a->f;
    if (made->has_s) made->s = (ProtobufCBinaryData){a->n, build_copy(a->s, a->n)};
    if (a->kind != GRADD_ATTR_FLOATS) return;
    made->n_floats = a->n;
    made->floats = build_alloc(a->n * sizeof(float) + 1);
    for (size_t i = 0; i < a->n; i++)
        made->floats[i] = (float)a->floats[i];
}

static void add_input(Onnx__ModelProto *m, const gradd_case_data_t *c, int i, const char *name) {
    const gradd_type_t *type = &c->in[i].type;
    if (c->known[i])
        build_raw(build_init(m, name, type->dtype, type->rank, type->dims), c->in[i].data,
                  (size_t)gradd_type_bytes(type));
    else
        build_input(m, name, type->dtype, type->rank, type->dims);
}

static Onnx__ModelProto *model_of(const gradd_op_t *op, const gradd_case_data_t *c) {
    Onnx__ModelProto *m = build_model();
    char in[1024] = "", out[256] = "", name[16];
    for (int i = 0; i < c->n_in; i++) {
        snprintf(name, sizeof name, "i%d", i);
        bool there = c->in[i].data != NULL;
        if (there) add_input(m, c, i, name);
        snprintf(in + strlen(in), sizeof in - strlen(in), "%s%s", i ? "," : "", there ? name : "");
    }
    int n_out = c->n_out ? c->n_out : op->min_out;
    for (int j = 0; j < n_out; j++) {
        snprintf(name, sizeof name, "o%d", j);
        build_output(m, name);
        snprintf(out + strlen(out), sizeof out - strlen(out), "%s%s", j ? "," : "", name);
    }
    Onnx__NodeProto *node = build_node(m, op->name, "n", in, out);
    for (int a = 0; a < c->n_attrs; a++)
        add_attr(node, &c->attrs[a]);
    if (!op->domain[0]) {
        int newest = op->since > 20 ? op->since : 20;
        m->opset_import[0]->version = op->until && op->until < 20 ? op->until : newest;
    } else {
        node->domain = build_copy(op->domain, strlen(op->domain));
        build_opset(m, op->domain, 1);
    }
    return m;
}

static bool write_seed(const char *folder, int index, const gradd_op_t *op, const char *text) {
    gradd_case_data_t c;
    char path[4096];
    size_t n;
    if (gradd_case_parse(text, GRADD_DT_F32, 1, &c) != GRADD_OK) return false;
    uint8_t *bytes = build_pack(model_of(op, &c), &n);
    gradd_case_free(&c);
    snprintf(path, sizeof path, "%s/case_%d", folder, index);
    FILE *file = fopen(path, "wb");
    bool good = file && fwrite(bytes, 1, n, file) == n;
    if (file) good = fclose(file) == 0 && good;
    return good;
}

int seed_cases(const char *folder) {
    int n = 0;
    for (size_t f = 0; f < gradd_op_family_count; f++) {
        for (size_t k = 0; k < gradd_op_families[f]->n; k++) {
            const gradd_op_t *op = &gradd_op_families[f]->v[k];
            if (op->flags & GRADD_OP_INTERNAL || !op->cases) continue;
            for (const gradd_case_t *c = op->cases; c->text; c++)
                n += write_seed(folder, n, op, c->text);
        }
    }
    return n;
}
