/* What an export asks of a node of an ONNX graph, as it lies in the file. */
#ifndef GRADD_TRAIN_FILES_NODES_H
#define GRADD_TRAIN_FILES_NODES_H

#include "train/files/proto.h"

/* Nodes that behave otherwise in training. BatchNormInternal is BatchNormalization as ONNX Runtime
 * trains it. */
typedef enum node_kind_e { NODE_ORDINARY, NODE_DROPOUT, NODE_NORM } node_kind_t;

gradd_status_t node_find_kind(proto_span_t node, node_kind_t *out_kind);

typedef gradd_status_t (*node_visit_t)(void *context, proto_span_t name);

/* Calls `visit` with every name that the nodes of its subgraphs read, at any depth. Errors:
 * UNSUPPORTED (one of them behaves otherwise in training, or there is a list of subgraphs), MODEL,
 * and those of `visit`. */
gradd_status_t node_visit_bodies(proto_span_t node, node_visit_t visit, void *context);

#endif
