/* An imported ONNX model: validated, shape-agnostic, immutable.
 *
 * model_load turns bytes into this form: it scans them iteratively before protobuf-c sees them
 * (depth, sizes, heap budget), unpacks, validates (names, topological order, arity, attributes,
 * initializer sizes) and resolves every node to its operator row. Nothing here depends on input
 * shapes; plan/ compiles a model for one tuple of concrete shapes. A graph opens no files.
 *
 * All memory belongs to the model. Thread: any, one at a time; const use from several is fine.
 */
#ifndef GRADD_SERVER_GRAPH_MODEL_H
#define GRADD_SERVER_GRAPH_MODEL_H

#include "kernels/contract/op.h"

/* Limits on what a model may claim; they bound memory and time before anything is allocated. */
typedef struct model_limits_s {
    size_t max_bytes;      /* of the serialized model; default 2 GiB */
    size_t max_heap_bytes; /* estimated heap after unpacking; default 1 GiB, and never more than
                            * 256 MiB and 16 times the bytes of the model */
    int max_depth;         /* nesting of messages; default 64 */
    int max_nodes;         /* default 200000 */
    int max_values;        /* default 1000000 */
    int max_name;          /* bytes of one name; default 1024 */
} model_limits_t;

extern const model_limits_t model_default_limits;

typedef struct model_value_s {
    const char *name;             /* "" for an absent optional value */
    gradd_view_t known;           /* initializer: type and elements; else data == NULL */
    bool packed;                  /* a constant of int4 or uint4, or made of one */
    gradd_dtype_t dtype;          /* declared for graph inputs, else GRADD_DT_NONE */
    int rank;                     /* declared rank of a graph input, -1 = not declared */
    int64_t dims[GRADD_MAX_RANK]; /* declared dims of a graph input, -1 = dynamic */
    const char **symbols;         /* names of its dynamic dims, "" = none; NULL: no dim has one */
} model_value_t;

struct model_node_s;

/* A subgraph. Its values are among those of the model, and it reads others of these as well. */
typedef struct model_body_s {
    struct model_node_s *nodes; /* in topological order */
    int n_nodes;
    int32_t *inputs, *outputs; /* value ids */
    int n_inputs, n_outputs;
} model_body_t;

typedef struct model_node_s {
    const gradd_op_t *op; /* NULL if unsupported; then the model loads but cannot be planned */
    const char *op_type, *domain;
    const char *name; /* "node_17" style if the file gave none */
    int index;        /* position in the file: Philox coordinate, error messages */
    int opset;        /* of the node's domain */
    gradd_attrs_t attrs;
    int n_in, n_out;
    const int32_t *in, *out; /* value ids; -1 = absent optional */
    /* of If those of then and else, of Loop and Scan one; such nodes have no row. Behind their
     * n_given operands, `in` lists what the bodies read from around them. */
    model_body_t *bodies;
    int n_bodies, n_given;
    bool sequence;    /* it takes or gives sequences of tensors; such nodes have no row */
    bool unsupported; /* of the model's graph: it, or one in its bodies, lacks a row */
} model_node_t;

typedef struct model_s {
    void *arena; /* Owned: everything below */
    int opset;   /* of ai.onnx */
    model_value_t *values;
    int n_values;
    model_node_t *nodes; /* in topological order */
    int n_nodes;
    int32_t *inputs; /* value ids; initializers are not inputs unless listed as such */
    int n_inputs;
    int32_t *outputs;
    int n_outputs;
    model_value_t *declared; /* per output what the file says of it, which nothing relies on */
    int32_t *unsupported;    /* nodes without a row */
    int n_unsupported;
    bool random;          /* it draws random numbers */
    gradd_dtype_t half;   /* the coarsest 16-bit float that it computes with; NONE = none */
    const uint8_t *reach; /* per output reach_bytes: bit i is set if a gradient of it can reach
                           * input i. Shapes are not known: a plan may find no path (an axis is
                           * empty, a factor known), never one that is not here. What
                           * GRADD_OP_FLAT operators make reaches their inputs, with zeros */
    size_t reach_bytes;
} model_t;

/* limits NULL = defaults. Errors: MODEL (bytes are not ONNX, name where it broke), GRAPH (invalid;
 * names node, value, attribute), LIMIT, EXTDATA, UNSUPPORTED (opset, other
 * subgraphs than those of If, Loop and Scan, element types),
 * NOMEM. An operator without a row is not an error here. */
gradd_status_t model_load(const void *bytes, size_t n, const model_limits_t *limits,
                          model_t **out_model);
void model_destroy(model_t *model); /* accepts NULL */

/* Makes these values outputs, behind those there are; before anything else uses the model. Errors:
 * LIMIT, NOMEM. */
gradd_status_t model_add_outputs(model_t *model, const int32_t *values, int n);
/* Marks all values that the marked ones are computed from (needed: per value). */
void model_mark_needed(const model_t *model, bool *needed);
/* Leaves out the nodes without a needed result (needed: per value). Outputs that they made must not
 * be asked for any more. */
void model_drop_nodes(model_t *model, const bool *needed);

/* Fills random, half and reach; the last part of model_load. Errors: LIMIT, NOMEM. */
gradd_status_t model_find_facts(model_t *model);

/* Iterative scan of serialized ONNX before it is unpacked; *out_heap is an upper estimate. */
gradd_status_t model_prescan(const void *bytes, size_t n, const model_limits_t *limits,
                             size_t *out_heap);

#endif
