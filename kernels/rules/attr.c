/* Attribute lookup. See op.h. */
#include "kernels/contract/op.h"

#include <string.h>

const gradd_attr_t *gradd_attr_find(gradd_attrs_t attrs, const char *name) {
    for (int i = 0; i < attrs.n; i++)
        if (!strcmp(attrs.v[i].name, name)) return &attrs.v[i];
    return NULL;
}

int64_t gradd_attr_int(gradd_attrs_t attrs, const char *name, int64_t otherwise) {
    const gradd_attr_t *attr = gradd_attr_find(attrs, name);
    return attr && attr->kind == GRADD_ATTR_INT ? attr->i : otherwise;
}

double gradd_attr_float(gradd_attrs_t attrs, const char *name, double otherwise) {
    const gradd_attr_t *attr = gradd_attr_find(attrs, name);
    return attr && attr->kind == GRADD_ATTR_FLOAT ? attr->f : otherwise;
}

const char *gradd_attr_string(gradd_attrs_t attrs, const char *name, const char *otherwise) {
    const gradd_attr_t *attr = gradd_attr_find(attrs, name);
    return attr && attr->kind == GRADD_ATTR_STRING ? attr->s : otherwise;
}
