/* Internals of the ONNX import, shared by import*.c only; all other modules use model.h.
 *
 * model_load unpacks into a scratch arena and builds the model in an arena of its own. Helpers here
 * copy what they keep. Error sentences are built from the inside out: a helper names what it sees
 * ("input 1 'x' is not defined"), its caller wraps it with the node or tensor at hand.
 */
#ifndef GRADD_SERVER_GRAPH_IMPORT_H
#define GRADD_SERVER_GRAPH_IMPORT_H

#include "server/graph/arena.h"
#include "server/graph/model.h"
#include "server/graph/onnx.pb-c.h"

enum {
    IMPORT_OPSET_MIN = 13,
    IMPORT_OPSET_MAX = 25,
    IMPORT_GRADD_OPSET = 1,
    IMPORT_MAX_OPSETS = 64, /* imported domains */
    IMPORT_MAX_ATTRS = 256, /* of one node */
};

/* Element types of ONNX that constants alone have; they are i8 and u8 from here on. */
enum { IMPORT_UINT4 = 21, IMPORT_INT4 = 22 };

/* Where a value comes from: a node's index, or one of these. */
enum { IMPORT_FROM_INPUT = -1, IMPORT_FROM_INITIALIZER = -2 };

typedef struct import_def_s {
    const char *name; /* Borrowed from the unpacked model */
    int32_t from;     /* node index or IMPORT_FROM_x */
    int32_t slot;     /* position among the inputs, initializers or the node's outputs */
    int32_t id;       /* value id */
    bool dropped;     /* a result that gradd does not compute: import_alias.c */
} import_def_t;

/* An operator of ONNX that has another name in a model. */
typedef struct import_alias_s {
    const char *domain, *op_type; /* in the model */
    const char *is;               /* in ONNX's domain */
    int opset;
    const gradd_attr_t *attr; /* what it has where the node does not say; NULL: nothing */
} import_alias_t;

typedef struct import_s {
    model_limits_t limits;
    arena_t *scratch;              /* Owned by model_load */
    model_t *model;                /* Owned by model_load; model->arena is the model's own arena */
    const Onnx__ModelProto *proto; /* in scratch */
    const Onnx__GraphProto *graph; /* in scratch */
    import_def_t *defs;            /* in order of definition */
    const import_def_t **by_name;  /* sorted */
    size_t n_defs;
    int n_values_cap;
    size_t n_nodes;         /* so far, those of bodies included */
    struct import_s *outer; /* around a body; NULL: this is the model's graph */
    int32_t at;             /* the node there that has the body */
} import_t;

/* Names in messages: "%.*s" with IMPORT_TEXT(name) prints at most 80 bytes, cut between
 * characters. */
#define IMPORT_TEXT(name) import_clip(name), import_text(name)
int import_clip(const char *text);
const char *import_text(const char *text); /* "" for NULL */

/* LIMIT if longer than limits.max_name, GRAPH if it has control characters (they would garble logs
 * and terminals) or, with `required`, is empty. `what` is for the message: "attribute name". */
gradd_status_t import_check_name(const import_t *m, const char *what, const char *name,
                                 bool required);

/* import_names.c: numbers all values and finds duplicates; fills defs and by_name. */
gradd_status_t import_define_values(import_t *m);
/* NULL if nothing defines that name. */
const import_def_t *import_find(const import_t *m, const char *name);

/* import_tensor.c: checks the tensor and copies its elements to the model, aligned to
 * GRADD_TENSOR_ALIGN. Zero elements still give data != NULL. int4 and uint4 become i8 and u8. */
gradd_status_t import_tensor(import_t *m, const Onnx__TensorProto *tensor, gradd_view_t *out_view);
/* Whether it is of int4 or uint4. */
bool import_is_packed(const Onnx__TensorProto *tensor);

/* import_attr.c: op may be NULL; then attributes that gradd_attr_t cannot hold are left out. */
gradd_status_t import_attrs(import_t *m, const Onnx__NodeProto *node, const gradd_op_t *op,
                            gradd_attrs_t *out_attrs);

/* import_alias.c: NULL if the operator is no other name of one of ONNX. */
const import_alias_t *import_find_alias(const char *domain, const char *op_type);
gradd_status_t import_alias_attrs(import_t *m, const import_alias_t *alias, gradd_attrs_t *attrs);

/* import_region.c: whether a node is If, Loop or Scan, which have no row. */
bool import_is_region(const Onnx__NodeProto *node);
/* Whether it takes or gives sequences; such nodes have no row either. */
bool import_is_sequence(const Onnx__NodeProto *node);
/* The subgraphs of such a node, whose operands are known. Appends to its `in` what they read. */
gradd_status_t import_bodies(import_t *m, const Onnx__NodeProto *proto, model_node_t *node);
/* import_graph.c: the nodes of m->graph, whose values are defined, and the outputs. */
gradd_status_t import_nodes(import_t *m, model_node_t **out_nodes, int *out_n);
gradd_status_t import_outputs(import_t *m, int32_t **out_ids, int *out_n);
/* Initializers of m->graph into the values of the model, for which there is room behind. */
gradd_status_t import_create_values(import_t *m);
gradd_status_t import_initializers(import_t *m);
/* import_graph.c: values, nodes, inputs and outputs of m->graph into m->model. */
gradd_status_t import_graph(import_t *m);
/* Opset version of a domain, 0 if the model does not import it. */
int import_opset(const import_t *m, const char *domain);

#endif
