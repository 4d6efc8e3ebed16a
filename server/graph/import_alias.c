/* Operators under which ONNX Runtime writes ones of ONNX into its training models.
 *
 * Their results behind those of ONNX are for its gradient nodes, which gradd does not run. */
#include <string.h>

#include "server/graph/import.h"

static const gradd_attr_t by_tanh = {"approximate", GRADD_ATTR_STRING, .s = "tanh", .n = 4};
static const gradd_attr_t alpha = {"alpha", GRADD_ATTR_FLOAT, .f = 1.702f};

#define MICROSOFT "com.microsoft"
static const import_alias_t aliases[] = {
    {MICROSOFT, "ConcatTraining",               "Concat",           13, NULL    },
    {MICROSOFT, "FastGelu",                     "Gelu",             20, &by_tanh},
    {MICROSOFT, "GRUTraining",                  "GRU",              14, NULL    },
    {MICROSOFT, "Gelu",                         "Gelu",             20, NULL    },
    {MICROSOFT, "LSTMTraining",                 "LSTM",             14, NULL    },
    {MICROSOFT, "QuickGelu",                    "Swish",            24, &alpha  },
    {"",        "SimplifiedLayerNormalization", "RMSNormalization", 23, NULL    },
};

const import_alias_t *import_find_alias(const char *domain, const char *op_type) {
    if (!strcmp(domain, "ai.onnx")) domain = "";
    for (size_t k = 0; k < sizeof aliases / sizeof aliases[0]; k++)
        if (!strcmp(domain, aliases[k].domain) && !strcmp(op_type, aliases[k].op_type))
            return &aliases[k];
    return NULL;
}

gradd_status_t import_alias_attrs(import_t *m, const import_alias_t *alias, gradd_attrs_t *attrs) {
    if (!alias->attr || gradd_attr_find(*attrs, alias->attr->name)) return GRADD_OK;
    gradd_attr_t *v = arena_array(m->model->arena, (size_t)attrs->n + 1, sizeof *v);
    if (!v) return GRADD_E_NOMEM;
    if (attrs->n) memcpy(v, attrs->v, (size_t)attrs->n * sizeof *v);
    v[attrs->n] = *alias->attr;
    *attrs = (gradd_attrs_t){.v = v, .n = attrs->n + 1};
    return GRADD_OK;
}
