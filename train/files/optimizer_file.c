/* Kind and constants of an optimizer model, as generate_artifacts writes it: a node AdamWOptimizer
 * or SGDOptimizerV2 of com.microsoft, perhaps behind one that clips the gradients' norm.
 *
 * Defaults of attributes are those of ONNX Runtime 1.19.2's schemas. SGD's momentum and weight
 * decay are attributes that only gradd has; ONNX Runtime refuses a model with them, as it should:
 * it would train without.
 */
#include <stdlib.h>
#include <string.h>

#include "platform/platform.h"
#include "train/files/proto.h"
#include "train/gradd_train.h"

#define MAX_MODEL (1 << 20) /* bytes: it holds no parameters */

typedef struct node_s {
    proto_span_t op, domain;
    proto_span_t whole; /* the message */
} node_t;

/* An attribute's place for its value, found by name. */
typedef struct setting_s {
    const char *name;
    double *value;
} setting_t;

static gradd_status_t read_node(proto_span_t message, node_t *out_node) {
    proto_field_t field;
    bool more;
    *out_node = (node_t){.whole = message};
    for (;;) {
        GRADD_TRY(proto_next(&message, &field, &more));
        if (!more) return GRADD_OK;
        if (field.id == PROTO_NODE_OP) out_node->op = field.bytes;
        if (field.id == PROTO_NODE_DOMAIN) out_node->domain = field.bytes;
    }
}

static gradd_status_t read_attribute(proto_span_t message, proto_span_t *out_name,
                                     double *out_value) {
    proto_field_t field;
    bool more;
    *out_name = (proto_span_t){0};
    *out_value = 0;
    for (;;) {
        GRADD_TRY(proto_next(&message, &field, &more));
        if (!more) return GRADD_OK;
        if (field.id == PROTO_ATTRIBUTE_NAME) *out_name = field.bytes;
        if (field.id == PROTO_ATTRIBUTE_INT) *out_value = (double)(int64_t)field.number;
        if (field.id == PROTO_ATTRIBUTE_FLOAT) {
            float value;
            memcpy(&value, &field.number, sizeof value);
            *out_value = (double)value;
        }
    }
}

/* Gives each attribute of a node to its setting; one that is not in the list fails. */
static gradd_status_t read_settings(const node_t *node, const setting_t *settings, size_t n) {
    proto_span_t rest = node->whole;
    proto_field_t field;
    bool more;
    for (;;) {
        GRADD_TRY(proto_next(&rest, &field, &more));
        if (!more) return GRADD_OK;
        if (field.id != PROTO_NODE_ATTRIBUTE) continue;
        proto_span_t name;
        double value;
        size_t i = 0;
        GRADD_TRY(read_attribute(field.bytes, &name, &value));
        while (i < n && !proto_is(name, settings[i].name))
            i++;
        if (i == n)
            return GRADD_FAIL(UNSUPPORTED, "%.*s has an attribute '%.*s', which is not known",
                              (int)node->op.n, (const char *)node->op.at, (int)name.n,
                              (const char *)name.at);
        *settings[i].value = value;
    }
}

static gradd_status_t read_adamw(const node_t *node, gradd_train_optimizer_t *optimizer) {
    double mode = 0, correct = 1;
    optimizer->beta1 = (double)0.9f;
    optimizer->beta2 = (double)0.999f;
    optimizer->eps = (double)1e-8f;
    optimizer->weight_decay = (double)1e-2f;
    const setting_t settings[] = {
        {"alpha",        &optimizer->beta1       },
        {"beta",         &optimizer->beta2       },
        {"epsilon",      &optimizer->eps         },
        {"weight_decay", &optimizer->weight_decay},
        {"adam_mode",    &mode                   },
        {"correct_bias", &correct                },
    };
    GRADD_TRY(read_settings(node, settings, sizeof settings / sizeof settings[0]));
    if (mode != 0 && mode != 1)
        return GRADD_FAIL(UNSUPPORTED, "AdamWOptimizer: adam_mode %g, expected 0 or 1", mode);
    optimizer->kind = GRADD_TRAIN_ADAMW;
    optimizer->mode = mode == 0 ? GRADD_ADAMW_TORCH : GRADD_ADAMW_TRANSFORMERS;
    optimizer->bias_correction = correct != 0;
    return GRADD_OK;
}

static gradd_status_t read_sgd(const node_t *node, gradd_train_optimizer_t *optimizer) {
    const setting_t settings[] = {
        {"momentum",     &optimizer->momentum    },
        {"weight_decay", &optimizer->weight_decay},
    };
    optimizer->kind = GRADD_TRAIN_SGD;
    return read_settings(node, settings, sizeof settings / sizeof settings[0]);
}

static gradd_status_t read_clip(const node_t *node, gradd_train_optimizer_t *optimizer) {
    optimizer->max_norm = 1;
    const setting_t settings[] = {
        {"max_norm", &optimizer->max_norm}
    };
    return read_settings(node, settings, 1);
}

static gradd_status_t use_node(proto_span_t message, gradd_train_optimizer_t *optimizer) {
    node_t node;
    GRADD_TRY(read_node(message, &node));
    const bool ours = proto_is(node.domain, "com.microsoft");
    if (ours && proto_is(node.op, "InplaceClipGradNorm")) return read_clip(&node, optimizer);
    const bool adamw = ours && proto_is(node.op, "AdamWOptimizer");
    if (!adamw && !(ours && proto_is(node.op, "SGDOptimizerV2")))
        return GRADD_FAIL(UNSUPPORTED,
                          "node %.*s of domain '%.*s', expected AdamWOptimizer, "
                          "SGDOptimizerV2 or InplaceClipGradNorm of com.microsoft",
                          (int)node.op.n, (const char *)node.op.at, (int)node.domain.n,
                          (const char *)node.domain.at);
    if (optimizer->kind != GRADD_TRAIN_NO_OPTIMIZER)
        return GRADD_FAIL(UNSUPPORTED, "two optimizers in one model, expected one");
    return adamw ? read_adamw(&node, optimizer) : read_sgd(&node, optimizer);
}

static gradd_status_t use_graph(proto_span_t message, gradd_train_optimizer_t *optimizer) {
    proto_field_t field;
    bool more;
    for (;;) {
        GRADD_TRY(proto_next(&message, &field, &more));
        if (!more) return GRADD_OK;
        if (field.id == PROTO_GRAPH_NODE) GRADD_TRY(use_node(field.bytes, optimizer));
    }
}

static gradd_status_t use_model(proto_span_t message, gradd_train_optimizer_t *optimizer) {
    proto_field_t field;
    bool more;
    for (;;) {
        GRADD_TRY(proto_next(&message, &field, &more));
        if (!more) break;
        if (field.id == PROTO_MODEL_GRAPH) GRADD_TRY(use_graph(field.bytes, optimizer));
    }
    if (optimizer->kind == GRADD_TRAIN_NO_OPTIMIZER)
        return GRADD_FAIL(MODEL, "no node AdamWOptimizer or SGDOptimizerV2");
    return GRADD_OK;
}

gradd_status_t gradd_train_optimizer_load(const gradd_train_model_t *model,
                                          gradd_train_optimizer_t *out_optimizer) {
    gradd_train_optimizer_t optimizer = {0};
    proto_span_t bytes = {model->bytes, model->n};
    void *read = NULL;
    if (!model->bytes && !model->path)
        return GRADD_FAIL(IO, "optimizer model: neither bytes nor a path are given");
    if (!model->bytes) {
        GRADD_TRY(gradd_platform.read_file(model->path, MAX_MODEL, &read, &bytes.n));
        bytes.at = read;
    }
    const gradd_status_t status = use_model(bytes, &optimizer);
    free(read);
    if (status != GRADD_OK) return gradd_wrap(status, "optimizer model");
    *out_optimizer = optimizer;
    return GRADD_OK;
}
