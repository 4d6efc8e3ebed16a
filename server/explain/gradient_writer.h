/* Internals of writing a model with its backward as ONNX: gradient_model.c has the model and its
 * values, gradient_messages.c makes the messages, gradient_nodes.c writes what is no operator of
 * ONNX. One thread. All memory is the writer's arena. */
#ifndef GRADD_SERVER_EXPLAIN_GRADIENT_WRITER_H
#define GRADD_SERVER_EXPLAIN_GRADIENT_WRITER_H

#include "server/explain/explain_file.h"
#include "server/graph/graph.h"

typedef struct gradient_writer_s {
    const explain_file_t *file;
    const gradd_plan_options_t *options;
    arena_t *arena; /* Owned: everything below */
    graph_t *g;     /* Owned */
    gradd_val_t *grads;
    bool *needed;       /* per node */
    const char **names; /* per value */
    const char **masks; /* per node: of a dropout's mask; NULL = nothing reads it */
    const char *prefix; /* that no name of the model begins with */
    Onnx__NodeProto **nodes;
    Onnx__TensorProto **constants;
    size_t n_nodes, cap_nodes, n_constants;
} gradient_writer_t;

/* ---- messages: all fail with NOMEM ---- */

/* A node whose names and attributes the caller fills in; NULL = no memory. */
Onnx__NodeProto *gradient_add_node(gradient_writer_t *w, const char *op, size_t n_in, size_t n_out);
gradd_status_t gradient_add_attrs(gradient_writer_t *w, Onnx__NodeProto *node, gradd_attrs_t attrs);
/* An initializer; name and elements are borrowed. */
gradd_status_t gradient_add_constant(gradient_writer_t *w, const char *name, const gradd_view_t *v);
/* An initializer of one element, 0 or 1. */
gradd_status_t gradient_add_number(gradient_writer_t *w, const char *name, const gradd_type_t *type,
                                   int k);
gradd_status_t gradient_add_identity(gradient_writer_t *w, const char *from, const char *to);
/* The description of an input or output; NULL = no memory. */
Onnx__ValueInfoProto *gradient_value_info(gradient_writer_t *w, const char *name,
                                          const gradd_type_t *type);

/* ---- nodes that are not written as they are ---- */

/* The dropout whose mask node n reads; NULL = it reads none, or that of several. */
const graph_node_t *gradient_dropout_of(const graph_t *g, const graph_node_t *n);
/* Whether gradient_write_apart writes the node. */
bool gradient_is_apart(const graph_t *g, const graph_node_t *n);
/* In other operators, from operands of these names to its first result. Fails with UNSUPPORTED,
 * NOMEM. */
gradd_status_t gradient_write_apart(gradient_writer_t *w, const graph_node_t *n,
                                    const char *const *in, const char *out);

#endif
